//! A device in use by one run of this machine at a time.

use super::lock;
use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Folder of the locks; without it, `tunehost-<user>` in the system's temporary folder.
pub const RUNTIME_DIR: &str = "TUNEHOST_RUNTIME_DIR";

/// A device that other runs of this machine are kept off until it is dropped, or the process ends.
#[derive(Debug)]
pub struct DeviceLease {
    _lock: File,
}

impl DeviceLease {
    /// Takes the device `name`. Nothing where another run has it and `allow_shared` says that this is meant.
    ///
    /// # Errors
    /// `device::in_use`, naming the process that has it; class `io`.
    pub fn take(name: &str, allow_shared: bool) -> Result<Option<Self>> {
        Self::take_in(&runtime_dir(), name, allow_shared)
    }

    fn take_in(dir: &Path, name: &str, allow_shared: bool) -> Result<Option<Self>> {
        fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        let plain: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        match lock::take(&dir.join(format!("device-{plain}.lock")))? {
            Ok(lock) => Ok(Some(Self { _lock: lock })),
            Err(_) if allow_shared => Ok(None),
            Err(pid) => Err(Error::new("device::in_use", format!("`{name}` is in use by the process with pid {pid}"))
                .expected("a device that no other run of this machine computes on")
                .help("wait until it ends; --set model.allow_shared=true computes beside it")),
        }
    }
}

fn runtime_dir() -> PathBuf {
    std::env::var_os(RUNTIME_DIR).map(PathBuf::from).unwrap_or_else(|| {
        let user = std::env::var("USER").unwrap_or_else(|_| "default".into());
        std::env::temp_dir().join(format!("tunehost-{user}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_one_runs_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let take = |name, shared| DeviceLease::take_in(&dir.path().join("made"), name, shared);
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
}
