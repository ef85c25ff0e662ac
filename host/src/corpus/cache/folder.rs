//! The folder of the cache as a person looks at it: what is there, whether it is whole.

use super::entry::{self, Entries};
use super::file::{Part, Windows};
use super::{EXTENSION, Identity};
use crate::error::{Error, Result};
use serde::Serialize;
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// One file of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheFile {
    /// Its name without the extension, which other commands take.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Whose encodings these are; `None` where its first line cannot be read.
    pub identity: Option<Identity>,
    /// Records in it.
    pub records: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Its size.
    pub bytes: u64,
    /// Bytes that belong to no record, and records whose tokens are not as they were written (where those were checked).
    pub damaged: Option<Damage>,
}

/// What is wrong with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Bytes that belong to no record.
    pub bytes: u64,
    /// Records that are not as they were written.
    pub records: u64,
}

/// `$XDG_CACHE_HOME/tunehost/encodings`, or the same under `~/.cache`; `None` where the user has neither.
pub fn default_folder() -> Option<PathBuf> {
    crate::user::cache_folder().map(|folder| folder.join("encodings"))
}

/// The files of the cache in `folder`, by name; with `check`, every token of them is read. None where there is no folder.
///
/// # Errors
/// Class `io`.
pub fn list(folder: &Path, check: bool) -> Result<Vec<CacheFile>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io("list", folder, e))? {
        let path = entry.map_err(|e| Error::io("list", folder, e))?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            files.push(look(&path, check).map_err(|e| Error::io("read", &path, e))?);
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// The path of the one file whose name begins with `name`.
///
/// # Errors
/// `usage::no_cache_file` where none or several do.
pub fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    let mut found: Vec<CacheFile> = list(folder, false)?;
    found.retain(|file| !name.is_empty() && file.name.starts_with(name));
    match found.pop() {
        Some(file) if found.is_empty() => Ok(file.path),
        one => {
            let count = found.len() + usize::from(one.is_some());
            let message =
                format!("{count} files of the cache {} have a name that begins with {name:?}", folder.display());
            Err(Error::new("usage::no_cache_file", message).help("`tunehost cache ls` prints the names"))
        }
    }
}

fn look(path: &Path, check: bool) -> std::io::Result<CacheFile> {
    let file = File::open(path)?;
    // nobody is in the middle of an entry then
    file.lock_shared()?;
    let part = Part::map(&file, 0)?;
    let first_line = part.bytes.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let identity: Option<Identity> = serde_json::from_slice(&part.bytes[..first_line]).ok();
    let mut entries = Entries::new(&part.bytes, if identity.is_some() { first_line } else { 0 });
    // of two encodings of a record the later one counts: the first was found damaged
    let mut records = HashMap::new();
    let mut windows = Windows::new(&part);
    while let Some((key, place)) = entries.next() {
        records.insert(key, (place.tokens, !check || entry::read(&part.bytes, &place).is_some()));
        windows.seen(entries.end);
    }
    let lost = entries.damaged + part.bytes.len() - entries.end;
    let broken = records.values().filter(|(_, whole)| !whole).count();
    Ok(CacheFile {
        name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        path: path.into(),
        identity,
        records: records.len() as u64,
        tokens: records.values().map(|(tokens, _)| u64::from(*tokens)).sum(),
        bytes: part.bytes.len() as u64,
        damaged: (lost + broken > 0).then_some(Damage { bytes: lost as u64, records: broken as u64 }),
    })
}
