//! Whether a run may train on its corpora: the manifest says what stands against them, grants permit some of it, an
//! `eligibility` plugin rules, and the ledger keeps which run used which grant.
//!
//! [`ask`] rules before anything is loaded; [`consume`] writes the grants that the ruling rests on into the ledger once
//! the run has its folder and before it trains; [`resume`] checks that they are still there.

pub mod grants;
mod heads;
pub mod ledger;
pub mod manifest;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::plugins::{Blocker, CaseFile, Eligibility, Ruling};
use crate::run::clock::unix_ms_now;
use crate::run::provenance::{EligibilityRecord, GrantUse, Overridden};
use grants::GrantEntry;
use heads::{behind, refuse_lost_heads};
use ledger::Ledger;
use manifest::Manifest;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// Has the plugin rule on a run that will have the folder `run_dir`, where that is known. `own` is the id of a run that was
/// started and trained nothing yet: grants that the ledger says it used are its own.
///
/// # Errors
/// `gate::ineligible` where something stands against a corpus and is not overridden, naming it and every grant for that
/// corpus; `gate` for the grants and the ledger, `corpus` for the manifest, `plugin`.
pub fn ask(
    config: &Config,
    manifest: Option<&Manifest>,
    plugin: &mut Eligibility,
    run_dir: Option<&Path>,
    own: Option<&str>,
) -> Result<EligibilityRecord> {
    let Some(manifest) = manifest else {
        let verdict = "not asked: no eligibility.manifest".into();
        return Ok(EligibilityRecord { verdict, ..Default::default() });
    };
    let mut roots: Vec<&str> = Vec::new();
    for source in &config.data.sources {
        if !roots.contains(&source.root.as_str()) {
            roots.push(&source.root);
        }
    }
    let (corpora, blockers) = manifest.about(&roots)?;
    let (written, ledger) = match &config.eligibility.grants {
        Some(path) => (grants::read(path)?, Some(Ledger::read(&Ledger::path_for(path))?)),
        None => (Vec::new(), None),
    };
    let mut granted = Vec::new();
    if let Some(ledger) = &ledger {
        refuse_lost_heads(ledger, &config.run.root, run_dir)?;
        granted = written.iter().map(|grant| grant.left_by(ledger, own)).collect();
    }
    let case = CaseFile {
        corpora,
        blockers,
        grants: granted,
        run: own.unwrap_or(&config.name).into(),
        wall_clock_ms: unix_ms_now(),
    };
    let ruling = plugin.rule(&case)?;
    let by = format!("{} {}", plugin.identity().name, plugin.identity().version);
    let stands = |blocker: &usize| !ruling.overridden.iter().any(|(overridden, _)| overridden == blocker);
    let standing: Vec<&Blocker> = (0..case.blockers.len()).filter(stands).map(|b| &case.blockers[b]).collect();
    if !standing.is_empty() {
        let because = |blocker: &&Blocker| against(&case, blocker, &written, ledger.as_ref(), &by);
        let message: String = standing.iter().map(because).collect();
        let message = format!("{}: {by} does not let this run train:{message}", manifest.file.path.display());
        return Err(Error::new("gate::ineligible", message)
            .expected("no blocker, or a grant for each that the plugin accepts")
            .help("leave the source out, settle what stands against it, or have an operator give a grant"));
    }
    Ok(record(&case, &ruling, &written, &by))
}

/// One blocker that stops the run, and why each grant for its corpus does not help.
fn against(case: &CaseFile, blocker: &Blocker, written: &[GrantEntry], ledger: Option<&Ledger>, by: &str) -> String {
    let corpus = &case.corpora[blocker.corpus].name;
    let mut text = format!("\n  {corpus}/{}: {}", blocker.name, blocker.reason);
    let (here, elsewhere): (Vec<_>, Vec<_>) =
        written.iter().zip(&case.grants).partition(|(entry, _)| entry.scope.split('/').next() == Some(corpus.as_str()));
    for (entry, grant) in &here {
        let why = if !grant.covers(corpus, &blocker.name) {
            format!("covers {} alone", entry.scope)
        } else if grant.uses_left == 0 {
            let runs = ledger.map(|ledger| ledger.uses_of(&entry.id).map(|e| e.run.as_str()).collect::<Vec<_>>());
            format!("is spent, by {}", runs.unwrap_or_default().join(", "))
        } else if grant.expiry_ms <= case.wall_clock_ms {
            format!("expired at {}", entry.expires)
        } else {
            format!("is good, and {by} does not use it")
        };
        text += &format!("\n    grant {} of {} {why}", entry.id, entry.operator);
    }
    match (here.len(), elsewhere.len()) {
        (0, 0) => text += "\n    there is no grant",
        (_, 0) => {}
        (_, others) => text += &format!("\n    {others} of the grants are for other corpora"),
    }
    text
}

fn record(case: &CaseFile, ruling: &Ruling, written: &[GrantEntry], by: &str) -> EligibilityRecord {
    let overridden = ruling.overridden.iter().map(|&(blocker, grant)| {
        let Blocker { corpus, name, reason } = &case.blockers[blocker];
        let blocker = format!("{}/{name}", case.corpora[*corpus].name);
        Overridden { blocker, reason: reason.clone(), grant: written[grant].id.clone() }
    });
    let used = |index: &usize| ruling.overridden.iter().any(|(_, grant)| grant == index);
    let grants = (0..written.len()).filter(used).map(|index| {
        let GrantEntry { id, scope, operator, expires, uses, .. } = written[index].clone();
        GrantUse { id, scope, operator, expires, uses }
    });
    let verdict = match ruling.overridden.len() {
        0 => format!("{by}: nothing stands against the corpora"),
        n => format!("{by}: {n} of {n} blockers overridden"),
    };
    EligibilityRecord {
        verdict,
        training_eligibility_override: !ruling.overridden.is_empty(),
        overridden_blockers: overridden.collect(),
        substitute_controls: ruling.substitute_controls.clone(),
        grants: grants.collect(),
        ledger: None,
    }
}

/// Writes into the ledger which grants `run`, whose folder is `run_dir`, uses and returns when that is on disk; where the record has the ledger's
/// head, it was done. Returned is where half a line went that a crash had left in it.
///
/// # Errors
/// `gate::grant_spent` where another run has used the last of a grant since [`ask`]; those of [`Ledger::open`].
pub fn consume(config: &Config, record: &mut EligibilityRecord, run_dir: &Path, run: &str) -> Result<Option<PathBuf>> {
    let Some(grants) = config.eligibility.grants.as_ref().filter(|_| record.ledger.is_none()) else { return Ok(None) };
    // Asking took no lock with it: the corpus was read since, which may take long. What was seen then is seen again.
    let mut ledger = Ledger::open(&Ledger::path_for(grants))?;
    refuse_lost_heads(&ledger, &config.run.root, Some(run_dir))?;
    let aside = ledger.set_torn_aside()?;
    let mut uses = Vec::new();
    for GrantUse { id, uses: uses_max, .. } in &record.grants {
        let by: Vec<&str> = ledger.uses_of(id).map(|entry| entry.run.as_str()).collect();
        if by.contains(&run) {
            continue;
        }
        if by.len() >= *uses_max as usize {
            let message = format!("grant {id} was used by {} while this run read its corpus", by.join(", "));
            return Err(Error::new("gate::grant_spent", message)
                .expected("a use left for this run")
                .help("nothing was trained; start another run when there is another grant"));
        }
        let overridden = record.overridden_blockers.iter().filter(|o| o.grant == *id).map(|o| o.blocker.clone());
        uses.push((id.as_str(), overridden.collect()));
    }
    if !uses.is_empty() {
        ledger.append(run, &uses)?;
    }
    record.ledger = Some(ledger.head());
    Ok(aside)
}

/// The record that the run `run` in the folder `run_dir` goes on with.
///
/// The ruling stands as it was made: it was on the run, not on a moment of it, and the manifest and the names of the corpora are
/// the same or the run is refused, whatever is allowed. Asked anew, a run whose grant has expired since could not be resumed. What is checked is
/// that the ledger still holds what the run used. A run that was killed before it wrote down that it used its grants has
/// trained nothing and is asked like a new one.
///
/// # Errors
/// Those of [`Ledger::open`], `gate::ledger_behind`, and those of [`ask`].
pub fn resume(
    config: &Config,
    manifest: Option<&Manifest>,
    plugin: &mut Eligibility,
    stored: Option<EligibilityRecord>,
    run_dir: &Path,
    run: &str,
) -> Result<EligibilityRecord> {
    let settled = |record: &EligibilityRecord| record.ledger.is_some() || !record.training_eligibility_override;
    let Some(record) = stored.filter(settled) else { return ask(config, manifest, plugin, Some(run_dir), Some(run)) };
    if let Some(head) = &record.ledger {
        let grants = config.eligibility.grants.as_ref();
        let ledger = Ledger::read(&grants.map_or_else(|| PathBuf::from(&head.path), |path| Ledger::path_for(path)))?;
        let used = |grant: &GrantUse| ledger.uses_of(&grant.id).any(|entry| entry.run == run);
        if !ledger.holds(head) || !record.grants.iter().all(used) {
            return Err(behind(&ledger, head, run));
        }
        refuse_lost_heads(&ledger, &config.run.root, Some(run_dir))?;
    }
    Ok(record)
}

/// Reads a TOML file's text; an error of class `code` names file and line.
fn parse<T: DeserializeOwned>(path: &Path, text: &str, code: &'static str) -> Result<T> {
    toml::from_str(text).map_err(|e| {
        let line = e.span().map_or(String::new(), |span| format!(":{}", line_of(text, span.start)));
        Error::new(code, format!("{}{line}: {}", path.display(), e.message()))
    })
}

/// The line that holds the byte `at`, counted from 1.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// What a corpus or a blocker cannot be called, since a scope is `corpus/blocker`; nothing where `name` is fine.
fn name_problem(name: &str) -> Option<&'static str> {
    (name.is_empty() || name.contains('/')).then_some("not empty and without `/`")
}

#[cfg(test)]
mod tests;
