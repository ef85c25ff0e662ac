//! The ledger: which run used which grant. A JSONL file beside the grants that only ever grows.
//!
//! Each line holds the hash of the one before, so that a line cannot be changed or taken out of the middle unseen. That
//! the end is not cut off is known from the runs: each writes into its provenance what the last line was when it was done.

use crate::error::{Error, Result};
use crate::hash::sha256;
use crate::run::atomic::{folder_of, make_first_free, sync_folder};
use crate::run::clock::utc_now;
use crate::run::provenance::LedgerHead;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long another process may hold the ledger, which takes it milliseconds.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);
const BROKEN: &str = "gate::ledger_broken";

/// One line: a run used a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Counted from 1.
    pub sequence: u64,
    /// `sha256` of the line before; 64 zeros in the first.
    pub previous: String,
    /// The grant.
    pub grant: String,
    /// The run.
    pub run: String,
    /// What the grant overrode for it, each as `corpus/blocker`.
    pub overridden: Vec<String>,
    /// When, UTC, RFC 3339.
    pub at: String,
    /// SHA-256 of this line with nothing between the quotes here, in hexadecimal.
    pub sha256: String,
}

impl Entry {
    fn line(&self) -> String {
        serde_json::to_string(self).expect("an entry is strings and a number")
    }

    fn hash(&self) -> String {
        sha256(Self { sha256: String::new(), ..self.clone() }.line().as_bytes())
    }
}

/// A ledger that is held against other processes, and whole.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
    /// Half a line behind the last one.
    torn: Vec<u8>,
}

impl Ledger {
    /// Where the ledger of the grants file `grants` is: `grants.ledger.jsonl` beside `grants.toml`. Beside the file
    /// itself, not beside a link to it: a second name must not come with a second ledger.
    pub fn path_for(grants: &Path) -> PathBuf {
        let grants = grants.canonicalize().unwrap_or_else(|_| grants.into());
        let mut name = grants.file_stem().unwrap_or_default().to_os_string();
        name.push(".ledger.jsonl");
        grants.with_file_name(name)
    }

    /// Makes an empty ledger.
    ///
    /// # Errors
    /// `gate::ledger_exists`.
    pub fn create(path: &Path) -> Result<()> {
        match File::create_new(path).and_then(|file| file.sync_all()) {
            Ok(()) => sync_folder(folder_of(path)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                let message = format!("{} exists already and is never made anew", path.display());
                Err(Error::new("gate::ledger_exists", message).help("it is ready for use as it is"))
            }
            Err(e) => Err(Error::io("create", path, e)),
        }
    }

    /// Opens the ledger to append to it. No other process reads or writes it until it is dropped.
    ///
    /// # Errors
    /// `gate::ledger_missing`, `gate::ledger_locked`, `gate::ledger_broken` naming file and line; class `io`.
    pub fn open(path: &Path) -> Result<Self> {
        Self::load(path, OpenOptions::new().read(true).append(true), File::try_lock)
    }

    /// Opens the ledger to read it. No other process writes it until it is dropped.
    ///
    /// # Errors
    /// Those of [`Ledger::open`].
    pub fn read(path: &Path) -> Result<Self> {
        Self::load(path, OpenOptions::new().read(true), File::try_lock_shared)
    }

    fn load(path: &Path, options: &OpenOptions, lock: fn(&File) -> Result<(), TryLockError>) -> Result<Self> {
        let mut file = options.open(path).map_err(|e| match e.kind() {
            ErrorKind::NotFound => Error::new("gate::ledger_missing", format!("there is no ledger {}", path.display()))
                .expected("the record of which run used which grant")
                .help(
                    "where a run used these grants, restore it from a copy; where none did: tunehost grants open FILE",
                ),
            _ => Error::io("open", path, e),
        })?;
        let started = Instant::now();
        while let Err(e) = lock(&file) {
            match e {
                TryLockError::Error(e) => return Err(Error::io("lock", path, e)),
                TryLockError::WouldBlock if started.elapsed() > LOCK_WAIT_MAX => {
                    return Err(Error::new("gate::ledger_locked", format!("{} is in use", path.display()))
                        .help("end the process that holds it, or wait until it has ended"));
                }
                TryLockError::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let torn = bytes.split_off(whole);
        Ok(Self { path: path.into(), file, entries: checked(path, &bytes)?, torn })
    }

    /// Moves half a line behind the last one, as a crash or a full disk leaves it, into a file of its own beside the ledger, and
    /// returns that; nothing where there is none. A run trains only after its line is on disk, so that half a line is of a run that
    /// never did. Whoever calls this has seen that no run recorded it as a whole line.
    ///
    /// # Errors
    /// Class `io`.
    pub fn set_torn_aside(&mut self) -> Result<Option<PathBuf>> {
        if self.torn.is_empty() {
            return Ok(None);
        }
        let (aside, mut file) = make_first_free(&self.path.with_extension("torn"), |path| File::create_new(path))?;
        let kept = file.write_all(&self.torn).and_then(|()| file.sync_all());
        kept.map_err(|e| Error::io("write", &aside, e))?;
        sync_folder(folder_of(&aside))?;
        let length = self.file.metadata().map(|ledger| ledger.len());
        let cut = length.and_then(|length| self.file.set_len(length - self.torn.len() as u64));
        cut.and_then(|()| self.file.sync_all()).map_err(|e| Error::io("cut", &self.path, e))?;
        self.torn.clear();
        Ok(Some(aside))
    }

    /// Whether there is half a line behind the last one, which [`Ledger::set_torn_aside`] moves.
    pub fn is_torn(&self) -> bool {
        !self.torn.is_empty()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The uses of a grant, oldest first.
    pub fn uses_of<'a>(&'a self, grant: &'a str) -> impl Iterator<Item = &'a Entry> {
        self.entries.iter().filter(move |entry| entry.grant == grant)
    }

    /// The last line.
    pub fn head(&self) -> LedgerHead {
        let path = self.path.canonicalize().unwrap_or_else(|_| self.path.clone()).to_string_lossy().into_owned();
        LedgerHead { path, sequence: self.entries.len() as u64, sha256: last_hash(&self.entries) }
    }

    /// Whether the line that was once the last is still there.
    pub fn holds(&self, head: &LedgerHead) -> bool {
        let upto = usize::try_from(head.sequence).ok().and_then(|length| self.entries.get(..length));
        upto.is_some_and(|entries| last_hash(entries) == head.sha256)
    }

    /// Writes down that `run` uses grants, each for the blockers beside it, and returns when that is on disk.
    ///
    /// # Errors
    /// Class `io`. The ledger may then end in half a line, which the next run moves aside ([`Ledger::set_torn_aside`]).
    pub fn append(&mut self, run: &str, grants: &[(&str, Vec<String>)]) -> Result<()> {
        let mut entries = self.entries.clone();
        for (grant, overridden) in grants {
            let mut entry = Entry {
                sequence: entries.len() as u64 + 1,
                previous: last_hash(&entries),
                grant: (*grant).into(),
                run: run.into(),
                overridden: overridden.clone(),
                at: utc_now(),
                sha256: String::new(),
            };
            entry.sha256 = entry.hash();
            entries.push(entry);
        }
        let text: String = entries[self.entries.len()..].iter().map(|entry| entry.line() + "\n").collect();
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_all());
        written.map_err(|e| Error::io("append to", &self.path, e))?;
        self.entries = entries;
        Ok(())
    }
}

fn last_hash(entries: &[Entry]) -> String {
    entries.last().map_or_else(|| "0".repeat(64), |entry| entry.sha256.clone())
}

/// The lines of a ledger that is what was appended to it.
fn checked(path: &Path, bytes: &[u8]) -> Result<Vec<Entry>> {
    let broken = |line: usize, what: String| {
        Error::new(BROKEN, format!("{}:{line}: {what}", path.display()))
            .expected("the ledger as it was written, line after line")
            .help("no grant can be used until the file is restored from a copy")
    };
    let mut entries: Vec<Entry> = Vec::new();
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let (number, line) = (index + 1, line.strip_suffix(b"\n").unwrap_or(line));
        let entry: Entry =
            serde_json::from_slice(line).map_err(|e| broken(number, format!("this line cannot be read: {e}")))?;
        if entry.line().as_bytes() != line || entry.hash() != entry.sha256 {
            return Err(broken(number, "this line was changed: its sha256 is not the one in it".into()));
        }
        if entry.sequence != number as u64 || entry.previous != last_hash(&entries) {
            let what = format!("line {} of the ledger stands here and does not follow the line before", entry.sequence);
            return Err(broken(number, format!("{what}: lines were removed, moved or changed")));
        }
        entries.push(entry);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests;
