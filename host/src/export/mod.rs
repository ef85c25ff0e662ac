//! What a run leaves behind for others: what an exporter plugin lays out, such as the adapter as PEFT reads it, and the
//! base with the adapter merged in.
//!
//! A folder appears under its final name only when it is whole.

mod carry_out;
pub mod merge;
mod proof;
mod quantize;
mod search;
pub mod source;
mod tensor;

pub use carry_out::{ChooseScales, carry_out, tuned};
pub use proof::{Judge, OnDisk, Proof, Verdict};
pub use search::{SearchReport, search_scales};
pub use tensor::QuantizedWeight;

use crate::error::{Error, Result};
use crate::report::bytes;
use crate::run::atomic::{folder_of, make_beside, sync_folder};
use crate::run::machine::free_disk_bytes;
use safetensors::SafeTensorError;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tensor::ExportTensor;

/// A folder that is written beside its place and renamed when it is whole.
pub struct PendingFolder {
    temporary: PathBuf,
    place: PathBuf,
}

impl PendingFolder {
    /// A folder that is to be called `place`.
    ///
    /// # Errors
    /// `export::exists`, class `io`.
    pub fn new(place: &Path) -> Result<Self> {
        if place.exists() {
            return Err(Error::new("export::exists", format!("{} exists already", place.display()))
                .expected("a folder that does not exist yet")
                .help("name another folder; nothing is overwritten"));
        }
        let (temporary, ()) = make_beside(place, |path| fs::create_dir(path))?;
        Ok(Self { temporary, place: place.into() })
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
