//! A whole run: prepare, train, evaluate, export; and the same from a checkpoint.

mod evaluation;
mod finish;
mod gates;
mod given;
mod inputs;
mod policies;
mod prepare;
mod recompute;
mod rehearsal;
mod saving;
mod scheduling;
mod training;
mod window;

pub use policies::Policies;
pub use prepare::{Prepared, check_exporter, planned_steps};
pub use recompute::recompute;
pub use rehearsal::Rehearsal;

use crate::config::{self, Config, ExportedCheckpoint, Resolved};
use crate::corpus::Corpus;
use crate::device;
use crate::eligibility::{self, manifest::Manifest};
use crate::error::{Error, Result};
use crate::hash::FileHash;
use crate::model::adapter::Adapter;
use crate::model::lora::LoraPlan;
use crate::report::Reporter;
use crate::run::atomic::{self, Existing};
use crate::run::changes::{configuration, refuse_changes_beside};
use crate::run::checkpoint::{self, newest_whole};
use crate::run::clock::{Until, utc_now};
use crate::run::folder::{
    CHECKPOINTS, CONFIG, CORPUS, FILTER, METRICS, ORDER, RunFolder, TRUNCATION, resume_command, shell_word,
};
use crate::run::manifest::{self, MicroBatches, OrderManifest};
use crate::run::metrics;
use crate::run::provenance::{BestEvaluation, EligibilityRecord, GateRecord, Outcome, Overridden, Provenance, Status};
use crate::run::signal::StopRequest;
use crate::train::engine::Engine;
use crate::train::evaluate;
use crate::train::gates::Records;
use crate::train::optimizer::AdamW;
use crate::train::state;
use evaluation::Evaluation;
use finish::Exports;
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use training::{Loop, Progress};
use tunehost_kernels::memory;
use window::Window;

/// The key of a changed checkpoint scheduler among [`changes`](crate::run::changes::changes).
pub const SCHEDULER: &str = "plugin/checkpoint_scheduler";

/// Where provenance has what the gate `not_finite` said of held-out losses, beside what it said of steps.
const HELD_OUT_GATE: &str = "not_finite_held_out";

/// Runs a configuration in a new run folder: `run_dir`, or the next free one under `run.root`. This process ends before `until`.
///
/// # Errors
/// Whatever stopped it. Saved work stays, and provenance records the failure.
pub fn start(
    resolved: &Resolved,
    run_dir: Option<&Path>,
    until: Option<&Until>,
    reporter: &mut Reporter,
) -> Result<()> {
    let started = Instant::now();
    let config = &resolved.config;
    // Taken over before anything long starts: a first Ctrl-C never loses what was saved.
    let stop = StopRequest::install()?;
    if let Some(dir) = run_dir {
        RunFolder::check_free(dir)?;
    }
    let mut records = Records::new();
    let _lease = gates::take_device(config, &mut records, reporter)?;
    let manifest = manifest(config)?;
    let mut policies = Policies::load(&config.plugins, until)?;
    let eligibility = eligibility::ask(config, manifest.as_ref(), &mut policies.eligibility, run_dir, None)?;
    say(&eligibility, reporter);
    let mut prepared = Prepared::new(config, manifest.map(|m| m.file), policies, reporter)?;
    let place = run_dir.unwrap_or(&config.run.root);
    gates::before_start(config, &prepared, &inputs::kernels(config)?, place, &mut records, reporter)?;
    let folder = match run_dir {
        Some(dir) => RunFolder::create_at(dir)?,
        None => RunFolder::create(&config.run.root, &config.name)?,
    };
    reporter.line(format!("run folder  {}", folder.path().display()));
    reporter.event("run", json!({"folder": folder.path(), "steps": prepared.steps.len()}));
    let mut provenance = inputs::provenance(folder.path(), resolved, &prepared)?;
    provenance.eligibility = Some(eligibility);
    provenance.gates = records;
    atomic::write(&folder.file(CONFIG), config::to_toml(resolved)?.as_bytes(), Existing::Replace)?;
    let report = serde_json::to_vec_pretty(&prepared.corpus.report).expect("a report is numbers and strings");
    atomic::write(&folder.file(TRUNCATION), &report, Existing::Replace)?;
    let Corpus { files, sources, duplicates, .. } = &prepared.corpus;
    let corpus = json!({"files": files, "sources": sources, "duplicates": duplicates});
    let corpus = serde_json::to_vec_pretty(&corpus).expect("a report is numbers and strings");
    atomic::write(&folder.file(CORPUS), &corpus, Existing::Replace)?;
    let filtered = serde_json::to_vec_pretty(&prepared.corpus.filtered).expect("a report is numbers and strings");
    atomic::write(&folder.file(FILTER), &filtered, Existing::Replace)?;
    provenance.write(&folder)?;
    let session = Session { config, folder: &folder, stop: &stop, until, sets: &[], started };
    let window = Window::new(&config.window, &folder);
    session.conclude(window, provenance, reporter, |session, provenance, reporter| {
        provenance.order_manifest = Some(session.commit_order(&prepared, None)?);
        session.check_room(&prepared, provenance, reporter)?;
        session.consume_grants(provenance, reporter)?;
        let engine = prepared.load_engine(config, reporter)?;
        let adapter = prepared.initial_adapter(config.train.seed, &engine.model.device);
        let optimizer = AdamW::new(&config.train, &adapter);
        let from = Progress { step: 0, adapter, optimizer, metrics: None };
        session.train(&mut prepared, engine, from, provenance, reporter)
    })
}

/// What a resume may do otherwise than the run did until now.
#[derive(Clone, Copy)]
pub struct Otherwise<'a> {
    /// `KEY=VALUE` over the run's configuration.
    pub sets: &'a [String],
    /// Keys that may have changed ([`refuse_changes`]).
    pub allow: &'a [String],
    /// When this process is to have ended.
    pub until: Option<&'a Until>,
}

/// Continues the run in `dir` from its newest whole checkpoint. Of one that is finished nothing is computed again.
///
/// # Errors
/// `run::changed` when anything that decides the result is not what it was, `run::incomplete` where a finished run has lost something
/// that it wrote, and whatever stops the run.
pub fn resume(dir: &Path, otherwise: &Otherwise, reporter: &mut Reporter) -> Result<()> {
    let started = Instant::now();
    let stop = StopRequest::install()?;
    let folder = RunFolder::open(dir)?;
    let Otherwise { sets, allow, until } = *otherwise;
    // Before anything can fail: what a process that was killed left open is closed, also where this one is refused.
    let window = Window::new(&config::load(&folder.file(CONFIG), sets, &[])?.config.window, &folder);
    if window.is_open() {
        reporter.warn(
            "the process before this one was killed in its window: window.close runs when this one ends, however it does",
        );
    }
    let mut provenance = Provenance::read(folder.path())?;
    let (resolved, accepted) = configuration(folder.path(), &provenance, sets)?;
    if !accepted.is_empty() {
        reporter.line(format!("as allowed  {}: an earlier resume of this run let it change", accepted.join(", ")));
    }
    let config = &resolved.config;
    let finished = provenance.finished().is_some();
    let _lease = (!finished).then(|| gates::take_device(config, &mut provenance.gates, reporter)).transpose()?;
    let manifest = manifest(config)?;
    let mut policies = Policies::load(&config.plugins, until)?;
    let (stored, run) = (provenance.eligibility.take(), &provenance.run_id);
    let eligibility = eligibility::resume(config, manifest.as_ref(), &mut policies.eligibility, stored, dir, run)?;
    say(&eligibility, reporter);
    provenance.eligibility = Some(eligibility);
    let mut prepared = Prepared::new(config, manifest.map(|m| m.file), policies, reporter)?;
    let now = inputs::provenance(folder.path(), &resolved, &prepared)?;
    let written = OrderManifest::open(&folder.file(ORDER)).ok().filter(|order| order.epoch(0).next().is_some());
    let order =
        written.map(|order| epoch_orders(&prepared).try_for_each(|(epoch, plan)| order.check_epoch(epoch, &plan)));
    let other_order = order.and_then(Result::err);
    let allowed = refuse_changes_beside(&provenance, &now, allow, other_order.as_ref())?;
    if finished {
        return finish::say_finished(&folder, &provenance, reporter);
    }
    gates::before_start(config, &prepared, &now.kernels, folder.path(), &mut provenance.gates, reporter)?;
    let newest = newest_whole(&folder.file(CHECKPOINTS))?;
    for broken in &newest.broken {
        reporter.warn(format!("passed over: {broken}"));
    }
    newest.refuse_in_the_way(prepared.steps.len() as u64)?;
    for foreign in &newest.foreign {
        reporter.warn(format!("left alone: {} is no checkpoint that this run wrote", foreign.display()));
    }
    // Then what was computed since the checkpoint is what this process would compute; when a run is saved decides nothing of it.
    let as_before = allowed.iter().all(|change| change.key == SCHEDULER);
    let step = newest.checkpoint.as_ref().map_or(0, |(_, c)| c.step);
    // What one scheduler remembers is nothing to another.
    let since = provenance.resumes.iter().filter(|resume| resume.from_step >= step);
    let same_scheduler = since.flat_map(|r| &r.allowed).chain(&allowed).all(|change| change.key != SCHEDULER);
    reporter.line(format!("resuming    {} after step {step} of {}", dir.display(), prepared.steps.len()));
    let reached = metrics::steps_logged(&folder.file(METRICS))?.max(provenance.outcome.as_ref().map_or(0, |o| o.step));
    if reached > step {
        let again = format!("steps {} to {reached} were computed before, and are computed again", step + 1);
        let left = if step == 0 { "no checkpoint is left" } else { "the newest checkpoint is older" };
        reporter.warn(format!("{left}: {again}"));
    }
    if let Some((path, checkpoint)) = &newest.checkpoint {
        let (saved, copy) = (path.join(METRICS), checkpoint.files.get(METRICS));
        metrics::check(&folder.file(METRICS), step, copy.map(|copy| (saved.as_path(), copy.as_slice())))?;
    }
    let session = Session { config, folder: &folder, stop: &stop, until, sets, started };
    provenance.order_manifest = Some(session.commit_order(&prepared, provenance.order_manifest.as_ref())?);
    session.conclude(window, provenance, reporter, |session, provenance, reporter| {
        session.check_room(&prepared, provenance, reporter)?;
        session.consume_grants(provenance, reporter)?;
        let engine = prepared.load_engine(config, reporter)?;
        let device = device::open(&config.model.device)?;
        let (adapter, optimizer) = match &newest.checkpoint {
            Some((path, c)) => {
                let scheduler = &mut prepared.policies.scheduling.run;
                let memory = c.files.get(training::SCHEDULER_MEMORY).map(Vec::as_slice).filter(|_| same_scheduler);
                scheduler.restore(memory)?;
                if memory.is_none() && same_scheduler && scheduler.remembers()? {
                    reporter.warn(format!(
                        "{} holds nothing of what {} remembered, since it failed then: it starts anew",
                        path.display(),
                        scheduler.identity()
                    ));
                }
                state::from_files(&c.files, prepared.lora.clone(), &config.train, c.step, &device, path)?
            }
            None => {
                let adapter = prepared.initial_adapter(config.train.seed, &device);
                let optimizer = AdamW::new(&config.train, &adapter);
                (adapter, optimizer)
            }
        };
        let written = newest
            .checkpoint
            .and_then(|(path, mut checkpoint)| Some((path.join(METRICS), checkpoint.files.remove(METRICS)?)));
        if !as_before {
            finish::set_results_aside(&folder, reporter)?;
        }
        let noted: Vec<String> = allowed.iter().map(|change| change.to_string()).collect();
        provenance.resumed(step, allowed);
        provenance.write(&folder)?;
        noted.iter().for_each(|change| reporter.warn(format!("allowed and noted in provenance: {change}")));
        session.train(
            &mut prepared,
            engine,
            Progress { step, adapter, optimizer, metrics: written },
            provenance,
            reporter,
        )
    })
}

/// The corpus manifest of a configuration that names one.
///
/// # Errors
/// Those of reading it.
pub fn manifest(config: &Config) -> Result<Option<Manifest>> {
    config.eligibility.manifest.as_ref().map(|path| Manifest::read(path)).transpose()
}

/// Says what permits the run to train.
fn say(record: &EligibilityRecord, reporter: &Reporter) {
    for Overridden { blocker, reason, grant } in &record.overridden_blockers {
        reporter.warn(format!("{blocker} ({reason}) does not stop this run: grant {grant}"));
    }
    reporter.line(format!("eligibility {}", record.verdict));
}

struct Session<'a> {
    config: &'a Config,
    folder: &'a RunFolder,
    stop: &'a StopRequest,
    until: Option<&'a Until>,
    /// `KEY=VALUE` that this process was given over the run's configuration.
    sets: &'a [String],
    started: Instant,
}

impl Session<'_> {
    /// Opens the window, runs `work`, closes the window and writes how it ended into provenance, also when it failed.
    fn conclude(
        &self,
        window: Window,
        mut provenance: Provenance,
        reporter: &mut Reporter,
        work: impl FnOnce(&Self, &mut Provenance, &mut Reporter) -> Result<Outcome>,
    ) -> Result<()> {
        let compiled = device::count_compiled(&self.config.model.device);
        let ended = window.open(self.stop, reporter).and_then(|()| match self.stop.is_set() {
            true => Ok(self.interrupted("a signal asked it to stop", self.saved_step(), reporter)),
            false => work(self, &mut provenance, reporter),
        });
        reporter.finish_steps();
        let closed = window.close(reporter);
        provenance.jit.compiled = Some(compiled());
        match ended.and_then(|outcome| Ok(Outcome { files: finish::hash_files(self.folder)?, ..outcome })) {
            Ok(outcome) => {
                let step = outcome.step;
                provenance.outcome = Some(outcome);
                provenance.write(self.folder).map_err(|error| self.with_resume_help(error, step))?;
                closed
            }
            Err(error) => {
                let step = self.saved_step();
                // What cannot be hashed is left out: the error that matters is the first one.
                let files = finish::hash_files(self.folder).unwrap_or_default();
                let reason = Some(error.to_string());
                provenance.outcome = Some(Outcome { reason, files, ..outcome(Status::Failed, step) });
                _ = provenance.write(self.folder);
                if let Err(closing) = closed {
                    reporter.warn(closing.to_string());
                }
                Err(self.with_resume_help(error, step))
            }
        }
    }

    /// Steps of the newest whole checkpoint, 0 without one.
    fn saved_step(&self) -> u64 {
        newest_whole(&self.folder.file(CHECKPOINTS)).ok().and_then(|n| n.checkpoint).map_or(0, |(_, c)| c.step)
    }

    /// The command that goes on with the run as this process did: what `--set` gave it stands nowhere else.
    fn resume_command(&self) -> String {
        let sets: String = self.sets.iter().map(|set| format!(" --set {}", shell_word(Path::new(set)))).collect();
        resume_command(self.folder.path()) + &sets
    }

    fn with_resume_help(&self, error: Error, saved_step: u64) -> Error {
        match saved_step {
            0 => error,
            step => error.help(format!("step {step} is saved; when the cause is gone: {}", self.resume_command())),
        }
    }

    /// Whether the window made room for the run: nothing is loaded, and no grant is used, before it did.
    fn check_room(&self, prepared: &Prepared, provenance: &mut Provenance, reporter: &Reporter) -> Result<()> {
        if self.config.window.open.is_empty() {
            return Ok(());
        }
        gates::room(self.config, prepared, &mut provenance.gates, reporter)
    }

    /// Nothing is trained before the grants that permit it are in the ledger as used by this run.
    fn consume_grants(&self, provenance: &mut Provenance, reporter: &Reporter) -> Result<()> {
        let Some(record) = &mut provenance.eligibility else { return Ok(()) };
        if let Some(aside) = eligibility::consume(self.config, record, self.folder.path(), &provenance.run_id)? {
            reporter.warn(format!(
                "the ledger of the grants ended in half a line, of a run that never trained: that is now in {}",
                aside.display()
            ));
        }
        provenance.write(self.folder)
    }

    /// Trains, evaluates and exports, and notes in provenance what the gates said, however it ends.
    fn train(
        &self,
        prepared: &mut Prepared,
        engine: Engine,
        from: Progress,
        provenance: &mut Provenance,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let held_out_gate = RefCell::default();
        let trained = self.train_and_export(prepared, engine, from, &held_out_gate, provenance, reporter);
        provenance.gates.extend(held_out_gate.into_inner().map(|record| (HELD_OUT_GATE.into(), record)));
        trained
    }

    fn train_and_export(
        &self,
        prepared: &mut Prepared,
        engine: Engine,
        from: Progress,
        held_out_gate: &RefCell<Option<GateRecord>>,
        provenance: &mut Provenance,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let tokens_at_once = evaluate::tokens_at_once(gates::largest_micro_batch(prepared));
        let Prepared { corpus, steps, policies, checkpoint, lora, given, spec, text, .. } = prepared;
        let corpus: &Corpus = corpus;
        let held_out = corpus.evaluation(self.config.eval.max_records_per_root);
        let evaluation = Evaluation {
            config: self.config,
            folder: self.folder,
            engine: &engine,
            roots: &corpus.roots,
            records: &held_out,
            tokens_at_once,
            initial: given.as_ref().map(|given| &given.adapter),
            gate: held_out_gate,
            stop: self.stop,
        };
        let first = from.step;
        let before = evaluation.losses(evaluation.initial, 0, reporter)?;
        if self.stop.is_set() {
            return Ok(self.interrupted("a signal asked it to stop", first, reporter));
        }
        let parts = Loop {
            config: self.config,
            config_sha256: &provenance.config_sha256.clone(),
            folder: self.folder,
            engine: &engine,
            records: &corpus.train,
            stop: self.stop,
            evaluation: &evaluation,
        };
        let trained = parts.train(steps, &mut policies.scheduling, from, &mut provenance.gates, reporter)?;
        let step = trained.step;
        if let Some(reason) = &trained.stopped {
            return Ok(self.interrupted(reason, step, reporter));
        }
        let best = trained.best.map(|(step, loss)| BestEvaluation { step, loss });
        let exported = self.exported(best.as_ref(), step, &engine, lora)?;
        let (exported_step, adapter) = exported.as_ref().map_or((step, &trained.adapter), |(s, a)| (*s, a));
        let after = evaluation.losses(Some(adapter), exported_step, reporter)?;
        if self.stop.is_set() {
            return Ok(self.interrupted("a signal asked it to stop", step, reporter));
        }
        let mut outcome = Outcome {
            reason: trained.ended.clone(),
            best,
            exported_step: Some(exported_step),
            ..outcome(Status::Finished, step)
        };
        if let Some(reason) = &trained.ended {
            reporter.line(format!("ended early after step {step}: {reason}"));
        }
        if exported_step != step {
            reporter
                .line(format!("exported is the adapter of step {exported_step}, whose held-out loss is the lowest"));
        }
        if let (Some(before), Some(after)) = (&before, &after) {
            outcome.held_out = finish::report_change(&corpus.roots, before, after, &corpus.copied(&held_out), reporter);
        }
        let template = corpus.template.as_ref().map(|t| t.source.as_str());
        // An export goes by its files, a tensor or a layer at a time.
        let device = engine.model.device.clone();
        drop(engine);
        memory::give_back();
        let exports = Exports {
            config: self.config,
            folder: self.folder,
            checkpoint,
            spec,
            text,
            device: &device,
            template,
            adapter,
            held_out: &held_out,
        };
        outcome.exports = exports.write(&mut policies.exporter, reporter)?;
        if first > 0 {
            reporter.line(format!("(resumed after step {first}: speed and padding below are of the steps since)"));
        }
        finish::summary(self.config, self.folder, &trained, self.started.elapsed(), reporter);
        Ok(outcome)
    }

    /// Step and adapter of the best evaluation, where that is to be exported and is not the last.
    fn exported(
        &self,
        best: Option<&BestEvaluation>,
        last_step: u64,
        engine: &Engine,
        lora: &LoraPlan,
    ) -> Result<Option<(u64, Adapter)>> {
        let Some(best) =
            best.filter(|best| self.config.export.checkpoint == ExportedCheckpoint::Best && best.step != last_step)
        else {
            return Ok(None);
        };
        let path = checkpoint::folder_of_step(&self.folder.file(CHECKPOINTS), best.step);
        let files = checkpoint::read(&path)?.files;
        let device = &engine.model.device;
        let (adapter, _) = state::from_files(&files, lora.clone(), &self.config.train, best.step, device, &path)?;
        Ok(Some((best.step, adapter)))
    }

    fn interrupted(&self, reason: &str, step: u64, reporter: &Reporter) -> Outcome {
        let (run, resume) = (self.folder.path(), self.resume_command());
        // In the next window: this one is over.
        let windowed = self.until.is_some() || self.config.plugins.checkpoint_scheduler == "window";
        let until = if windowed { " --until TIME" } else { "" };
        reporter.result(format!("stopped after step {step}: {reason}\nsaved; to go on: {resume}{until}"));
        reporter.event("stopped", json!({"run": run, "step": step, "reason": reason}));
        Outcome { reason: Some(reason.into()), ..outcome(Status::Stopped, step) }
    }

    /// Writes the order of every epoch, or checks that it is the one written, and the file the one that was `recorded`.
    fn commit_order(&self, prepared: &Prepared, recorded: Option<&FileHash>) -> Result<FileHash> {
        let path = self.folder.file(ORDER);
        if let Some(recorded) = recorded {
            manifest::refuse_written_over(&path, &recorded.sha256, epoch_orders(prepared))?;
        }
        let mut manifest = OrderManifest::open(&path)?;
        epoch_orders(prepared).try_for_each(|(epoch, order)| manifest.commit_epoch(epoch, order))?;
        FileHash::of(&path)
    }
}

/// The records of every step, epoch by epoch.
fn epoch_orders(prepared: &Prepared) -> impl Iterator<Item = (u32, Vec<MicroBatches>)> {
    let Prepared { corpus, steps, .. } = prepared;
    let epochs = steps.last().map_or(0, |last| last.epoch + 1);
    (0..epochs).map(move |epoch| {
        let ids = |row: &Vec<u32>| row.iter().map(|i| corpus.train[*i as usize].id.to_string()).collect();
        let steps = steps.iter().filter(|s| s.epoch == epoch);
        let order = steps.map(|s| s.batches.iter().map(|b| b.rows.iter().map(ids).collect()).collect());
        (epoch, order.collect())
    })
}

fn outcome(status: Status, step: u64) -> Outcome {
    Outcome {
        status,
        step,
        ended: utc_now(),
        reason: None,
        held_out: BTreeMap::new(),
        best: None,
        exported_step: None,
        exports: BTreeMap::new(),
        files: BTreeMap::new(),
    }
}
