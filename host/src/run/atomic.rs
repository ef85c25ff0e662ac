//! Files that are there whole or not at all, even after a power cut: written beside their place, synced, renamed, and
//! the folder synced.
//!
//! What a killed process leaves beside (`.name.tmp-<pid>`) is never read, and removed by nothing here.

use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What to do where a file already has the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// An error: nobody said whose it is.
    Refuse,
    /// Replace it: the caller wrote it.
    Replace,
}

/// Writes `bytes` to `path`, whole or not at all.
///
/// # Errors
/// `run::exists` where `existing` is [`Existing::Refuse`] and the name is taken; class `io` otherwise, with what was
/// written so far removed.
pub fn write(path: &Path, bytes: &[u8], existing: Existing) -> Result<()> {
    if existing == Existing::Refuse && taken(path) {
        let message = format!("{} exists already and is not overwritten", path.display());
        return Err(Error::new("run::exists", message).help("move it away, or name another place"));
    }
    let (beside, mut file) = make_beside(path, |beside| File::create_new(beside))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    if let Err(e) = written {
        // Best effort: the error that matters is the first one.
        _ = fs::remove_file(&beside);
        return Err(Error::io("write", path, e));
    }
    sync_folder(folder_of(path))
}

/// Writes a file that takes its place with the folder that it is in.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = File::create_new(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|e| Error::io("write", path, e))
}

/// Makes a file or folder that takes the place of `path` later, under the first free name `.name.tmp-<pid>[-n]`. In a
/// container a killed process often had the same pid, so that its leftover may hold the first name.
pub(crate) fn make_beside<T>(path: &Path, make: impl Fn(&Path) -> io::Result<T>) -> Result<(PathBuf, T)> {
    let mut name = beside(path);
    name.push(std::process::id().to_string());
    make_first_free(&folder_of(path).join(name), make)
}

/// What the names of [`make_beside`] begin with.
fn beside(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp-");
    name
}

/// Folders with a name of [`make_beside`], of this or another process. Whoever removes one finds out first whether it is still
/// being written.
pub(crate) fn leftovers(path: &Path) -> Vec<PathBuf> {
    let beside = beside(path);
    let ours = |name: &OsString| {
        let number = name.as_encoded_bytes().strip_prefix(beside.as_encoded_bytes());
        number.is_some_and(|rest| !rest.is_empty() && rest.iter().all(|byte| byte.is_ascii_digit() || *byte == b'-'))
    };
    let entries = fs::read_dir(folder_of(path)).into_iter().flatten().flatten();
    entries.filter(|entry| ours(&entry.file_name()) && entry.path().is_dir()).map(|entry| entry.path()).collect()
}

/// Makes a file or folder under the first free name of `path`, `path-2`, `path-3` and so on.
pub(crate) fn make_first_free<T>(path: &Path, make: impl Fn(&Path) -> io::Result<T>) -> Result<(PathBuf, T)> {
    let mut candidate = path.to_path_buf();
    let mut number = 1;
    loop {
        match make(&candidate) {
            Ok(made) => return Ok((candidate, made)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                number += 1;
                let mut name = path.as_os_str().to_os_string();
                name.push(format!("-{number}"));
                candidate = name.into();
            }
            Err(e) => return Err(Error::io("create", &candidate, e)),
        }
    }
}

/// Renames `path` to the first free name of `path.why`, `path.why-2` and so on, and returns it.
///
/// # Errors
/// Class `io`.
pub(crate) fn set_aside(path: &Path, why: &str) -> Result<PathBuf> {
    let (target, ()) = make_first_free(&path.with_extension(why), |target| {
        if taken(target) { Err(io::ErrorKind::AlreadyExists.into()) } else { fs::rename(path, target) }
    })?;
    Ok(target)
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| Error::io("sync", folder, e))
}

/// Whether anything has this name, a dangling link included.
pub(crate) fn taken(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The folder that holds `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_only_by_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write(&path, b"one", Existing::Refuse).unwrap();
        assert_eq!(write(&path, b"two", Existing::Refuse).unwrap_err().code(), "run::exists");
        assert_eq!(fs::read(&path).unwrap(), b"one");
        write(&path, b"three", Existing::Replace).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_leftover_of_the_same_pid_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let leftover = format!(".a.json.tmp-{}", std::process::id());
        fs::write(folder.path().join(&leftover), b"half").unwrap();
        write(&folder.path().join("a.json"), b"whole", Existing::Refuse).unwrap();
        assert_eq!(names(folder.path()), [leftover.as_str(), "a.json"]);
        assert_eq!(fs::read(folder.path().join(leftover)).unwrap(), b"half");
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        // A folder cannot be replaced by a file, so the rename fails.
        let path = folder.path().join("a");
        fs::create_dir(&path).unwrap();
        assert_eq!(write(&path, b"x", Existing::Replace).unwrap_err().code(), "io::failed");
        assert_eq!(names(folder.path()), ["a"]);
        let missing = folder.path().join("no/such/folder/b");
        assert_eq!(write(&missing, b"x", Existing::Refuse).unwrap_err().code(), "io::failed");
    }
}
