//! `checkpoints/step-000123/`: a set of named files and `checkpoint.json`, which holds a checksum of each and of
//! itself.
//!
//! What the files mean is the caller's: adapters, optimiser state, random generators, plugin state.

use super::atomic::{make_beside, set_aside, sync_folder, taken, write_synced};
use super::written::{RECORD, Written};
use crate::error::{Error, Result};
use crate::hash::sha256;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub(super) const MANIFEST: &str = "checkpoint.json";

/// How far the training is in the order manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Epoch that the next step belongs to, from 0.
    pub epoch: u32,
    /// Optimiser steps of that epoch that are done.
    pub step_in_epoch: u64,
}

/// The state after an optimiser step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Optimiser steps done.
    pub step: u64,
    /// Where the next step starts.
    pub position: Position,
    /// Hash of the configuration it was trained with ([`super::changes::config_sha256`]).
    pub config_sha256: String,
    /// Contents by file name.
    pub files: BTreeMap<String, Vec<u8>>,
}

/// What a folder of checkpoints offers a run that is resumed.
#[derive(Debug)]
pub struct Newest {
    /// The newest one that is whole, and its folder.
    pub checkpoint: Option<(PathBuf, Checkpoint)>,
    /// Why each newer one that the run wrote was passed over.
    pub broken: Vec<Error>,
    /// The newer ones that it did not write.
    pub foreign: Vec<PathBuf>,
}

impl Newest {
    /// Refuses what stands where a run of `total` steps may save a checkpoint, before it trains up to there.
    ///
    /// # Errors
    /// `run::checkpoint_exists`.
    pub fn refuse_in_the_way(&self, total: u64) -> Result<()> {
        match self.foreign.iter().find(|path| step_of(path).is_some_and(|step| step <= total)) {
            None => Ok(()),
            Some(path) => Err(in_the_way(path, "no checkpoint that this run wrote")),
        }
    }
}

/// `checkpoint.json`.
#[derive(Serialize, Deserialize)]
struct Manifest<C> {
    contents: C,
    /// Of `contents` as compact JSON.
    sha256: String,
}

/// What `checkpoint.json` says of the checkpoint.
#[derive(Serialize, Deserialize)]
pub(super) struct Contents {
    schema: u32,
    step: u64,
    position: Position,
    pub(super) config_sha256: String,
    pub(super) files: BTreeMap<String, FileEntry>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct FileEntry {
    pub(super) bytes: u64,
    sha256: String,
}

const SCHEMA: u32 = 1;

/// The folder in which `checkpoints` has the checkpoint of `step`.
pub fn folder_of_step(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step:06}"))
}

/// Writes a checkpoint into the folder `checkpoints`, whole or not at all, notes that this run wrote it (`written.jsonl`) and
/// returns its folder. Writing the same checkpoint twice is no error. A broken one of this run in its place is renamed to
/// `step-N.broken`.
///
/// # Errors
/// `run::checkpoint_exists` where another whole checkpoint has the step, or something that the run did not write; class `io`.
pub fn write(checkpoints: &Path, checkpoint: &Checkpoint) -> Result<PathBuf> {
    let Checkpoint { step, files, .. } = checkpoint;
    for name in files.keys() {
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']) && name != MANIFEST;
        if !plain {
            return Err(Error::new("run::checkpoint_name", format!("{name:?} cannot name a file of a checkpoint")));
        }
    }
    fs::create_dir_all(checkpoints).map_err(|e| Error::io("create", checkpoints, e))?;
    let path = folder_of_step(checkpoints, *step);
    let (mut written, name, manifest) = (Written::read(checkpoints)?, name_of(&path), manifest_text(checkpoint));
    if taken(&path) {
        match read(&path) {
            Ok(same) if same == *checkpoint => {
                written.add(name, &manifest)?;
                return Ok(path);
            }
            Ok(_) => return Err(in_the_way(&path, "another whole checkpoint of its step")),
            Err(_) if written.names(name) => {
                let aside = set_aside(&path, "broken")?;
                tracing::warn!("{} is broken and now called {}", path.display(), aside.display());
            }
            Err(_) => return Err(in_the_way(&path, "nothing that this run wrote")),
        }
    }

    let (beside, ()) = make_beside(&path, |beside| fs::create_dir(beside))?;
    let done = fill(&beside, checkpoint, &manifest)
        .and_then(|()| written.add(name, &manifest))
        .and_then(|()| fs::rename(&beside, &path).map_err(|e| Error::io("rename", &beside, e)));
    if let Err(error) = done {
        // On a full disk the space is needed. Best effort, file by file: nothing goes but what was written just now.
        files.keys().map(String::as_str).chain([MANIFEST]).for_each(|name| _ = fs::remove_file(beside.join(name)));
        _ = fs::remove_dir(&beside);
        return Err(error);
    }
    sync_folder(checkpoints)?;
    Ok(path)
}

fn in_the_way(path: &Path, what: &str) -> Error {
    Error::new("run::checkpoint_exists", format!("{} is {what}", path.display()))
        .expected("a free place for the run's own checkpoint of that step")
        .help("move it out of the folder")
}

fn fill(folder: &Path, checkpoint: &Checkpoint, manifest: &[u8]) -> Result<()> {
    for (name, bytes) in &checkpoint.files {
        write_synced(&folder.join(name), bytes)?;
    }
    write_synced(&folder.join(MANIFEST), manifest)?;
    sync_folder(folder)
}

fn manifest_text(checkpoint: &Checkpoint) -> Vec<u8> {
    let entry = |bytes: &Vec<u8>| FileEntry { bytes: bytes.len() as u64, sha256: sha256(bytes) };
    sealed(&Contents {
        schema: SCHEMA,
        step: checkpoint.step,
        position: checkpoint.position,
        config_sha256: checkpoint.config_sha256.clone(),
        files: checkpoint.files.iter().map(|(name, bytes)| (name.clone(), entry(bytes))).collect(),
    })
}

fn sealed(contents: &Contents) -> Vec<u8> {
    let sha256 = sha256(&serde_json::to_vec(contents).expect("contents have string keys"));
    let mut text = serde_json::to_vec_pretty(&Manifest { contents, sha256 }).expect("a manifest has string keys");
    text.push(b'\n');
    text
}

/// The newest whole checkpoint in the folder `checkpoints` that the run wrote; a folder that is not there has none. Folders of
/// other names, such as what a killed process left half-written, are not looked at.
///
/// # Errors
/// `run::checkpoints_unknown` where there are checkpoints, and nothing says which of them the run wrote; class `io`.
pub fn newest_whole(checkpoints: &Path) -> Result<Newest> {
    let (written, found) = (Written::read(checkpoints)?, by_step(checkpoints)?);
    let record = checkpoints.join(RECORD);
    if !found.is_empty() && !taken(&record) {
        let message = format!("{} has checkpoints, and no {RECORD}", checkpoints.display());
        return Err(Error::new("run::checkpoints_unknown", message)
            .expected(format!("{}, which says which of them this run wrote", record.display()))
            .help("restore it from a copy; to train from the start, move the checkpoints out of the folder"));
    }
    let mut newest = Newest { checkpoint: None, broken: Vec::new(), foreign: Vec::new() };
    for path in found.into_values().rev() {
        let ours = written.holds(name_of(&path), &path);
        match read(&path) {
            Ok(checkpoint) if ours => {
                newest.checkpoint = Some((path, checkpoint));
                break;
            }
            Err(error) if written.names(name_of(&path)) => newest.broken.push(error),
            _ => newest.foreign.push(path),
        }
    }
    Ok(newest)
}

/// The checkpoints in the folder `checkpoints` that the run wrote, in the order of their steps, whole or not.
///
/// # Errors
/// As [`newest_whole`].
pub fn own_folders(checkpoints: &Path) -> Result<Vec<PathBuf>> {
    let written = Written::read(checkpoints)?;
    Ok(folders(checkpoints)?.into_iter().filter(|path| written.holds(name_of(path), path)).collect())
}

/// The name of a checkpoint's folder.
pub(super) fn name_of(folder: &Path) -> &str {
    folder.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The checkpoints in the folder `checkpoints`, in the order of their steps.
///
/// # Errors
/// Class `io`.
pub fn folders(checkpoints: &Path) -> Result<Vec<PathBuf>> {
    Ok(by_step(checkpoints)?.into_values().collect())
}

pub(super) fn by_step(checkpoints: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let list = match fs::read_dir(checkpoints) {
        Ok(list) => list,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(e) => return Err(Error::io("list", checkpoints, e)),
    };
    let mut out = BTreeMap::new();
    for entry in list {
        let path = entry.map_err(|e| Error::io("list", checkpoints, e))?.path();
        if let Some(step) = step_of(&path) {
            out.insert(step, path);
        }
    }
    Ok(out)
}

fn step_of(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_prefix("step-")?;
    if digits.bytes().all(|digit| digit.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Reads a checkpoint and verifies every byte of it.
///
/// # Errors
/// `run::checkpoint_broken`, naming the file; class `io` for one that cannot be read.
pub fn read(folder: &Path) -> Result<Checkpoint> {
    let contents = read_contents(folder)?;
    if step_of(folder) != Some(contents.step) {
        return Err(broken(folder, MANIFEST, &format!("it is of step {}", contents.step)));
    }
    let mut files = BTreeMap::new();
    for (name, entry) in &contents.files {
        let bytes = load(folder, name)?;
        let (length, hash) = (bytes.len() as u64, sha256(&bytes));
        if length != entry.bytes {
            return Err(broken(folder, name, &format!("it has {length} bytes, {} were written", entry.bytes)));
        }
        if hash != entry.sha256 {
            return Err(broken(folder, name, &format!("its sha256 is {hash}, written was {}", entry.sha256)));
        }
        files.insert(name.clone(), bytes);
    }
    let Contents { step, position, config_sha256, .. } = contents;
    Ok(Checkpoint { step, position, config_sha256, files })
}

/// Reads `checkpoint.json` alone.
pub(super) fn read_contents(folder: &Path) -> Result<Contents> {
    let text = load(folder, MANIFEST)?;
    let manifest: Manifest<Contents> =
        serde_json::from_slice(&text).map_err(|e| broken(folder, MANIFEST, &e.to_string()))?;
    let contents = manifest.contents;
    if contents.schema != SCHEMA {
        return Err(broken(folder, MANIFEST, &format!("schema {} is not known, only {SCHEMA}", contents.schema)));
    }
    // Written again from what was read, it must be the same text: no other way to spell it is accepted.
    if sealed(&contents) != text {
        return Err(broken(folder, MANIFEST, "it does not match its own sha256"));
    }
    Ok(contents)
}

fn load(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    fs::read(&path).map_err(|e| Error::io("read", &path, e))
}

fn broken(folder: &Path, name: &str, what: &str) -> Error {
    Error::new("run::checkpoint_broken", format!("{}: {what}", folder.join(name).display()))
        .help("a resume goes on from the newest one that is whole; restore this one from a copy to go on from it")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::run) fn checkpoint(step: u64) -> Checkpoint {
        let files = [("adapter.safetensors", vec![step as u8; 100]), ("state.json", b"{\"seed\":1}".to_vec())];
        Checkpoint {
            step,
            position: Position { epoch: 1, step_in_epoch: step },
            config_sha256: sha256(b"config"),
            files: files.map(|(name, bytes)| (name.to_string(), bytes)).into(),
        }
    }

    #[test]
    fn the_newest_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = folder.path().join("checkpoints");
        assert!(newest_whole(&checkpoints).unwrap().checkpoint.is_none());
        for step in [9, 1_000_000, 10] {
            write(&checkpoints, &checkpoint(step)).unwrap();
        }
        let newest = newest_whole(&checkpoints).unwrap();
        assert_eq!(newest.checkpoint, Some((checkpoints.join("step-1000000"), checkpoint(1_000_000))));
        assert!(newest.broken.is_empty());
        assert_eq!(read(&checkpoints.join("step-000009")).unwrap(), checkpoint(9));
    }

    #[test]
    fn any_flipped_bit_is_seen_and_the_one_before_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &checkpoint(1)).unwrap();
        let newest = write(folder.path(), &checkpoint(2)).unwrap();
        for name in ["adapter.safetensors", "state.json", MANIFEST] {
            let path = newest.join(name);
            let whole = fs::read(&path).unwrap();
            for at in 0..whole.len() {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << (at % 8);
                fs::write(&path, &flipped).unwrap();
                assert!(read(&newest).is_err(), "bit {} of byte {at} of {name}", at % 8);
            }
            let found = newest_whole(folder.path()).unwrap();
            assert_eq!(found.checkpoint.unwrap().1, checkpoint(1));
            assert_eq!(found.broken.len(), 1);
            assert!(found.broken[0].message().contains("step-000002"), "{}", found.broken[0]);
            fs::write(&path, &whole).unwrap();
        }
        assert_eq!(read(&newest).unwrap(), checkpoint(2));
    }

    #[test]
    fn a_short_or_missing_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), &checkpoint(1)).unwrap().join("adapter.safetensors");
        fs::write(&path, [1; 99]).unwrap();
        let error = read(path.parent().unwrap()).unwrap_err();
        assert_eq!(error.code(), "run::checkpoint_broken");
        assert!(error.message().ends_with("adapter.safetensors: it has 99 bytes, 100 were written"), "{error}");
        fs::remove_file(&path).unwrap();
        assert_eq!(read(path.parent().unwrap()).unwrap_err().code(), "io::failed");
    }

    #[test]
    fn what_a_killed_process_left_is_ignored_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &checkpoint(1)).unwrap();
        let leftover = folder.path().join(format!(".step-000002.tmp-{}", std::process::id()));
        fs::create_dir(&leftover).unwrap();
        fs::write(leftover.join("adapter.safetensors"), b"half").unwrap();
        assert_eq!(newest_whole(folder.path()).unwrap().checkpoint.unwrap().1, checkpoint(1));
        write(folder.path(), &checkpoint(2)).unwrap();
        assert_eq!(newest_whole(folder.path()).unwrap().checkpoint.unwrap().1, checkpoint(2));
        assert_eq!(fs::read(leftover.join("adapter.safetensors")).unwrap(), b"half");
    }

    #[test]
    fn what_the_run_did_not_write_is_no_place_to_go_on_from_and_stays() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = |step: u64| folder_of_step(folder.path(), step);
        write(folder.path(), &checkpoint(1)).unwrap();
        // Of another run: one with a step of its own, one with a step that this run has, or had.
        let mut foreign = checkpoint(2);
        foreign.config_sha256 = sha256(b"another");
        fs::rename(write(other.path(), &checkpoint(3)).unwrap(), path(3)).unwrap();
        fs::rename(write(other.path(), &foreign).unwrap(), path(2)).unwrap();
        let newest = newest_whole(folder.path()).unwrap();
        assert_eq!(newest.checkpoint.as_ref().unwrap().1, checkpoint(1));
        newest.refuse_in_the_way(1).unwrap();
        assert_eq!(newest.refuse_in_the_way(2).unwrap_err().code(), "run::checkpoint_exists");
        assert_eq!((newest.foreign, newest.broken.len()), (vec![path(3), path(2)], 0));
        assert_eq!(own_folders(folder.path()).unwrap(), [path(1)]);
        // The run gets to these steps: the very same checkpoint is its own from then on, another is in the way.
        write(folder.path(), &checkpoint(3)).unwrap();
        assert_eq!(newest_whole(folder.path()).unwrap().checkpoint.unwrap().1, checkpoint(3));
        assert_eq!(write(folder.path(), &checkpoint(2)).unwrap_err().code(), "run::checkpoint_exists");
        fs::write(path(2).join("state.json"), b"{}").unwrap();
        assert_eq!(write(folder.path(), &checkpoint(2)).unwrap_err().code(), "run::checkpoint_exists");
        assert!(path(2).join("state.json").exists(), "it is not moved");

        let record = folder.path().join(RECORD);
        let text = fs::read_to_string(&record).unwrap();
        assert_eq!(text.lines().count(), 2);
        fs::write(&record, text.replacen('{', "", 1)).unwrap();
        let error = newest_whole(folder.path()).unwrap_err();
        assert!(error.message().contains("written.jsonl:1: "), "{error}");
        fs::remove_file(&record).unwrap();
        assert_eq!(newest_whole(folder.path()).unwrap_err().code(), "run::checkpoints_unknown");
    }

    #[test]
    fn a_step_is_written_once_unless_what_is_there_is_broken() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), &checkpoint(3)).unwrap();
        write(folder.path(), &checkpoint(3)).unwrap();
        let mut other = checkpoint(3);
        other.position.step_in_epoch = 7;
        assert_eq!(write(folder.path(), &other).unwrap_err().code(), "run::checkpoint_exists");

        for aside in ["step-000003.broken", "step-000003.broken-2"] {
            fs::write(path.join("state.json"), b"{}").unwrap();
            write(folder.path(), &checkpoint(3)).unwrap();
            assert_eq!(read(&path).unwrap(), checkpoint(3));
            assert_eq!(fs::read(folder.path().join(aside).join("state.json")).unwrap(), b"{}");
        }
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut wrong = checkpoint(1);
        wrong.files.insert("z".repeat(300), Vec::new());
        assert_eq!(write(folder.path(), &wrong).unwrap_err().code(), "io::failed");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_name_cannot_leave_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["../x", "a/b", "", ".hidden", MANIFEST] {
            let mut wrong = checkpoint(1);
            wrong.files.insert(name.into(), Vec::new());
            assert_eq!(write(folder.path(), &wrong).unwrap_err().code(), "run::checkpoint_name");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
