//! An export on its way to its name: what was written, what was made of it, and the report that says both.

use super::PendingFolder;
use super::proof::{Judge, OnDisk, Proof, Verdict};
use super::search::SearchReport;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::hash::FileHash;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::peft;
use crate::model::spec::ModelSpec;
use crate::plugins::Identity;
use crate::report::Reporter;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What is said of the export, beside its files.
const REPORT: &str = "export.json";

/// The part of the gain that an export retains at least, where nothing else is asked for.
pub const MIN_RETAINED_GAIN: f64 = 0.8;

/// What an export is judged beside, and how.
pub struct Trial<'a> {
    /// Where and how the models are computed.
    pub judge: Judge<'a>,
    /// As it is called in reports.
    pub device: &'a str,
    /// The base without and with what was tuned.
    pub models: [OnDisk<'a>; 2],
    /// The base's tensors.
    pub spec: &'a ModelSpec,
    /// Records that nothing was trained on.
    pub records: &'a [&'a Record],
    /// The part of the gain under which the export fails.
    pub min_retained_gain: f64,
}

/// What the files were made from and by.
pub struct Made<'a> {
    /// The plugin that laid them out.
    pub exporter: &'a Identity,
    /// Its settings.
    pub settings: &'a Value,
    /// What it has to say to the user, and what was warned of.
    pub notes: &'a [String],
    /// What a search of scales gained.
    pub search: Option<&'a SearchReport>,
    /// The run that is exported; none for an adapter, and for what a run itself writes.
    pub run_id: Option<&'a str>,
}

/// Judges the files in `pending` as they were written, and writes the report beside them.
///
/// # Errors
/// Those of [`Judge::prove`], of reading a model or an adapter, class `io`.
pub fn judge(pending: &PendingFolder, trial: &Trial, made: &Made, reporter: &mut Reporter) -> Result<(Proof, Value)> {
    let files = hashes(pending.temporary())?;
    let proof = prove(trial, pending.temporary(), reporter)?;
    reporter.finish_steps();
    let Identity { name, version, sha256, .. } = made.exporter;
    let report = json!({
        "schema": 1,
        "program": env!("CARGO_PKG_VERSION"),
        "exporter": {"name": name, "version": version, "sha256": sha256, "settings": made.settings},
        "run": made.run_id,
        "base": trial.models[0].checkpoint.dir(),
        "notes": made.notes,
        "files": files,
        "judged_with": {"device": trial.device, "weights": trial.judge.weights.name()},
        "scales": made.search,
        "min_retained_gain": trial.min_retained_gain,
        "proof": proof,
    });
    pending.write(REPORT, format!("{report:#}\n").as_bytes())?;
    Ok((proof, report))
}

fn prove(trial: &Trial, dir: &Path, reporter: &mut Reporter) -> Result<Proof> {
    let [base, tuned] = trial.models;
    let mut judge_with = |export: OnDisk| {
        let models = [base, tuned, export];
        let mut progress = |done, total| reporter.progress("layers judged", done, total);
        trial.judge.prove(models, trial.records, trial.min_retained_gain, &mut progress)
    };
    if dir.join(peft::CONFIG_FILE).exists() {
        let adapter = peft::read(dir, trial.spec, trial.judge.device)?;
        return judge_with(OnDisk { adapter: Some(&adapter), ..base });
    }
    let (checkpoint, config) = (Checkpoint::open(dir)?, TextConfig::read(dir)?);
    judge_with(OnDisk { checkpoint: &checkpoint, config: &config, adapter: None })
}

fn hashes(dir: &Path) -> Result<BTreeMap<String, Value>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(|e| Error::io("list", dir, e))? {
        let path = entry.map_err(|e| Error::io("list", dir, e))?.path();
        let hash = FileHash::of(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, json!({"bytes": hash.bytes, "sha256": hash.sha256}));
    }
    Ok(files)
}

impl Proof {
    /// The lines that say it.
    pub fn lines(&self) -> Vec<String> {
        let Self { records, tokens, base, tuned, export, kl, standard_error, .. } = self;
        let error = standard_error.map_or("n/a".into(), |error| format!("{error:.4}"));
        vec![
            format!("judged      {records} held-out records, {tokens} trained tokens; losses in nats a token"),
            format!("  base                {base:.4}"),
            format!("  base + adapter      {tuned:.4}  (gain {}, s.e. {error})", rounded(base - tuned, 4)),
            format!("  export              {export:.4}  (KL to base + adapter {kl:.5})"),
            format!("  retained gain       {}", self.retained_gain.map_or("n/a".into(), |part| percent(part, 1))),
        ]
    }

    /// An error where the export in `out` does not hold what was tuned.
    ///
    /// # Errors
    /// `export::gain_lost`, `export::no_measurable_gain`, `export::equal_to_base`.
    pub fn verdict_on(&self, out: &Path, min_retained_gain: f64) -> Result<()> {
        let out = out.display();
        let error = match self.verdict {
            Verdict::Passed => return Ok(()),
            Verdict::Failed => {
                let (retained, least) = apart(self.retained_gain.unwrap_or(0.0), min_retained_gain);
                Error::new("export::gain_lost", format!("{out} retains {retained} of what was tuned"))
                    .expected(format!("at least {least}"))
                    .help("use a format with more bits; --min-retained-gain sets what is enough")
            }
            Verdict::NoMeasurableGain => Error::new("export::no_measurable_gain", format!("{out}: no measurable gain"))
                .expected("a loss of base + adapter that is lower than the base's by more than two standard errors")
                .help(match self.tuned > self.base {
                    true => {
                        "base + adapter does worse than the base here: take an earlier checkpoint, or tune otherwise"
                    }
                    false => "judge on more records with --data, or tune longer",
                })
                .help("the files are written, and nothing is known of them"),
            Verdict::EqualToTheBase => {
                Error::new("export::equal_to_base", format!("{out} answers as the base does, to the last bit"))
                    .expected("a model that differs from its base")
                    .help("the adapter changes nothing, or the update was rounded away")
            }
        };
        Err(error.help(format!("{REPORT} says so too")))
    }
}

/// `value` with `decimals` digits, and without the sign of what they show as zero.
fn rounded(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if digits.bytes().all(|c| matches!(c, b'0' | b'.')) => digits.into(),
        _ => text,
    }
}

fn percent(part: f64, decimals: usize) -> String {
    rounded(100.0 * part, decimals) + "%"
}

/// Two parts in percent, with as many digits as it takes to tell them apart.
fn apart(a: f64, b: f64) -> (String, String) {
    let shown = |decimals| (percent(a, decimals), percent(b, decimals));
    (1..8).map(shown).find(|(a, b)| a != b).unwrap_or_else(|| shown(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_shown_apart_and_zero_has_no_sign() {
        assert_eq!(apart(0.99997, 1.0), ("99.997%".into(), "100.000%".into()));
        assert_eq!(apart(0.5, 0.8), ("50.0%".into(), "80.0%".into()));
        assert_eq!(
            ["0.0000", "-0.0001", "-1.5"],
            [rounded(-0.00004, 4), rounded(-0.00006, 4), rounded(-1.5, 1)].each_ref().map(String::as_str)
        );
    }
}
