//! A device in use by one run of this machine at a time.

use super::lock;
use crate::error::{Error, Result};
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Folder of the locks; without it, that of all users in `/tmp`.
pub const RUNTIME_DIR: &str = "TUNEHOST_RUNTIME_DIR";
/// The folder of the locks of all users of the machine, in which nobody can remove another's.
const SHARED_DIR: &str = "/tmp/tunehost-locks";

/// A device that other runs of this machine are kept off until it is dropped, or the process ends.
#[derive(Debug)]
pub struct DeviceLease {
    _lock: File,
    /// Why the runs of other users do not see it, where they do not.
    pub hidden: Option<String>,
}

impl DeviceLease {
    /// Takes the device `name`. Nothing where another run has it and `allow_shared` says that this is meant.
    ///
    /// # Errors
    /// `device::in_use`, naming the process that has it; class `io`.
    pub fn take(name: &str, allow_shared: bool) -> Result<Option<Self>> {
        match std::env::var_os(RUNTIME_DIR).map(PathBuf::from) {
            Some(dir) => {
                fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, e))?;
                Self::take_in(&dir, name, allow_shared)
            }
            None => Self::take_in_first(Path::new(SHARED_DIR), &own_dir(), name, allow_shared),
        }
    }

    /// In the folder `shared` of all users or, where that cannot be used, in this user's `own`.
    fn take_in_first(shared: &Path, own: &Path, name: &str, allow_shared: bool) -> Result<Option<Self>> {
        let seen_by_all = make_shared(shared)
            .map_err(|e| Error::io("share", shared, e))
            .and_then(|()| Self::take_in(shared, name, allow_shared));
        match seen_by_all {
            Err(e) if e.code() == "io::failed" => {
                fs::create_dir_all(own).map_err(|e| Error::io("create", own, e))?;
                let lease = Self::take_in(own, name, allow_shared)?;
                Ok(lease.map(|lease| Self { hidden: Some(e.message().into()), ..lease }))
            }
            taken => taken,
        }
    }

    fn take_in(dir: &Path, name: &str, allow_shared: bool) -> Result<Option<Self>> {
        let plain: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let path = dir.join(format!("device-{plain}.lock"));
        match open(&path).and_then(lock::hold).map_err(|e| Error::io("lock", &path, e))? {
            Ok(lock) => {
                // Another user's file may be held, and not written.
                _ = lock::write_pid(&lock);
                Ok(Some(Self { _lock: lock, hidden: None }))
            }
            Err(_) if allow_shared => Ok(None),
            Err(pid) => Err(Error::new("device::in_use", format!("`{name}` is in use by the process with pid {pid}"))
                .expected("a device that no other run of this machine computes on")
                .help("wait until it ends; --set model.allow_shared=true computes beside it")),
        }
    }
}

fn own_dir() -> PathBuf {
    let user = std::env::var("USER").unwrap_or_else(|_| "default".into());
    std::env::temp_dir().join(format!("tunehost-{user}"))
}

/// Makes the folder in which every user may make files, and nobody remove another's, unless it is there.
fn make_shared(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(0o1777)),
        // A link may lead to where somebody wants files to be made.
        Err(e) if e.kind() == ErrorKind::AlreadyExists => match dir.symlink_metadata()?.is_dir() {
            true => Ok(()),
            false => Err(ErrorKind::NotADirectory.into()),
        },
        Err(e) => Err(e),
    }
}

/// Opens a lock that every user may take. One that is there is opened without asking to make it: Linux refuses that to all but
/// its owner in a folder that everybody writes to (`fs.protected_regular`).
fn open(path: &Path) -> io::Result<File> {
    let options = |write: bool| {
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        options
    };
    loop {
        match options(true).open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => match options(true).create_new(true).open(path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                made => {
                    let file = made?;
                    file.set_permissions(Permissions::from_mode(0o666))?;
                    return Ok(file);
                }
            },
            // Made by a process that ended before it could open it to all: to lock it, reading is enough.
            Err(e) if e.kind() == ErrorKind::PermissionDenied => return options(false).open(path),
            opened => return opened,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_one_runs_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let take = |name, shared| DeviceLease::take_in(dir.path(), name, shared);
        let held = take("cuda:0", false).unwrap();
        assert!(held.is_some());
        let error = take("cuda:0", false).unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("device::in_use", 9));
        assert!(error.message().contains(&std::process::id().to_string()), "{error}");
        assert!(take("cuda:0", true).unwrap().is_none());
        assert!(take("cuda:1", false).unwrap().is_some());
        drop(held);
        assert!(take("cuda:0", false).unwrap().is_some());
    }

    #[test]
    fn every_user_sees_it_unless_the_place_cannot_be_used() {
        let dir = tempfile::tempdir().unwrap();
        let (shared, own) = (dir.path().join("shared"), dir.path().join("own"));
        let take = || DeviceLease::take_in_first(&shared, &own, "wgpu:1", false);
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        let held = take().unwrap().unwrap();
        assert_eq!((mode(&shared), mode(&shared.join("device-wgpu-1.lock"))), (0o1777, 0o666));
        assert!(held.hidden.is_none() && !own.exists());
        assert_eq!(take().unwrap_err().code(), "device::in_use");
        drop(held);
        // A link is not followed, neither of the folder nor of a lock in it.
        let target = dir.path().join("precious");
        fs::write(&target, "mine").unwrap();
        let lock = shared.join("device-wgpu-1.lock");
        fs::remove_file(&lock).unwrap();
        std::os::unix::fs::symlink(&target, &lock).unwrap();
        assert!(take().unwrap().unwrap().hidden.is_some_and(|why| why.contains("cannot lock ")));
        fs::rename(&shared, dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &shared).unwrap();
        assert!(take().unwrap().unwrap().hidden.is_some_and(|why| why.contains("cannot share ")));
        assert_eq!(fs::read_to_string(&target).unwrap(), "mine");
        assert!(own.join("device-wgpu-1.lock").exists());
    }
}
