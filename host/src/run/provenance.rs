//! `provenance.json`: what was asked for and what was done.
//!
//! The types here are the file's schema, field by field. It is written when a run starts and rewritten when it is
//! resumed and when it ends. A resume reads the stored record, makes a [new](Provenance::new) one of what is there now,
//! has [`changes::refuse_changes`] compare the two, and goes on with the stored one.
//!
#![doc = include_str!("provenance.md")]

use super::atomic::{self, Existing};
use super::changes::{self, Change};
use super::clock::utc_now;
use super::folder::{PROVENANCE, RunFolder};
use super::machine::Machine;
use super::metrics::nan_from_null;
use crate::config::{Action, Entry, Origin, Resolved, WeightDtype, entries};
use crate::device;
use crate::error::{Error, Result};
use crate::hash::{FileHash, sha256};
use crate::plugins::Limits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Version of the schema below. A field that is added with a default leaves it; any other change raises it.
pub const SCHEMA: u32 = 1;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Unique name of the run: that of its folder and eight random-looking digits.
    pub run_id: String,
    /// The run whose adapter this one starts from.
    #[serde(default)]
    pub parent_run: Option<String>,
    /// When the run was started, UTC, RFC 3339.
    pub created: String,
    /// The program that ran.
    pub program: Program,
    /// The command that started the run, word by word.
    pub command_line: Vec<String>,
    /// Every configuration key, with its value and where it came from.
    pub config: BTreeMap<String, ConfigValue>,
    /// Hash of the configuration, paths apart ([`changes::config_sha256`]).
    pub config_sha256: String,
    /// What the run reads.
    pub inputs: Inputs,
    /// Where it computes.
    pub machine: Machine,
    /// By kernel (`windowed_attention`, `grouped_mm` and so on): what was asked for and what was used.
    pub kernels: BTreeMap<String, Implementation>,
    /// Hash of what the kernels resolve to ([`device::kernels_sha256`]).
    #[serde(default)]
    pub kernels_sha256: String,
    /// By what is stored (`weights`, `adapters` and so on): the number format asked for and used.
    #[serde(default)]
    pub dtypes: BTreeMap<String, Implementation>,
    /// What was compiled and chosen while it ran.
    #[serde(default)]
    pub jit: Jit,
    /// The records of every step, once they are laid out.
    #[serde(default)]
    pub order_manifest: Option<FileHash>,
    /// By what they seed.
    pub seeds: BTreeMap<String, u64>,
    /// Each time the run was taken up again.
    #[serde(default)]
    pub resumes: Vec<Resume>,
    /// Whether the corpora may be trained on; nothing where the run was started before this was asked.
    #[serde(default)]
    pub eligibility: Option<EligibilityRecord>,
    /// By check: what it found.
    #[serde(default)]
    pub verdicts: BTreeMap<String, String>,
    /// By gate: what it was to do and what it said.
    #[serde(default)]
    pub gates: BTreeMap<String, GateRecord>,
    /// How the run ended; nothing while it runs, or where it was killed.
    #[serde(default)]
    pub outcome: Option<Outcome>,
}

/// The program that ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// `tunehost`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The commit that it was built from, with `-dirty` where the sources differed from it; nothing outside a repository.
    #[serde(default)]
    pub git_revision: Option<String>,
}

/// The value of a configuration key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigValue {
    /// The value as TOML in one line, and so to the last bit; null where an optional key is not set.
    pub value: Option<String>,
    /// `file:line`, the flag, or `default`.
    pub origin: String,
}

/// The files that a run reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// The base's configuration, weights and index, by file name.
    pub base: BTreeMap<String, FileHash>,
    /// `tokenizer.json`.
    pub tokenizer: Option<FileHash>,
    /// The chat template, where one is used.
    pub template: Option<FileHash>,
    /// The corpus manifest, where there is one.
    #[serde(default)]
    pub corpus_manifest: Option<FileHash>,
    /// The weights of the adapter that the run starts from, where it is not a fresh one.
    #[serde(default)]
    pub adapter: Option<FileHash>,
    /// The corpus, in the order of `data.sources`.
    pub corpus: Vec<FileHash>,
    /// By kind.
    pub plugins: BTreeMap<String, PluginRecord>,
}

/// A plugin that the run calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginRecord {
    /// The name it gives itself.
    pub name: String,
    /// The version it gives itself.
    pub version: String,
    /// `bundled`, or the path it was read from.
    pub source: String,
    /// SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
    /// What it may use; nothing in a run folder of a version that did not write it down.
    #[serde(default)]
    pub limits: Option<Limits>,
}

/// How a kernel is computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Implementation {
    /// What was asked for; `auto` where the choice was left open.
    pub requested: String,
    /// What was used.
    pub resolved: String,
}

/// Kernels that are made while a run runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jit {
    /// How many the last process of the run compiled; nothing before it ends, or where it was killed.
    pub compiled: Option<u64>,
    /// What is compiled, and when.
    #[serde(default)]
    pub how: String,
    /// By kernel, the variant that measuring chose: no kernel of this version is chosen so, and a resume computes with the same.
    pub autotuned: BTreeMap<String, String>,
}

/// One resumption.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// When, UTC, RFC 3339.
    pub at: String,
    /// The optimiser step whose checkpoint it went on from; 0 is the start.
    pub from_step: u64,
    /// The command, word by word.
    pub command_line: Vec<String>,
    /// What was not as it was when the run started, and `--allow` let pass.
    #[serde(default)]
    pub allowed: Vec<Change>,
}

/// What permits the run to train on its corpora.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EligibilityRecord {
    /// What the eligibility plugin decided, or why it was not asked.
    pub verdict: String,
    /// Whether anything that stands against a corpus was overridden.
    pub training_eligibility_override: bool,
    /// What was overridden.
    pub overridden_blockers: Vec<Overridden>,
    /// What is done in place of it, in the plugin's words.
    pub substitute_controls: Vec<String>,
    /// The grants that the run used, as they were then.
    pub grants: Vec<GrantUse>,
    /// The ledger's last line when the run had written its uses; nothing without grants, or before.
    pub ledger: Option<LedgerHead>,
}

/// Something that stands against a corpus and does not stop the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overridden {
    /// `corpus/blocker`.
    pub blocker: String,
    /// Why it stands there, as the manifest says.
    pub reason: String,
    /// Id of the grant that it rests on.
    pub grant: String,
}

/// A grant that the run used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantUse {
    /// Its id.
    pub id: String,
    /// `corpus` or `corpus/blocker`.
    pub scope: String,
    /// Who gave it.
    pub operator: String,
    /// When it ends, as the grants file says.
    pub expires: String,
    /// Runs that it was good for.
    pub uses: u32,
}

/// A line of a ledger of grants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerHead {
    /// The ledger, without links.
    pub path: String,
    /// The line, counted from 1; 0 is the empty ledger.
    pub sequence: u64,
    /// Its hash; 64 zeros in the empty ledger.
    pub sha256: String,
}

/// What a gate was to do and what it said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateRecord {
    /// What it does with what it finds.
    pub action: Action,
    /// What it said, in one word.
    pub verdict: Verdict,
    /// What it saw.
    pub found: String,
}

/// What a gate said, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It found nothing.
    Passed,
    /// It found something and let the run go on.
    Warned,
    /// It found something and ended the run.
    Stopped,
    /// It did not look.
    Off,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The end in one word.
    pub status: Status,
    /// Optimiser steps done.
    pub step: u64,
    /// When, UTC, RFC 3339.
    pub ended: String,
    /// The error or the reason for stopping.
    pub reason: Option<String>,
    /// Held-out loss by root.
    pub held_out: BTreeMap<String, HeldOut>,
    /// The best evaluation by steps.
    #[serde(default)]
    pub best: Option<BestEvaluation>,
    /// The step whose adapter was exported.
    #[serde(default)]
    pub exported_step: Option<u64>,
    /// Exported files, by path within the run folder.
    pub exports: BTreeMap<PathBuf, FileHash>,
    /// Configuration, reports, logs and held-out losses as they were then, by path within the run folder.
    #[serde(default)]
    pub files: BTreeMap<PathBuf, FileHash>,
}

/// The evaluation in the run with the lowest held-out loss; its step has a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// After this optimiser step.
    pub step: u64,
    /// Mean loss per trained token of all records, in nats.
    pub loss: f64,
}

/// The end in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Every step was done.
    Finished,
    /// It was asked to stop, saved, and can be resumed.
    Stopped,
    /// An error ended it.
    Failed,
}

/// Held-out loss of one root in nats per trained token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    /// Before training.
    #[serde(deserialize_with = "nan_from_null")]
    pub before: f64,
    /// After the last step.
    #[serde(deserialize_with = "nan_from_null")]
    pub after: f64,
    /// Standard error of the difference, paired by record; none where there is one record only.
    pub standard_error: Option<f64>,
}

impl Provenance {
    /// The record of a run that starts now in the folder `run`, by this process's command line.
    pub fn new(
        run: &Path,
        resolved: &Resolved,
        inputs: Inputs,
        machine: Machine,
        kernels: BTreeMap<String, Implementation>,
    ) -> Self {
        let value = |entry: Entry| {
            let origin = resolved.origins.get(&entry.key).unwrap_or(&Origin::Default).to_string();
            (entry.key.clone(), ConfigValue { value: entry.text(), origin })
        };
        Self {
            schema: SCHEMA,
            run_id: new_run_id(run),
            parent_run: None,
            created: utc_now(),
            program: Program {
                name: env!("CARGO_PKG_NAME").into(),
                version: env!("CARGO_PKG_VERSION").into(),
                git_revision: option_env!("TUNEHOST_GIT_REVISION").map(String::from),
            },
            command_line: command_line(),
            config: entries(&resolved.config).into_iter().map(value).collect(),
            config_sha256: changes::config_sha256(&resolved.config),
            inputs,
            dtypes: dtypes(resolved.config.model.weights),
            jit: Jit { how: device::compilation(&machine.device).into(), ..Jit::default() },
            machine,
            order_manifest: None,
            kernels_sha256: device::kernels_sha256(kernels.iter().map(|(name, k)| (&name[..], &k.resolved[..]))),
            kernels,
            seeds: BTreeMap::from([("train.seed".into(), resolved.config.train.seed)]),
            resumes: Vec::new(),
            eligibility: None,
            verdicts: BTreeMap::new(),
            gates: BTreeMap::new(),
            outcome: None,
        }
    }

    /// Notes that the run goes on from the checkpoint of `from_step`, by this process's command line, with what is `allowed`
    /// to differ.
    pub fn resumed(&mut self, from_step: u64, allowed: Vec<Change>) {
        self.resumes.push(Resume { at: utc_now(), from_step, command_line: command_line(), allowed });
        self.outcome = None;
    }

    /// How the run ended, where every step is done.
    pub fn finished(&self) -> Option<&Outcome> {
        self.outcome.as_ref().filter(|outcome| outcome.status == Status::Finished)
    }

    /// Writes the file, or replaces the one that this run wrote before.
    pub fn write(&self, folder: &RunFolder) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).expect("provenance has string keys");
        text.push(b'\n');
        atomic::write(&folder.file(PROVENANCE), &text, Existing::Replace)
    }

    /// Reads the file of the run folder `folder`; it need not be locked.
    ///
    /// # Errors
    /// `run::provenance_broken`, also for a schema this version does not know.
    pub fn read(folder: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Versioned {
            schema: u32,
        }
        let path = folder.join(PROVENANCE);
        let text = fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
        let broken = |what: String| {
            Error::new("run::provenance_broken", format!("{}: {what}", path.display()))
                .help("restore the file from a copy, or use the version of tunehost that wrote it; checkpoints and exports stand for themselves")
        };
        let Versioned { schema } = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
        if schema != SCHEMA {
            return Err(
                broken(format!("schema {schema} is not known to this version")).expected(format!("schema {SCHEMA}"))
            );
        }
        serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))
    }
}

/// Frozen matrices are kept as they were asked for; everything that is trained or summed is f32.
fn dtypes(weights: WeightDtype) -> BTreeMap<String, Implementation> {
    let same = |name: &str| Implementation { requested: name.into(), resolved: name.into() };
    let f32 = ["norms and router", "adapters", "gradients", "optimizer", "activations", "sums"];
    let fixed = f32.map(|what| (what.to_string(), same(WeightDtype::F32.name())));
    fixed.into_iter().chain([("weights".to_string(), same(weights.name()))]).collect()
}

fn command_line() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// A name that no other run has, even one in a folder of the same name elsewhere or later.
fn new_run_id(folder: &Path) -> String {
    let name = folder.canonicalize().unwrap_or_else(|_| folder.into());
    let unique = format!("{} {:?} {}", name.display(), std::time::SystemTime::now(), std::process::id());
    let name = name.file_name().map_or("run".into(), |name| name.to_string_lossy());
    format!("{name}-{}", &sha256(unique.as_bytes())[..8])
}

#[cfg(test)]
pub(super) mod tests;
