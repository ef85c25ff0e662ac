//! `checkpoints/written.jsonl`: which checkpoints a run wrote. What lies beside them and is not in it is somebody else's: no resume
//! goes on from it, and retention does not touch it.
//!
//! It only grows. A line is there before its checkpoint has its name, so that a killed run may have a line more than checkpoints,
//! and no checkpoint without its line.

use super::atomic::{self, Existing};
use crate::error::{Error, Result};
use crate::hash::sha256;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The record's name in the folder of checkpoints.
pub(super) const RECORD: &str = "written.jsonl";

/// A checkpoint that the run wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Name of its folder.
    checkpoint: String,
    /// SHA-256 of its `checkpoint.json`, which has those of its files.
    sha256: String,
}

/// The checkpoints that a run wrote.
#[derive(Debug)]
pub struct Written {
    path: PathBuf,
    text: String,
    lines: Vec<Line>,
}

impl Written {
    /// The record in the folder `checkpoints`; none there is an empty one.
    ///
    /// # Errors
    /// `run::checkpoints_unknown`, naming the line that cannot be read; class `io`.
    pub fn read(checkpoints: &Path) -> Result<Self> {
        let path = checkpoints.join(RECORD);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        let parse = |(i, line)| {
            serde_json::from_str(line).map_err(|e| {
                Error::new("run::checkpoints_unknown", format!("{}:{}: {e}", path.display(), i + 1))
                    .expected("a line for each checkpoint that the run wrote")
                    .help("restore the file from a copy")
            })
        };
        let lines = text.lines().enumerate().map(parse).collect::<Result<_>>()?;
        Ok(Self { path, text, lines })
    }

    /// Whether the run wrote a checkpoint of this name.
    pub fn names(&self, name: &str) -> bool {
        self.lines.iter().any(|line| line.checkpoint == name)
    }

    /// Whether the run wrote the checkpoint in `folder` under `name`, by its `checkpoint.json`.
    pub fn holds(&self, name: &str, folder: &Path) -> bool {
        let manifest = fs::read(folder.join(super::checkpoint::MANIFEST));
        manifest.is_ok_and(|text| self.lines.contains(&Line { checkpoint: name.into(), sha256: sha256(&text) }))
    }

    /// Writes down the checkpoint `name` with its `manifest`, unless that is done.
    ///
    /// # Errors
    /// Class `io`.
    pub fn add(&mut self, name: &str, manifest: &[u8]) -> Result<()> {
        let line = Line { checkpoint: name.into(), sha256: sha256(manifest) };
        if self.lines.contains(&line) {
            return Ok(());
        }
        self.text += &serde_json::to_string(&line).expect("a line is strings");
        self.text += "\n";
        self.lines.push(line);
        // As a whole, so that no line of it is ever half there.
        atomic::write(&self.path, self.text.as_bytes(), Existing::Replace)
    }
}
