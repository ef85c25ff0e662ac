//! Advisory locks of the operating system: one ends with its process, however that ends.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::Path;

/// Locks the file `path`, which is made where there is none and holds the pid of who has it. Inside, the pid of another
/// process that has it, `unknown` where it does not say.
pub(super) fn take(path: &Path) -> Result<std::result::Result<File, String>> {
    let io = |e| Error::io("lock", path, e);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
    let taken = hold(file).map_err(io)?;
    if let Ok(file) = &taken {
        write_pid(file).map_err(io)?;
    }
    Ok(taken)
}

/// Locks an open file. Inside, the pid that is in it where another process has the lock, `unknown` where there is none.
pub(super) fn hold(mut file: File) -> io::Result<std::result::Result<File, String>> {
    match file.try_lock() {
        Ok(()) => Ok(Ok(file)),
        Err(TryLockError::Error(e)) => Err(e),
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            // Without its pid the process is still refused.
            _ = file.read_to_string(&mut pid);
            Ok(Err(if pid.trim().is_empty() { "unknown".into() } else { pid.trim().into() }))
        }
    }
}

/// Writes this process's pid into a file that it has locked.
pub(super) fn write_pid(mut file: &File) -> io::Result<()> {
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())
}
