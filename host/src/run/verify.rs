//! Whether what a run recorded is still what is there: every input, log, checkpoint and export is hashed again. What was
//! computed is computed again by `job::recompute`.

use super::changes::{accepted, config_sha256};
use super::checkpoint;
use super::folder::{CHECKPOINTS, CONFIG, METRICS, ORDER};
use super::manifest::OrderManifest;
use super::metrics::{self, Metric};
use super::provenance::{Provenance, Status};
use super::written::{RECORD, Written};
use crate::config::{self, PluginsConfig};
use crate::corpus;
use crate::error::{Error, Result};
use crate::hash::{FileHash, sha256};
use crate::plugins::{Kind, PluginRef};
use serde::Serialize;
use std::fs;
use std::path::Path;

/// One thing that was recorded, and what is there now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// `base/<file>`, `tokenizer`, `template`, `corpus manifest`, `adapter`, `corpus[i]`, `plugin/<kind>`, `configuration`,
    /// `order manifest`, `metrics`, `checkpoint/<folder>`, a path in the run folder, or `recomputed: <what>`.
    pub what: String,
    /// Where it was looked for.
    pub path: String,
    /// What is wrong; nothing where it is as recorded.
    pub problem: Option<String>,
}

/// Checks the run in the folder `run`.
///
/// # Errors
/// Where its provenance cannot be read; whatever is wrong beyond that is a [`Check::problem`].
pub fn verify(run: &Path) -> Result<Vec<Check>> {
    let provenance = Provenance::read(run)?;
    let mut checks = Vec::new();
    let mut check = |what: String, path: &Path, found: Result<()>| {
        let problem = found.err().map(|e| e.message().to_string());
        checks.push(Check { what, path: path.display().to_string(), problem });
    };
    let inputs = &provenance.inputs;
    // A resume may have let another file pass, which the run goes by since.
    let accepted = accepted(&provenance);
    let last = |key: &str, file: &FileHash| FileHash {
        sha256: accepted.get(key).unwrap_or(&file.sha256).clone(),
        ..file.clone()
    };
    for (name, file) in &inputs.base {
        let what = format!("base/{name}");
        let found = same_file(&last(&what, file), &file.path);
        check(what, &file.path, found);
    }
    let single =
        [("tokenizer", &inputs.tokenizer), ("corpus manifest", &inputs.corpus_manifest), ("adapter", &inputs.adapter)];
    for (name, file) in single {
        if let Some(file) = file {
            check(name.into(), &file.path, same_file(&last(name, file), &file.path));
        }
    }
    if let Some(template) = &inputs.template {
        check("template".into(), &template.path, same_template(&last("template", template)));
    }
    for (i, file) in inputs.corpus.iter().enumerate() {
        let what = format!("corpus[{i}]");
        let found = same_file(&last(&what, file), &file.path);
        check(what, &file.path, found);
    }

    let path = run.join(CONFIG);
    let resolved = config::load(&path, &[], &[]);
    for kind in Kind::ALL {
        let key = kind.config_key();
        let Some(recorded) = inputs.plugins.get(key) else { continue };
        let what = format!("plugin/{key}");
        let sha256 = accepted.get(&what).and_then(|plugin| plugin.split(' ').next_back()).unwrap_or(&recorded.sha256);
        let found = resolved
            .as_ref()
            .map_err(|e| Error::new(e.code(), e.message()))
            .and_then(|resolved| same_plugin(kind, &resolved.config.plugins, sha256));
        check(what, Path::new(&recorded.source), found);
    }
    let found = resolved.and_then(|resolved| same(&provenance.config_sha256, &config_sha256(&resolved.config)));
    check("configuration".into(), &path, found);

    let path = run.join(ORDER);
    if let Some(order) = &provenance.order_manifest {
        check(
            "order manifest".into(),
            &path,
            same_file(order, &path).and_then(|()| OrderManifest::open(&path).map(drop)),
        );
    }
    let path = run.join(METRICS);
    check("metrics".into(), &path, whole_metrics(&path, provenance.outcome.as_ref().map_or(0, |o| o.step)));
    let checkpoints = run.join(CHECKPOINTS);
    let (written, folders) = (Written::read(&checkpoints)?, checkpoint::folders(&checkpoints)?);
    let record = checkpoints.join(RECORD);
    let there = folders.is_empty() || record.exists();
    let gone = || Error::new("run::verify_failed", "it is gone, and says which checkpoints this run wrote");
    check(format!("{CHECKPOINTS}/{RECORD}"), &record, if there { Ok(()) } else { Err(gone()) });
    for folder in folders {
        let name = checkpoint::name_of(&folder);
        let ours = || match !there || written.holds(name, &folder) {
            true => Ok(()),
            false => Err(Error::new("run::verify_failed", "it is not one that this run wrote")),
        };
        check(format!("checkpoint/{name}"), &folder, checkpoint::read(&folder).and_then(|_| ours()));
    }
    let ended = provenance.outcome.as_ref().filter(|outcome| outcome.status != Status::Failed && outcome.step > 0);
    if let Some(last) =
        ended.map(|outcome| checkpoint::folder_of_step(&checkpoints, outcome.step)).filter(|f| !f.exists())
    {
        let gone = Error::new("run::verify_failed", "it is gone, and the run ended with it");
        check(format!("checkpoint/{}", checkpoint::name_of(&last)), &last, Err(gone));
    }
    for (name, file) in provenance.outcome.iter().flat_map(|outcome| outcome.files.iter().chain(&outcome.exports)) {
        let path = run.join(name);
        check(name.display().to_string(), &path, same_file(file, &path));
    }
    Ok(checks)
}

/// The check of a run that cannot be computed again.
pub fn not_recomputed(run: &Path, error: &Error) -> Check {
    Check {
        what: "recomputed: nothing".into(),
        path: run.display().to_string(),
        problem: Some(error.message().to_string()),
    }
}

/// The checks as lines, those that failed with what is wrong.
pub fn text(checks: &[Check]) -> String {
    let line = |c: &Check| match &c.problem {
        // Which of the sources' files it is, a number alone does not tell.
        None if c.what.starts_with("corpus[") => format!("ok       {} ({})\n", c.what, c.path),
        None => format!("ok       {}\n", c.what),
        Some(problem) => format!("CHANGED  {} ({}): {problem}\n", c.what, c.path),
    };
    checks.iter().map(line).collect()
}

/// # Errors
/// `run::verify_failed`, where a check found something.
pub fn verdict(run: &Path, checks: &[Check]) -> Result<()> {
    let failed: Vec<&str> = checks.iter().filter(|c| c.problem.is_some()).map(|c| c.what.as_str()).collect();
    if failed.is_empty() {
        return Ok(());
    }
    let message = format!(
        "{} of {} things are not as {} recorded them: {}",
        failed.len(),
        checks.len(),
        run.display(),
        failed.join(", ")
    );
    Err(Error::new("run::verify_failed", message)
        .expected(
            "every input, log, checkpoint and export with its recorded hash, and the same results when computed again",
        )
        .help("what the run computed came from what it recorded, not from what is there now"))
}

fn same(recorded: &str, found: &str) -> Result<()> {
    if recorded == found {
        return Ok(());
    }
    Err(Error::new("run::verify_failed", format!("recorded {recorded}, found {found}")))
}

fn same_file(recorded: &FileHash, path: &Path) -> Result<()> {
    same(&recorded.sha256, &FileHash::of(path)?.sha256)
}

/// A template may stand inside the base's tokenizer_config.json.
fn same_template(recorded: &FileHash) -> Result<()> {
    let path = &recorded.path;
    if !path.ends_with("tokenizer_config.json") {
        return same_file(recorded, path);
    }
    let shipped = corpus::shipped_template(path.parent().unwrap_or(Path::new("")))?;
    let text = shipped.map(|(_, text)| text).unwrap_or_default();
    same(&recorded.sha256, &sha256(text.as_bytes()))
}

fn same_plugin(kind: Kind, plugins: &PluginsConfig, recorded: &str) -> Result<()> {
    same(recorded, &PluginRef::configured(kind, plugins)?.identity().sha256)
}

/// Every step up to `last` once, in order.
fn whole_metrics(path: &Path, last: u64) -> Result<()> {
    if last > 0 {
        fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
    }
    let steps = metrics::read(path)?.into_iter().filter_map(|metric| match metric {
        Metric::Step(step) => Some(step.step),
        Metric::HeldOut(_) => None,
    });
    let steps: Vec<u64> = steps.collect();
    if steps.iter().copied().eq(1..=steps.len() as u64) && steps.len() as u64 >= last {
        return Ok(());
    }
    let message = format!("it holds {} steps, and not each of 1 to {last} once in order", steps.len());
    Err(Error::new("run::verify_failed", message))
}
