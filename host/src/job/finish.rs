//! After the last step: held-out loss, exports, and the words that end a run.

use super::training::Trained;
use crate::config::{Action, Config};
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::export::{self, Judge, MIN_RETAINED_GAIN, Made, OnDisk, PendingFolder, Trial};
use crate::hash::FileHash;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::lora::group;
use crate::model::spec::ModelSpec;
use crate::plugins::{Exporter, Kind, PluginRef};
use crate::report::{Reporter, duration};
use crate::run::atomic;
use crate::run::checkpoint;
use crate::run::folder::{
    CHECKPOINTS, CONFIG, CORPUS, EXPORT, FILTER, HELD_OUT, METRICS, ORDER, PROVENANCE, RunFolder, TIMING, TRUNCATION,
    WINDOW_LOG, shell_word,
};
use crate::run::provenance::{HeldOut, Provenance};
use crate::train::evaluate::{RecordLoss, RootChange, compare};
use burn::tensor::Device;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prints the table of held-out losses and returns it for provenance. `copied` marks the records that have a copy among the
/// trained ones: their loss says how well they were learnt by heart, so the others are also shown alone.
pub fn report_change(
    roots: &[String],
    before: &[RecordLoss],
    after: &[RecordLoss],
    copied: &[bool],
    reporter: &Reporter,
) -> BTreeMap<String, HeldOut> {
    reporter.result(format!(
        "\n{:<20} {:>8} {:>8} {:>9} {:>9} {:>22}",
        "held out", "records", "tokens", "before", "after", "change (paired s.e.)"
    ));
    let changes = compare(roots, before, after);
    let unseen = |losses: &[RecordLoss]| -> Vec<RecordLoss> {
        losses.iter().zip(copied).filter(|(_, copied)| !**copied).map(|(l, _)| l.clone()).collect()
    };
    let unseen = compare(roots, &unseen(before), &unseen(after));
    for change in &changes {
        row(&change.root, change, reporter);
        let alone = unseen.iter().find(|u| u.root == change.root);
        let copies = change.records - alone.map_or(0, |u| u.records);
        let fields = json!({"copied_records": copies, "unseen": alone});
        let mut event = serde_json::to_value(change).expect("plain numbers");
        event.as_object_mut().expect("a struct").append(&mut fields.as_object().expect("an object").clone());
        reporter.event("held_out", event);
        if let Some(alone) = alone.filter(|_| copies > 0) {
            row(&format!("  without {copies} copies"), alone, reporter);
        }
    }
    if changes.iter().map(|c| c.records).sum::<usize>() > unseen.iter().map(|c| c.records).sum() {
        reporter.line("copies: held-out records whose very tokens were also trained; data.split_by = \"content\" keeps them apart");
    }
    let entry =
        |c: RootChange| (c.root, HeldOut { before: c.before, after: c.after, standard_error: c.standard_error });
    changes.into_iter().map(entry).collect()
}

fn row(name: &str, change: &RootChange, reporter: &Reporter) {
    let RootChange { records, tokens, before, after, standard_error, .. } = change;
    reporter.result(format!(
        "{name:<20} {records:>8} {:>8} {before:>9.3} {after:>9.3} {:>22}",
        group(*tokens),
        format!("{:+.3} ({})", after - before, standard_error.map_or("n/a".into(), |e| format!("{e:.3}")))
    ));
}

/// What a run exports.
pub struct Exports<'a> {
    /// The run's configuration.
    pub config: &'a Config,
    /// Where it is written.
    pub folder: &'a RunFolder,
    /// The base on disk.
    pub checkpoint: &'a Checkpoint,
    /// Its tensors.
    pub spec: &'a ModelSpec,
    /// Its shape.
    pub text: &'a TextConfig,
    /// Where the merged model is judged.
    pub device: &'a Device,
    /// The chat template that was trained with.
    pub template: Option<&'a str>,
    /// What was trained.
    pub adapter: &'a Adapter,
    /// The records that are held out.
    pub held_out: &'a [&'a Record],
}

impl Exports<'_> {
    /// Writes the configured exports into the run folder; one that is there already is whole and stays. Their files by path
    /// within the run folder.
    ///
    /// # Errors
    /// Classes `export`, `plugin`, `io`.
    pub fn write(&self, exporter: &mut Exporter, reporter: &mut Reporter) -> Result<BTreeMap<PathBuf, FileHash>> {
        let root = self.folder.file(EXPORT);
        fs::create_dir_all(&root).map_err(|e| Error::io("create", &root, e))?;
        let mut files = BTreeMap::new();
        if self.config.export.adapter {
            let dir = root.join("adapter");
            if !dir.exists() {
                self.carry_out(exporter, &dir, reporter)?.commit()?;
            }
            add_files(&dir, self.folder.path(), &mut files)?;
        }
        if self.config.export.merged {
            let dir = root.join("merged");
            if !dir.exists() {
                self.merge(&dir, reporter)?;
            }
            add_files(&dir, self.folder.path(), &mut files)?;
        }
        Ok(files)
    }

    fn carry_out(&self, exporter: &mut Exporter, dir: &Path, reporter: &mut Reporter) -> Result<PendingFolder> {
        let tuned = export::tuned(self.adapter, self.spec, self.checkpoint, self.template)?;
        let plan = exporter.plan(&tuned)?;
        plan.notes.iter().for_each(|note| reporter.line(format!("note        {note}")));
        let pending = PendingFolder::new(dir)?;
        let mut written = |done, total| reporter.progress("bytes written", done, total);
        export::carry_out(&plan, self.adapter, self.checkpoint, &pending, &mut |_| Ok(()), &mut written)?;
        reporter.finish_steps();
        Ok(pending)
    }

    /// The merged model, judged where there are records to judge by. The run is complete whatever comes of it: what it trained
    /// is saved, and the report and a warning say what the export holds of it.
    fn merge(&self, dir: &Path, reporter: &mut Reporter) -> Result<()> {
        let mut merger = Exporter::load(&PluginRef::resolve(Kind::Exporter, "merge-bf16", &[])?, None)?;
        let pending = self.carry_out(&mut merger, dir, reporter)?;
        if self.held_out.is_empty() {
            reporter.warn(format!("{} is not judged: no record is held out", dir.display()));
            return pending.commit();
        }
        let base = OnDisk { checkpoint: self.checkpoint, config: self.text, adapter: None };
        let trial = Trial {
            judge: Judge { device: self.device, weights: self.config.model.weights },
            device: &self.config.model.device,
            models: [base, OnDisk { adapter: Some(self.adapter), ..base }],
            spec: self.spec,
            records: self.held_out,
            min_retained_gain: MIN_RETAINED_GAIN,
        };
        let settings = json!({});
        let made = Made {
            exporter: merger.identity(),
            settings: &settings,
            notes: &[],
            search: None,
            // The report stands in the run's own folder, and is the same in every run that trains the same.
            run_id: None,
        };
        let (proof, report) = match export::judge(&pending, &trial, &made, reporter) {
            // The gate let the run go on with such losses.
            Err(e) if e.code() == "model::not_finite" && self.config.gates.not_finite == Action::Warn => {
                reporter.warn(format!("{} is not judged: {}", dir.display(), e.message()));
                return pending.commit();
            }
            judged => judged?,
        };
        pending.commit()?;
        proof.lines().into_iter().for_each(|line| reporter.line(line));
        reporter.event("export", report);
        if let Err(failed) = proof.verdict_on(dir, MIN_RETAINED_GAIN) {
            reporter.warn(failed.message());
        }
        Ok(())
    }
}

/// Puts held-out losses and exports aside that were computed otherwise than what follows: an evaluation or an export that is in
/// its place is taken for that of this run.
///
/// # Errors
/// Class `io`.
pub fn set_results_aside(folder: &RunFolder, reporter: &mut Reporter) -> Result<()> {
    for path in [HELD_OUT, EXPORT].map(|name| folder.file(name)).iter().filter(|path| path.exists()) {
        let aside = atomic::set_aside(path, "earlier")?;
        reporter.warn(format!("{} was computed otherwise and is now {}", path.display(), aside.display()));
    }
    atomic::sync_folder(folder.path())
}

/// Says that a run is finished: nothing of it is computed again, whatever became of what it wrote.
///
/// # Errors
/// `run::incomplete`, naming everything that its provenance names and that is gone.
pub fn say_finished(folder: &RunFolder, provenance: &Provenance, reporter: &Reporter) -> Result<()> {
    let Some(outcome) = provenance.finished() else { return Ok(()) };
    let checkpoint = checkpoint::folder_of_step(Path::new(CHECKPOINTS), outcome.step);
    let recorded = outcome.files.keys().chain(outcome.exports.keys());
    let recorded = recorded.map(PathBuf::as_path).chain([Path::new(ORDER), &checkpoint]);
    let gone: Vec<String> =
        recorded.filter(|path| !folder.path().join(path).exists()).map(|path| path.display().to_string()).collect();
    let (run, step, ended) = (&provenance.run_id, outcome.step, &outcome.ended);
    if gone.is_empty() {
        reporter.result(format!("run {run} is finished after step {step}, since {ended}: nothing is left to do"));
        reporter.event("finished", json!({"run": folder.path(), "step": step, "ended": ended}));
        return Ok(());
    }
    let message = format!("run {run} is finished after step {step}, and of what it wrote is gone: {}", gone.join(", "));
    Err(Error::new("run::incomplete", message)
        .expected(format!("everything that {} names", folder.file(PROVENANCE).display()))
        .help("restore it from a copy: a finished run is not computed again; tunehost export writes a tune anew, and tunehost run another run"))
}

/// Configuration, reports, logs and held-out losses of a run, hashed, by path within the run folder.
///
/// # Errors
/// Class `io`.
pub fn hash_files(folder: &RunFolder) -> Result<BTreeMap<PathBuf, FileHash>> {
    let mut files = BTreeMap::new();
    for name in [CONFIG, CORPUS, FILTER, TRUNCATION, METRICS, TIMING, WINDOW_LOG] {
        let path = folder.file(name);
        if path.exists() {
            files.insert(name.into(), FileHash::of(&path)?);
        }
    }
    let held_out = folder.file(HELD_OUT);
    if held_out.exists() {
        add_files(&held_out, folder.path(), &mut files)?;
    }
    Ok(files)
}

fn add_files(dir: &Path, run: &Path, files: &mut BTreeMap<PathBuf, FileHash>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| Error::io("list", dir, e))? {
        let path = entry.map_err(|e| Error::io("list", dir, e))?.path();
        // What a killed process left beside its place is nobody's.
        if path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b".")) {
            let name = path.strip_prefix(run).unwrap_or(&path).to_path_buf();
            files.insert(name, FileHash::of(&path)?);
        }
    }
    Ok(())
}

/// The last lines of a complete run.
pub fn summary(config: &Config, folder: &RunFolder, trained: &Trained, wall: Duration, reporter: &Reporter) {
    let run = folder.path().display();
    let base = shell_word(&config.model.base);
    // As it was called: it need not be on the PATH.
    let program = std::env::args().next().unwrap_or_else(|| "tunehost".into());
    let steps = trained.step;
    let here = match (trained.done_before, steps - trained.done_before) {
        (0, _) => String::new(),
        (_, 0) => ", all of them before".into(),
        (_, here) => format!(", of them here {here}"),
    };
    let mut summary = format!("\n{steps} steps{here}");
    if trained.tokens > 0 {
        let seconds = trained.wall.as_secs_f64().max(1e-9);
        summary += &format!(
            ", {} tokens in {} ({:.0} tokens/s), padding {:.1}%, plugins {:.3}% of the time",
            group(trained.tokens as usize),
            duration(trained.wall),
            trained.tokens as f64 / seconds,
            100.0 * trained.padding,
            100.0 * trained.plugins.as_secs_f64() / seconds,
        );
    }
    reporter.result(format!("{summary}; {} in all", duration(wall)));
    reporter.result(format!("run folder  {run}"));
    let (adapter, merged) = (folder.file(EXPORT).join("adapter"), folder.file(EXPORT).join("merged"));
    if config.export.adapter {
        reporter.result(format!("adapter     {}", adapter.display()));
    }
    if config.export.merged {
        reporter.result(format!("merged      {}", merged.display()));
    }
    reporter.line("\nwhat to try next");
    if config.export.adapter {
        reporter.line(format!(
            "  {program} generate {base} --adapter {} --prompt \"Good morning, how are you?\"",
            shell_word(&adapter)
        ));
    }
    if config.export.merged {
        let data = shell_word(&config.data.sources[0].path);
        let template = if config.data.template.is_some() { " --template base" } else { "" };
        reporter.line(format!("  {program} score {}{template} --data {data}", shell_word(&merged)));
    }
    reporter.event(
        "done",
        json!({"run": run.to_string(), "steps": steps, "done_before": trained.done_before, "tokens": trained.tokens,
        "train_s": trained.wall.as_secs_f64(), "wall_s": wall.as_secs_f64(), "plugins_s": trained.plugins.as_secs_f64(), "padding": trained.padding}),
    );
}
