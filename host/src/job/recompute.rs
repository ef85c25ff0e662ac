//! What a run computed, computed again for `tunehost runs verify`: the order of its records, steps, held-out losses.

use super::evaluation::losses_name;
use super::policies::Policies;
use super::prepare::Prepared;
use super::{SCHEDULER, epoch_orders, inputs};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::report::{Mode, Reporter};
use crate::run::changes::{configuration, refuse_changes};
use crate::run::checkpoint::{self, Checkpoint};
use crate::run::folder::{CHECKPOINTS, HELD_OUT, METRICS, ORDER, PROVENANCE};
use crate::run::manifest::OrderManifest;
use crate::run::metrics::{self, Metric};
use crate::run::provenance::{Outcome, Provenance};
use crate::run::verify::Check;
use crate::train::engine::Engine;
use crate::train::evaluate::{MOST_TOKENS, RecordLoss, compare, evaluate, summary};
use crate::train::gates::StepGates;
use crate::train::optimizer::AdamW;
use crate::train::state;
use crate::train::trainer::Trainer;
use serde::Serialize;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Computes again what the run in the folder `run` computed: the order of its records, `steps` optimiser steps before its last
/// one, and the held-out losses of its newest evaluated checkpoint. To the bit, since a run is refused that would compute
/// with something else.
///
/// # Errors
/// Where nothing can be compared: what the run started from cannot be read, or is not what it was.
pub fn recompute(run: &Path, steps: u64) -> Result<Vec<Check>> {
    let provenance = Provenance::read(run)?;
    // What was computed before a resume that let something change was computed otherwise.
    let changed =
        provenance.resumes.iter().filter(|resume| resume.allowed.iter().any(|change| change.key != SCHEDULER));
    let since = changed.map(|resume| resume.from_step).max().unwrap_or(0);
    let (resolved, _) = configuration(run, &provenance, &[])?;
    let config = &resolved.config;
    let mut reporter = Reporter::new(Mode::Quiet);
    let manifest = super::manifest(config)?.map(|manifest| manifest.file);
    let prepared = Prepared::new(config, manifest, Policies::load(&config.plugins, None)?, &mut reporter)?;
    refuse_changes(&provenance, &inputs::provenance(run, &resolved, &prepared)?, &[])?;
    let engine = prepared.load_engine(config, &mut reporter)?;
    let again = Again { run, config, prepared, engine, metrics: metrics::read(&run.join(METRICS))? };

    let mut checks = Vec::new();
    let mut check = |what: String, path: PathBuf, found: Result<()>| {
        let problem = found.err().map(|e| e.message().to_string());
        checks.push(Check { what: format!("recomputed: {what}"), path: path.display().to_string(), problem });
    };
    check("order".into(), run.join(ORDER), again.order());
    let done = again.metrics.iter().filter(|metric| matches!(metric, Metric::Step(_))).count() as u64;
    let (asked, steps) = (steps, steps.min(done.saturating_sub(since)));
    if steps == 0 {
        check(format!("no step of {done}, {asked} asked for"), run.join(METRICS), Ok(()));
    } else {
        let from = again.newest(|checkpoint| checkpoint.step >= since && checkpoint.step + steps <= done)?;
        let first = from.as_ref().map_or(0, |(_, checkpoint)| checkpoint.step);
        if first >= since {
            let all = if steps < asked { format!(", of {asked} asked for") } else { String::new() };
            let what = format!("steps {} to {}{all}", first + 1, first + steps);
            check(what, run.join(METRICS), again.steps(from, first..first + steps));
        } else {
            let what =
                format!("no step: none of its checkpoints is from after step {since}, when a resume let a change pass");
            check(what, run.join(METRICS), Ok(()));
        }
    }
    let evaluated = |checkpoint: &Checkpoint| checkpoint.step >= since && again.losses_file(checkpoint.step).exists();
    if let Some((path, checkpoint)) = again.newest(evaluated)? {
        let what = format!("held-out losses after step {}", checkpoint.step);
        check(what, again.losses_file(checkpoint.step), again.held_out(&path, &checkpoint));
    }
    if again.losses_file(0).exists() {
        let initial = again.prepared.given.as_ref().map(|given| &given.adapter);
        check("held-out losses before training".into(), again.losses_file(0), again.losses(0, initial));
    }
    if let Some(outcome) = provenance.outcome.as_ref().filter(|outcome| !outcome.held_out.is_empty()) {
        check("change of the held-out losses".into(), run.join(PROVENANCE), again.change(outcome));
    }
    Ok(checks)
}

struct Again<'a> {
    run: &'a Path,
    config: &'a Config,
    prepared: Prepared,
    engine: Engine,
    metrics: Vec<Metric>,
}

impl Again<'_> {
    fn order(&self) -> Result<()> {
        let manifest = OrderManifest::open(&self.run.join(ORDER))?;
        epoch_orders(&self.prepared).try_for_each(|(epoch, order)| manifest.check_epoch(epoch, &order))
    }

    /// The newest whole checkpoint that is as `wanted`, and its folder.
    fn newest(&self, wanted: impl Fn(&Checkpoint) -> bool) -> Result<Option<(PathBuf, Checkpoint)>> {
        let folders = checkpoint::own_folders(&self.run.join(CHECKPOINTS))?.into_iter().rev();
        let mut whole = folders.filter_map(|path| checkpoint::read(&path).ok().map(|checkpoint| (path, checkpoint)));
        Ok(whole.find(|(_, checkpoint)| wanted(checkpoint)))
    }

    fn state(&self, path: &Path, checkpoint: &Checkpoint) -> Result<(Adapter, AdamW)> {
        let (device, lora) = (&self.engine.model.device, self.prepared.lora.clone());
        state::from_files(&checkpoint.files, lora, &self.config.train, checkpoint.step, device, path)
    }

    /// Compares what `steps` (from 0) log and save with what the run logged and saved.
    fn steps(&self, from: Option<(PathBuf, Checkpoint)>, steps: Range<u64>) -> Result<()> {
        let (adapter, optimizer) = match from {
            Some((path, checkpoint)) => self.state(&path, &checkpoint)?,
            None => {
                let adapter = self.prepared.initial_adapter(self.config.train.seed, &self.engine.model.device);
                let optimizer = AdamW::new(&self.config.train, &adapter);
                (adapter, optimizer)
            }
        };
        let mut trainer = Trainer {
            config: &self.config.train,
            engine: &self.engine,
            records: &self.prepared.corpus.train,
            total_steps: self.prepared.steps.len() as u64,
            adapter,
            optimizer,
        };
        let mut gates = StepGates::new(&self.config.gates, None);
        let logged = self.metrics.iter().filter_map(|metric| match metric {
            Metric::Step(step) => Some(step),
            Metric::HeldOut(_) => None,
        });
        for recorded in logged.take(steps.end as usize) {
            if recorded.step <= steps.start {
                gates.replay(recorded);
                continue;
            }
            let index = recorded.step.wrapping_sub(1);
            let Some(step) = self.prepared.steps.get(index as usize) else {
                return Err(differs(format!("step {} was never planned", recorded.step)));
            };
            let found = trainer.step(index, step, &mut gates)?;
            same(&format!("step {}", found.step), &recorded, &found)?;
            self.same_checkpoint(&trainer, found.step)?;
        }
        Ok(())
    }

    /// Where the run has a checkpoint of `step`: whether it holds these bytes.
    fn same_checkpoint(&self, trainer: &Trainer, step: u64) -> Result<()> {
        let path = checkpoint::folder_of_step(&self.run.join(CHECKPOINTS), step);
        if !path.exists() {
            return Ok(());
        }
        let saved = checkpoint::read(&path)?.files;
        let files = state::to_files(&trainer.adapter, &trainer.optimizer);
        match files.iter().find(|(name, bytes)| saved.get(*name) != Some(bytes)) {
            Some((name, _)) => Err(differs(format!("{} holds other bytes", path.join(name).display()))),
            None => Ok(()),
        }
    }

    fn losses_file(&self, step: u64) -> PathBuf {
        self.run.join(HELD_OUT).join(losses_name(step))
    }

    fn held_out(&self, path: &Path, checkpoint: &Checkpoint) -> Result<()> {
        let (adapter, _) = self.state(path, checkpoint)?;
        self.losses(checkpoint.step, Some(&adapter))
    }

    /// Compares the held-out losses after `step` steps, which ended with `adapter`, with what the run wrote.
    fn losses(&self, step: u64, adapter: Option<&Adapter>) -> Result<()> {
        let Config { eval, train, .. } = self.config;
        let corpus = &self.prepared.corpus;
        let records = corpus.evaluation(eval.max_records_per_root);
        let losses = evaluate(&self.engine, adapter, &records, MOST_TOKENS, &mut |_| {}, &|| false).unwrap_or_default();
        let file = self.losses_file(step);
        let recorded = fs::read(&file).map_err(|e| Error::io("read", &file, e))?;
        if serde_json::to_vec(&losses).expect("losses are numbers and strings") != recorded {
            return Err(differs(format!("{} holds other losses", file.display())));
        }
        let summary = summary(step, &corpus.roots, &losses, eval.resamples, train.seed);
        let logged = self.metrics.iter().find_map(|metric| match metric {
            Metric::HeldOut(found) if found.step == step => Some(found),
            _ => None,
        });
        logged.map_or(Ok(()), |logged| same("the evaluation", logged, &summary))
    }

    /// Whether the losses in provenance are those that the run wrote down record by record.
    fn change(&self, outcome: &Outcome) -> Result<()> {
        let read = |step: u64| -> Result<Vec<RecordLoss>> {
            let file = self.losses_file(step);
            let text = fs::read(&file).map_err(|e| Error::io("read", &file, e))?;
            serde_json::from_slice(&text).map_err(|e| differs(format!("{}: {e}", file.display())))
        };
        let after = read(outcome.exported_step.unwrap_or(outcome.step))?;
        for change in compare(&self.prepared.corpus.roots, &read(0)?, &after) {
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1.0) || a.is_nan() && b.is_nan();
            let recorded = outcome.held_out.get(&change.root);
            if !recorded.is_some_and(|loss| near(loss.before, change.before) && near(loss.after, change.after)) {
                let is = format!("{} -> {}", change.before, change.after);
                let was = recorded.map_or("nothing".into(), |loss| format!("{} -> {}", loss.before, loss.after));
                return Err(differs(format!("the held-out loss of {} was {was}, is {is}", change.root)));
            }
        }
        Ok(())
    }
}

/// Compared as the lines that they are, in which a number that is not finite is null.
fn same(what: &str, recorded: &impl Serialize, found: &impl Serialize) -> Result<()> {
    let (recorded, found) = (line(recorded), line(found));
    if recorded == found {
        return Ok(());
    }
    Err(differs(format!("{what} was {recorded}, is {found}")))
}

fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("a log line has string keys")
}

fn differs(message: String) -> Error {
    Error::new("run::verify_failed", message)
}
