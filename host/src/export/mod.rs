//! What a run leaves behind for others: what an exporter plugin lays out, such as the adapter as PEFT reads it, and the
//! base with the adapter merged in.
//!
//! A folder appears under its final name only when it is whole.

mod blocks;
mod carry_out;
mod gguf;
mod judged;
mod proof;
mod quantize;
mod search;
pub mod source;
mod tensor;
mod vocabulary;

pub use carry_out::{ChooseScales, carry_out, tuned, untrained};
pub use judged::{MIN_RETAINED_GAIN, Made, Trial, judge};
pub use proof::{Judge, OnDisk, Proof, Verdict};
pub use search::{SearchReport, search_scales};
pub use tensor::QuantizedWeight;

use crate::error::{Error, Result};
use crate::report::bytes;
use crate::run::atomic::{folder_of, leftovers, make_beside, sync_folder};
use crate::run::machine::free_disk_bytes;
use safetensors::SafeTensorError;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tensor::ExportTensor;

/// A folder that is written beside its place and renamed when it is whole. While it is written it is locked, so that what a
/// killed process left can be told from what another one is writing.
pub struct PendingFolder {
    temporary: PathBuf,
    place: PathBuf,
    _lock: Option<fs::File>,
}

impl PendingFolder {
    /// A folder that is to be called `place`. What a killed process left of the same is removed.
    ///
    /// # Errors
    /// `export::exists`, class `io`.
    pub fn new(place: &Path) -> Result<Self> {
        if place.exists() {
            return Err(Error::new("export::exists", format!("{} exists already", place.display()))
                .expected("a folder that does not exist yet")
                .help("name another folder; nothing is overwritten"));
        }
        for leftover in leftovers(place) {
            remove_unless_locked(&leftover)?;
        }
        let (temporary, ()) = make_beside(place, |path| fs::create_dir(path))?;
        // Where folders cannot be locked, none is taken for a leftover.
        let lock = fs::File::open(&temporary).ok().filter(|folder| folder.try_lock().is_ok());
        Ok(Self { temporary, place: place.into(), _lock: lock })
    }

    /// Number and bytes of its files.
    ///
    /// # Errors
    /// Class `io`.
    pub fn size(&self) -> Result<(usize, usize)> {
        let failed = |e| Error::io("list", &self.temporary, e);
        let sizes = fs::read_dir(&self.temporary).map_err(failed)?.map(|entry| entry?.metadata());
        let sizes = sizes.map(|found| found.map(|found| found.len() as usize).map_err(failed));
        let sizes: Vec<usize> = sizes.collect::<Result<_>>()?;
        Ok((sizes.len(), sizes.iter().sum()))
    }

    /// Where it is until it is whole.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    /// A file of these bytes.
    ///
    /// # Errors
    /// Class `io`.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, bytes).map_err(|e| Error::io("write", &path, e))
    }

    /// The file `name` of the folder `from`, where it has one.
    fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let from = from.join(name);
        if from.exists() {
            fs::copy(&from, self.path(name)).map_err(|e| Error::io("copy", &from, e))?;
        }
        Ok(())
    }

    /// A safetensors file, tensor after tensor.
    fn write_tensors(&self, name: &str, tensors: Vec<(String, ExportTensor)>) -> Result<()> {
        let path = self.path(name);
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::serialize_to_file(tensors, Some(metadata), &path).map_err(|e| match e {
            SafeTensorError::IoError(e) => Error::io("write", &path, e),
            e => Error::new("io::failed", format!("cannot write {}: {e}", path.display())).source(e),
        })?;
        readable_as(&self.temporary, &path)
    }

    /// Refuse where the disk holds less than `needed` bytes.
    ///
    /// # Errors
    /// `export::disk_full`.
    fn check_space(&self, needed: u64) -> Result<()> {
        let free = free_disk_bytes(&self.temporary).unwrap_or(u64::MAX);
        match free >= needed {
            true => Ok(()),
            false => Err(Error::new(
                "export::disk_full",
                format!("{} has {} free", folder_of(&self.place).display(), bytes(free as usize)),
            )
            .expected(format!("{} for the export", bytes(needed as usize)))
            .help("name another disk with --out")),
        }
    }

    /// Give it its name, now that it is whole.
    ///
    /// # Errors
    /// Class `io`.
    pub fn commit(self) -> Result<()> {
        for entry in fs::read_dir(&self.temporary).map_err(|e| Error::io("list", &self.temporary, e))? {
            let path = entry.map_err(|e| Error::io("list", &self.temporary, e))?.path();
            fs::File::open(&path).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync", &path, e))?;
        }
        fs::rename(&self.temporary, &self.place).map_err(|e| Error::io("rename", &self.temporary, e))?;
        sync_folder(folder_of(&self.place))
    }
}

/// Removes the files of `folder` and the folder, unless a process is writing it, or it holds what no export does.
fn remove_unless_locked(folder: &Path) -> Result<()> {
    let Some(_lock) = fs::File::open(folder).ok().filter(|folder| folder.try_lock().is_ok()) else { return Ok(()) };
    let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
    let entries = entries.map_err(|e| Error::io("list", folder, e))?;
    if !entries.iter().all(|entry| entry.file_type().is_ok_and(|kind| kind.is_file())) {
        return Ok(());
    }
    let removed = entries.iter().try_for_each(|entry| fs::remove_file(entry.path()));
    removed.and_then(|()| fs::remove_dir(folder)).map_err(|e| Error::io("remove", folder, e))
}

/// The writer of safetensors makes files that nobody else can read; a server that runs as another user must: whoever can read
/// the folder can read the file.
#[cfg(unix)]
fn readable_as(folder: &Path, file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(folder).map_err(|e| Error::io("look at", folder, e))?.permissions().mode();
    fs::set_permissions(file, fs::Permissions::from_mode(mode & 0o666)).map_err(|e| Error::io("share", file, e))
}

#[cfg(not(unix))]
fn readable_as(_: &Path, _: &Path) -> Result<()> {
    Ok(())
}

impl Drop for PendingFolder {
    /// What was not committed goes; after a commit there is nothing under this name.
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_export_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (place, at) = (dir.path().join("out"), |name: &str| dir.path().join(name));
        let folder = |name: &str| {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("model.safetensors"), b"half").unwrap();
        };
        let writing = PendingFolder::new(&place).unwrap();
        [".out.tmp-1", ".out.tmp-12-2", ".out.tmp-mine", ".out2.tmp-1", ".out.tmp-3"].into_iter().for_each(folder);
        fs::create_dir(at(".out.tmp-3/kept")).unwrap();
        fs::write(at(".out.tmp-4"), b"no folder").unwrap();
        let second = PendingFolder::new(&place).unwrap();
        assert!(writing.temporary().exists() && writing.temporary() != second.temporary());
        let left = [".out.tmp-1", ".out.tmp-12-2", ".out.tmp-mine", ".out2.tmp-1", ".out.tmp-3/kept", ".out.tmp-4"]
            .map(|name| at(name).exists());
        assert_eq!(left, [false, false, true, true, true, true]);
        let error = second.check_space(u64::MAX).unwrap_err();
        assert_eq!(error.code(), "export::disk_full");
    }
}
