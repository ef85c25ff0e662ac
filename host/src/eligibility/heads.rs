//! The last lines of a ledger that runs recorded in their provenance: what shows that its end was cut off.

use super::ledger::Ledger;
use crate::error::{Error, Result};
use crate::run::atomic::folder_of;
use crate::run::folder::PROVENANCE;
use crate::run::provenance::LedgerHead;
use serde::Deserialize;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Refuses a ledger that lacks the last line that a run saw in it: one under `run.root`, or beside the folder `run`.
pub fn refuse_lost_heads(ledger: &Ledger, root: &Path, run: Option<&Path>) -> Result<()> {
    refuse_lost_heads_in(ledger, root)?;
    run.map_or(Ok(()), |run| refuse_lost_heads_in(ledger, folder_of(run)))
}

fn refuse_lost_heads_in(ledger: &Ledger, runs: &Path) -> Result<()> {
    /// As much of a provenance as this needs, whatever its schema.
    #[derive(Deserialize)]
    struct Recorded {
        run_id: String,
        #[serde(default)]
        eligibility: Option<Eligibility>,
    }
    #[derive(Deserialize)]
    struct Eligibility {
        ledger: Option<LedgerHead>,
    }
    let here = ledger.head().path;
    let folders = match fs::read_dir(runs) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        folders => folders.map_err(|e| Error::io("list", runs, e))?,
    };
    for folder in folders {
        let path = folder.map_err(|e| Error::io("list", runs, e))?.path().join(PROVENANCE);
        let text = match fs::read(&path) {
            // A folder that may not be entered is another user's, and so is its ledger.
            Err(e)
                if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied) =>
            {
                continue;
            }
            text => text.map_err(|e| Error::io("read", &path, e))?,
        };
        let recorded: Recorded = serde_json::from_slice(&text).map_err(|e| {
            Error::new("run::provenance_broken", format!("{}: {e}", path.display()))
                .help("which grants that run used is not known: restore the file from a copy, or move that run's folder elsewhere")
        })?;
        let head = recorded.eligibility.and_then(|eligibility| eligibility.ledger);
        if let Some(head) = head.filter(|head| head.path == here && !ledger.holds(head)) {
            return Err(behind(ledger, &head, &recorded.run_id));
        }
    }
    Ok(())
}

/// The refusal of a ledger that is not the one that `run` left.
pub fn behind(ledger: &Ledger, head: &LedgerHead, run: &str) -> Error {
    let LedgerHead { sequence, sha256, .. } = head;
    let message = format!(
        "{} is not the ledger that run {run} left: its line {sequence} was {sha256}, and now it ends with line {}",
        ledger.path().display(),
        ledger.head().sequence
    );
    Error::new("gate::ledger_behind", message)
        .expected("every line that a run saw in it")
        .help("lines were cut off or exchanged: restore the ledger from a copy")
}
