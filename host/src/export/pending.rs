//! The folder of an export while it is written: beside its place, locked, and renamed when it is whole.

use super::tensor::ExportTensor;
use crate::error::{Error, Result};
use crate::report::{bytes, note};
use crate::run::atomic::{folder_of, leftovers, make_beside, sync_folder};
use crate::run::machine::free_disk_bytes;
use crate::run::signal;
use safetensors::{Dtype, SafeTensorError, View};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A folder that is written beside its place and renamed when it is whole. While it is written it is locked, so that what a
/// killed process left can be told from what another one is writing.
pub struct PendingFolder {
    temporary: PathBuf,
    place: PathBuf,
    /// Held while the folder is renamed or removed; for good once a signal ends the process.
    ending: Arc<Mutex<()>>,
    free_bytes: fn(&Path) -> Option<u64>,
    _lock: Option<fs::File>,
}

impl PendingFolder {
    /// A folder that is to be called `place`, where there is nothing yet, or an empty folder. What a killed process left of the
    /// same is removed.
    ///
    /// # Errors
    /// `usage::invalid_value` for a path without a name, `export::exists`, `export::in_use` where another process writes the same,
    /// class `io`.
    pub fn new(place: &Path) -> Result<Self> {
        let Some(place) = std::path::absolute(place).ok().filter(|place| place.file_name().is_some()) else {
            let message = format!("{:?} names no folder that can be written", place.display().to_string());
            return Err(Error::new("usage::invalid_value", message).expected("the path of a new folder"));
        };
        if let Some(error) = taken(&place) {
            return Err(error);
        }
        let (temporary, ()) = make_beside(&place, |path| fs::create_dir(path))
            .map_err(|e| e.expected(format!("that {} can be made", place.display())))?;
        // Where folders cannot be locked, none is taken for a leftover.
        let lock = fs::File::open(&temporary).ok().filter(|folder| folder.try_lock().is_ok());
        let pending = Self { temporary, place, ending: Arc::default(), free_bytes: free_disk_bytes, _lock: lock };
        for leftover in leftovers(&pending.place).into_iter().filter(|leftover| *leftover != pending.temporary) {
            remove_unless_locked(&leftover, &pending.place)?;
        }
        Ok(pending)
    }

    /// From now on SIGINT, SIGTERM and SIGHUP remove what was written and end the process with 128 and the signal's number.
    ///
    /// # Errors
    /// `io::signal`.
    pub fn remove_on_signal(&self) -> Result<()> {
        let failed = |e| Error::new("io::signal", format!("cannot handle signals: {e}")).source(e);
        let mut signals = Signals::new(signal::ending()).map_err(failed)?;
        signal::let_large_writes_fail().map_err(failed)?;
        let (temporary, place, ending) = (self.temporary.clone(), self.place.clone(), self.ending.clone());
        let end = move || {
            let Some(signal) = signals.forever().next() else { return };
            let _ending = ending.lock().unwrap_or_else(PoisonError::into_inner);
            if temporary.exists() {
                note(format_args!("stopped by a signal: nothing is left of the export to {}", place.display()));
            }
            // Another thread may be making a file in it.
            while fs::remove_dir_all(&temporary).is_err_and(|e| e.kind() == ErrorKind::DirectoryNotEmpty) {}
            low_level::exit(128 + signal);
        };
        thread::Builder::new().name("signals".into()).spawn(end).map_err(failed)?;
        Ok(())
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
    pub(super) fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let from = from.join(name);
        if from.exists() {
            fs::copy(&from, self.path(name)).map_err(|e| Error::io("copy", &from, e))?;
        }
        Ok(())
    }

    /// A safetensors file, tensor after tensor; `written` is told the bytes of each.
    pub(super) fn write_tensors(
        &self,
        name: &str,
        tensors: Vec<(String, ExportTensor)>,
        written: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let path = self.path(name);
        let written = RefCell::new(written);
        let written: &dyn Fn(usize) = &|bytes| (written.borrow_mut())(bytes);
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, Counted { tensor, written }));
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
    pub(super) fn check_space(&self, needed: u64) -> Result<()> {
        let free = (self.free_bytes)(&self.temporary).unwrap_or(u64::MAX);
        match free >= needed {
            true => Ok(()),
            false => Err(Error::new(
                "export::disk_full",
                format!("{} has {} free", folder_of(&self.place).display(), bytes(free as usize)),
            )
            .expected(format!("{} for the export", bytes(needed as usize)))
            .help("make room there, or name another disk with --out")),
        }
    }

    /// Give it its name, now that it is whole.
    ///
    /// # Errors
    /// `export::exists` where the name was taken meanwhile; class `io`.
    pub fn commit(self) -> Result<()> {
        for entry in fs::read_dir(&self.temporary).map_err(|e| Error::io("list", &self.temporary, e))? {
            let path = entry.map_err(|e| Error::io("list", &self.temporary, e))?.path();
            fs::File::open(&path).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync", &path, e))?;
        }
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        // Only an empty folder is replaced.
        fs::rename(&self.temporary, &self.place).map_err(|e| {
            let meanwhile = taken(&self.place).map(|e| e.help("it was made while the export was written"));
            meanwhile.unwrap_or_else(|| Error::io("rename", &self.temporary, e))
        })?;
        sync_folder(folder_of(&self.place))
    }
}

impl Drop for PendingFolder {
    /// What was not committed goes; after a commit there is nothing under this name.
    fn drop(&mut self) {
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// A tensor that says when it is written.
struct Counted<'a, 'b> {
    tensor: ExportTensor<'a>,
    written: &'b dyn Fn(usize),
}

impl View for Counted<'_, '_> {
    fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let data = self.tensor.data();
        (self.written)(data.len());
        data
    }

    fn data_len(&self) -> usize {
        self.tensor.data_len()
    }
}

/// An error where `place` is anything but a free name or an empty folder.
fn taken(place: &Path) -> Option<Error> {
    let found = place.symlink_metadata().ok()?;
    let what = match fs::read_dir(place).map(|mut entries| entries.next().is_none()) {
        _ if found.is_symlink() => "is a link",
        Ok(true) => return None,
        Ok(false) => "is a folder with something in it",
        Err(_) if found.is_dir() => "is a folder that cannot be looked into",
        Err(_) => "is a file",
    };
    let error = Error::new("export::exists", format!("{} exists already and {what}", place.display()));
    Some(
        error
            .expected("a folder that does not exist yet, or an empty one")
            .help("name another folder; nothing is overwritten"),
    )
}

/// Removes the files of `folder` and the folder, unless it holds what no export does.
///
/// # Errors
/// `export::in_use` where a process is writing it, class `io`.
fn remove_unless_locked(folder: &Path, place: &Path) -> Result<()> {
    let Ok(opened) = fs::File::open(folder) else { return Ok(()) };
    match opened.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = format!("another process is writing {}", place.display());
            return Err(Error::new("export::in_use", message)
                .expected("one export at a time to a folder")
                .help("wait until it ends, or name another folder"));
        }
        Err(TryLockError::Error(_)) => return Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::{carry_out, tuned};
    use crate::model::checkpoint::Checkpoint;
    use crate::model::config::TextConfig;
    use crate::model::fixtures::fixture;
    use crate::model::peft;
    use crate::model::spec::ModelSpec;
    use crate::plugins::{Exporter, Kind, PluginRef};
    use burn::tensor::Device;

    /// The error of an export to `place`.
    fn refused(place: &Path) -> Error {
        PendingFolder::new(place).err().expect("refused")
    }

    #[test]
    fn what_a_killed_export_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (place, at) = (dir.path().join("out"), |name: &str| dir.path().join(name));
        let folder = |name: &str| {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("model.safetensors"), b"half").unwrap();
        };
        [".out.tmp-1", ".out.tmp-12-2", ".out.tmp-mine", ".out2.tmp-1", ".out.tmp-3"].into_iter().for_each(folder);
        fs::create_dir(at(".out.tmp-3/kept")).unwrap();
        fs::write(at(".out.tmp-4"), b"no folder").unwrap();
        let writing = PendingFolder::new(&place).unwrap();
        let left = [".out.tmp-1", ".out.tmp-12-2", ".out.tmp-mine", ".out2.tmp-1", ".out.tmp-3/kept", ".out.tmp-4"]
            .map(|name| at(name).exists());
        assert_eq!(left, [false, false, true, true, true, true]);
        // A second one to the same place goes, and the first one stays.
        assert_eq!(refused(&place).code(), "export::in_use");
        assert!(writing.temporary().exists() && leftovers(&place).len() == 2);
        writing.commit().unwrap();
        assert!(place.exists());
    }

    #[test]
    fn a_place_is_free_or_an_empty_folder_before_and_after() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), b"").unwrap();
        fs::create_dir(at("full")).unwrap();
        fs::write(at("full/of"), b"it").unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("link")).unwrap();
        for (place, what) in [("file", "is a file"), ("full", "with something in it"), ("link", "is a link")] {
            let error = refused(&at(place));
            assert!(error.code() == "export::exists" && error.message().contains(what), "{error}");
        }
        for (place, help) in [("none/out", "whether the path is right"), ("file/out", "name another place")] {
            let error = refused(&at(place));
            assert!(error.code() == "io::failed" && error.to_string().contains(help), "{error}");
        }
        for place in ["", "/", "out/.."] {
            assert_eq!(refused(Path::new(place)).code(), "usage::invalid_value");
        }
        fs::create_dir(at("empty")).unwrap();
        let pending = PendingFolder::new(&at("empty")).unwrap();
        pending.write("a", b"whole").unwrap();
        pending.commit().unwrap();
        assert_eq!(fs::read(at("empty/a")).unwrap(), b"whole");

        let pending = PendingFolder::new(&at("late")).unwrap();
        fs::create_dir(at("late")).unwrap();
        fs::write(at("late/b"), b"theirs").unwrap();
        let error = pending.commit().unwrap_err();
        assert!(
            error.code() == "export::exists" && error.to_string().contains("while the export was written"),
            "{error}"
        );
        assert!(leftovers(&at("late")).is_empty() && fs::read(at("late/b")).unwrap() == b"theirs");
    }

    #[test]
    fn all_that_is_written_must_fit_on_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let base = fixture("tiny-base");
        let checkpoint = Checkpoint::open(&base).unwrap();
        let (spec, _) = ModelSpec::check(&TextConfig::read(&base).unwrap(), &checkpoint.shapes()).unwrap();
        let adapter = peft::read(&fixture("tune"), &spec, &Device::flex()).unwrap();
        let tuned = tuned(&adapter, &spec, &checkpoint, Some("a template")).unwrap();
        type Free = fn(&Path) -> Option<u64>;
        // Room for the tensors (7,035,234 and 3,570,000 bytes), and not for the tokenizer beside them.
        let cases: [(&str, Free, Free); 2] = [
            ("merge-bf16", |_| Some(7_060_000), |_| Some(7_400_000)),
            ("gguf", |_| Some(3_600_000), |_| Some(3_900_000)),
        ];
        for (exporter, too_little, enough) in cases {
            let mut plugin = Exporter::load(&PluginRef::resolve(Kind::Exporter, exporter, &[]).unwrap(), None).unwrap();
            let plan = plugin.plan(&tuned).unwrap();
            let mut pending = PendingFolder::new(&dir.path().join(exporter)).unwrap();
            pending.free_bytes = too_little;
            let mut told = Vec::new();
            let mut progress = |done, total| told.push((done, total));
            let error = carry_out(&plan, &adapter, &checkpoint, &pending, &mut |_| Ok(()), &mut progress).unwrap_err();
            assert_eq!((error.code(), pending.size().unwrap().0), ("export::disk_full", 0), "{error}");
            pending.free_bytes = enough;
            carry_out(&plan, &adapter, &checkpoint, &pending, &mut |_| Ok(()), &mut progress).unwrap();
            let written = pending.size().unwrap().1 as u64;
            assert!(told.is_sorted() && told.iter().all(|(_, total)| *total == told.last().unwrap().0), "{told:?}");
            let [too_little, enough] = [too_little, enough].map(|free| free(dir.path()).unwrap());
            assert!((too_little..enough).contains(&written), "{exporter}: {written}");
        }
    }
}
