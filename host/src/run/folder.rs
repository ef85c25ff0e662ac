//! A run folder: made once, locked while in use, never deleted, never overwritten.

use super::atomic::{folder_of, sync_folder, taken};
use super::lock;
use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// What was asked for and what was done ([`super::provenance`]).
pub const PROVENANCE: &str = "provenance.json";
/// The configuration with every key written out.
pub const CONFIG: &str = "config.resolved.toml";
/// Which records each step trained on ([`super::manifest`]).
pub const ORDER: &str = "order-manifest.jsonl";
/// What each step computed ([`super::metrics`]).
pub const METRICS: &str = "metrics.jsonl";
/// How long each step took; apart, since no two runs agree on it.
pub const TIMING: &str = "timing.jsonl";
/// What was read: files, their formats, what caps and weights did.
pub const CORPUS: &str = "corpus-report.json";
/// Which records were cut or left out, by root.
pub const TRUNCATION: &str = "truncation-report.json";
/// Which records the corpus filter left out or replaced, and why.
pub const FILTER: &str = "filter-report.json";
/// What the commands of `[window]` printed, with when each began and how it ended.
pub const WINDOW_LOG: &str = "window.log";
/// There while the commands of `window.close` are due.
pub const WINDOW_OPEN: &str = "window.open";
/// Folder of `step-N/` ([`super::checkpoint`]).
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder of the held-out losses, one file for each evaluated step.
pub const HELD_OUT: &str = "held-out";
/// Folder of the exported adapter and model.
pub const EXPORT: &str = "export";
const LOCK: &str = "run.lock";
/// What a run writes before [`PROVENANCE`]: where there is a lock, and nothing but these and half-written files, a run was killed
/// before it began.
const BEFORE_PROVENANCE: [&str; 5] = [LOCK, CONFIG, TRUNCATION, CORPUS, FILTER];

/// The command that goes on with the run in the folder `run`, as a shell takes it.
pub fn resume_command(run: &Path) -> String {
    format!("tunehost resume {}", shell_word(run))
}

/// A path as one word of a shell.
pub fn shell_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    shlex::try_quote(&text).map_or_else(|_| text.to_string(), |word| word.to_string())
}

/// A run folder in use by this process. Other processes are refused until it is dropped or the process ends.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    _lock: File,
}

impl RunFolder {
    /// Makes `<root>/<name>-<NNN>` with the first free number, from 001.
    pub fn create(root: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
        let mut number = 1;
        loop {
            let path = root.join(format!("{name}-{number:03}"));
            match fs::create_dir(&path) {
                Ok(()) => {
                    sync_folder(folder_of(&path))?;
                    return Self::take_empty(path);
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(Error::io("create", &path, e)),
            }
        }
    }

    /// Refuses what [`RunFolder::create_at`] would refuse, before anything long starts.
    ///
    /// # Errors
    /// `run::folder_not_empty`.
    pub fn check_free(path: &Path) -> Result<()> {
        if taken(path) { refuse_unless_empty(path, path.join(LOCK).is_file()) } else { Ok(()) }
    }

    /// Makes `path` a run folder. It may exist if it is empty, or if all that is in it is what a run left that was killed before
    /// its provenance was written.
    ///
    /// # Errors
    /// `run::folder_not_empty`, whatever else is in it; `run::locked`.
    pub fn create_at(path: &Path) -> Result<Self> {
        Self::check_free(path)?;
        if !taken(path) {
            fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
            sync_folder(folder_of(path))?;
        }
        Self::take_empty(path.into())
    }

    fn take_empty(path: PathBuf) -> Result<Self> {
        let lock = lock(&path)?;
        // Another process may have come, worked and gone since the folder was seen empty.
        refuse_unless_empty(&path, true)?;
        Ok(Self { path, _lock: lock })
    }

    /// Opens an existing run folder, to resume it.
    ///
    /// # Errors
    /// `run::not_a_run` where there is no provenance; `run::locked` where a process is using it.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join(PROVENANCE).is_file() {
            let message = format!("{} is no run folder that can be resumed", path.display());
            let error = Error::new("run::not_a_run", message)
                .expected(format!("a folder with {PROVENANCE} in it"))
                .help("`tunehost runs list FOLDER` shows the runs in a folder");
            return Err(match (path.join(LOCK).is_file(), refuse_unless_empty(path, true)) {
                (true, Ok(())) => error.help(format!(
                    "a run was killed in it before it began: tunehost run CONFIG --run-dir {}",
                    shell_word(path)
                )),
                (true, Err(_)) => error.help(format!(
                    "it holds a run whose {PROVENANCE} is gone: restore that from a copy, since nothing else says what the run is"
                )),
                (false, _) => error,
            });
        }
        Ok(Self { path: path.into(), _lock: lock(path)? })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file or folder in it, such as [`METRICS`].
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// `killed`: but for what a run that was `killed` before it began may have left.
fn refuse_unless_empty(path: &Path, killed: bool) -> Result<()> {
    for entry in fs::read_dir(path).map_err(|e| Error::io("list", path, e))? {
        let name = entry.map_err(|e| Error::io("list", path, e))?.file_name();
        let half_written = || name.to_str().is_some_and(|name| name.starts_with('.') && name.contains(".tmp-"));
        let left = || BEFORE_PROVENANCE.iter().any(|own| *own == name) || half_written();
        if !(killed && left()) {
            let message = format!("{} is not empty: it holds {}", path.display(), name.display());
            let error = Error::new("run::folder_not_empty", message)
                .expected("a new or an empty folder")
                .help("nothing in it is ever overwritten: name another");
            let resumable = path.join(PROVENANCE).is_file();
            return Err(if resumable {
                error.help(format!("to go on with the run in it: {}", resume_command(path)))
            } else {
                error
            });
        }
    }
    Ok(())
}

fn lock(folder: &Path) -> Result<File> {
    lock::take(&folder.join(LOCK))?.map_err(|pid| {
        let message = format!("{} is in use by the process with pid {pid}", folder.display());
        Error::new("run::locked", message).help("wait until it ends, or use another folder")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_numbered_by_the_first_free_name() {
        let root = tempfile::tempdir().unwrap();
        let runs = root.path().join("runs");
        let first = RunFolder::create(&runs, "demo").unwrap();
        let second = RunFolder::create(&runs, "demo").unwrap();
        let other = RunFolder::create(&runs, "other").unwrap();
        assert_eq!(first.path(), runs.join("demo-001"));
        assert_eq!(second.path(), runs.join("demo-002"));
        assert_eq!(other.path(), runs.join("other-001"));
    }

    #[test]
    fn a_command_names_a_run_as_one_word() {
        assert_eq!(resume_command(Path::new("runs/a-001")), "tunehost resume runs/a-001");
        for (path, word) in [("my runs/it's", r#""my runs/it's""#), ("a;b", "'a;b'"), ("$HOME", "'$HOME'")] {
            assert_eq!(resume_command(Path::new(path)), format!("tunehost resume {word}"));
        }
    }

    #[test]
    fn a_folder_that_holds_anything_is_refused_and_untouched() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("notes.txt"), "mine").unwrap();
        for path in [root.path().to_path_buf(), root.path().join(".")] {
            let error = RunFolder::create_at(&path).unwrap_err();
            assert_eq!(error.code(), "run::folder_not_empty");
            assert!(error.message().ends_with("it holds notes.txt"), "{error}");
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(root.path().join("notes.txt")).unwrap(), "mine");

        let error = RunFolder::create_at(&root.path().join("notes.txt")).unwrap_err();
        assert_eq!(error.code(), "io::failed");
    }

    #[test]
    fn a_new_or_empty_folder_is_taken_and_a_run_is_only_resumed() {
        let root = tempfile::tempdir().unwrap();
        drop(RunFolder::create_at(&root.path().join("new/deep")).unwrap());
        let path = root.path().join("empty");
        fs::create_dir(&path).unwrap();
        let run = RunFolder::create_at(&path).unwrap();
        assert_eq!(RunFolder::open(&path).unwrap_err().code(), "run::not_a_run");
        fs::write(run.file(PROVENANCE), "{}").unwrap();
        drop(run);
        let error = RunFolder::create_at(&path).unwrap_err().to_string();
        assert!(error.contains("tunehost resume"), "{error}");
        assert_eq!(RunFolder::open(&path).unwrap().path(), path);
    }

    #[test]
    fn a_folder_whose_run_was_killed_before_it_began_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let run = RunFolder::create_at(&path).unwrap();
        for name in [CONFIG, TRUNCATION, ".provenance.json.tmp-17"] {
            fs::write(run.file(name), "").unwrap();
        }
        assert_eq!(RunFolder::create_at(&path).unwrap_err().code(), "run::locked");
        drop(run);
        let error = RunFolder::open(&path).unwrap_err().to_string();
        assert!(error.contains("run::not_a_run") && error.contains("tunehost run CONFIG --run-dir "), "{error}");
        drop(RunFolder::create_at(&path).unwrap());
        fs::write(path.join(METRICS), "").unwrap();
        let error = RunFolder::open(&path).unwrap_err().to_string();
        assert!(error.contains("provenance.json is gone: restore that") && !error.contains("--run-dir"), "{error}");
        fs::remove_file(path.join(METRICS)).unwrap();
        // Without its lock, a file of such a name is somebody's.
        fs::remove_file(path.join(LOCK)).unwrap();
        assert_eq!(RunFolder::create_at(&path).unwrap_err().code(), "run::folder_not_empty");
    }

    #[test]
    fn a_second_user_is_refused_with_the_pid_of_the_first() {
        let root = tempfile::tempdir().unwrap();
        let run = RunFolder::create(root.path(), "demo").unwrap();
        fs::write(run.file(PROVENANCE), "{}").unwrap();
        let error = RunFolder::open(run.path()).unwrap_err();
        assert_eq!(error.code(), "run::locked");
        assert!(error.message().ends_with(&format!("pid {}", std::process::id())), "{error}");
        let path = run.path().to_path_buf();
        drop(run);
        RunFolder::open(&path).unwrap();
    }
}
