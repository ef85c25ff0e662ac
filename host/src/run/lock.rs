//! Advisory locks of the operating system: one ends with its process, however that ends.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

/// Locks the file `path`, which is made where there is none and holds the pid of who has it. Inside, the pid of another
/// process that has it, `unknown` where it does not say.
pub(super) fn take(path: &Path) -> Result<std::result::Result<File, String>> {
    let io = |e| Error::io("lock", path, e);
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(e)) => return Err(io(e)),
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            // Without its pid the process is still refused.
            _ = file.read_to_string(&mut pid);
            let pid = if pid.trim().is_empty() { "unknown" } else { pid.trim() };
            return Ok(Err(pid.into()));
        }
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io)?;
    Ok(Ok(file))
}
