//! The loop: steps, logs, gates, the scheduler's decisions, checkpoints.

use super::evaluation::{self, Evaluation};
use super::saving::{Saver, Snapshot};
use super::scheduling::Scheduling;
use crate::config::Config;
use crate::corpus::Record;
use crate::error::Result;
use crate::model::adapter::Adapter;
use crate::plugins::StepInfo;
use crate::report::{Reporter, StepView};
use crate::run::atomic;
use crate::run::checkpoint::Position;
use crate::run::clock::unix_ms_now;
use crate::run::folder::{METRICS, RunFolder, TIMING};
use crate::run::metrics::{self, Metric, StepLog, StepMetrics, StepTiming};
use crate::run::signal::StopRequest;
use crate::train::engine::Engine;
use crate::train::evaluate::Best;
use crate::train::gates::{Records, StepGates};
use crate::train::optimizer::AdamW;
use crate::train::steps::Step;
use crate::train::trainer::Trainer;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Steps over which the shown speed is averaged.
const SPEED_STEPS: usize = 20;

/// Why a run was stopped that a signal stopped.
const BY_SIGNAL: &str = "a signal asked it to stop";

/// Checkpoint file with what the checkpoint scheduler remembers, where it remembers anything.
pub const SCHEDULER_MEMORY: &str = "checkpoint_scheduler.memory";

/// Adapters and optimiser after `step` steps.
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// The adapters.
    pub adapter: Adapter,
    /// Their optimiser state.
    pub optimizer: AdamW,
    /// The metrics up to here as the checkpoint holds them, and where; nothing where the run did not come from one.
    pub metrics: Option<(PathBuf, Vec<u8>)>,
}

/// What the loop leaves.
pub struct Trained {
    /// The last step that ran.
    pub step: u64,
    /// The adapters after it.
    pub adapter: Adapter,
    /// Steps that were done before this process.
    pub done_before: u64,
    /// Why it was interrupted before the last step, if it was.
    pub stopped: Option<String>,
    /// Why the last step that ran is the last of all, where steps were left.
    pub ended: Option<String>,
    /// Step and loss of the best evaluation by steps.
    pub best: Option<(u64, f64)>,
    /// Tokens computed by this process.
    pub tokens: u64,
    /// Share of the rows' rectangles that a padding engine would have wasted.
    pub padding: f64,
    /// Time of this process's steps.
    pub wall: Duration,
    /// How much of it was spent in plugins.
    pub plugins: Duration,
}

/// The parts of a run that the loop reads.
pub struct Loop<'a> {
    pub config: &'a Config,
    pub config_sha256: &'a str,
    pub folder: &'a RunFolder,
    pub engine: &'a Engine,
    pub records: &'a [Record],
    pub stop: &'a StopRequest,
    pub evaluation: &'a Evaluation<'a>,
}

impl Loop<'_> {
    /// Runs the steps after `from` until the last one, a signal, or the scheduler's stop.
    ///
    /// # Errors
    /// Classes `gate`, `plugin`, `run`, `io`; what was saved stays.
    pub fn train(
        &self,
        steps: &[Step],
        scheduling: &mut Scheduling,
        from: Progress,
        records: &mut Records,
        reporter: &mut Reporter,
    ) -> Result<Trained> {
        let mut saver = Saver::new(self.folder, self.config_sha256, self.config.checkpoint);
        let mut gates = StepGates::new(&self.config.gates, self.evaluation.initial.cloned());
        let trained = self.run(steps, scheduling, from, &mut saver, &mut gates, reporter);
        records.extend(gates.records());
        // Also after an error: what is on its way to the disk must get there, and the first error is the one that matters.
        let saved = saver.finish();
        trained.and_then(|trained| saved.map(|()| trained))
    }

    fn run(
        &self,
        steps: &[Step],
        scheduling: &mut Scheduling,
        from: Progress,
        saver: &mut Saver,
        gates: &mut StepGates,
        reporter: &mut Reporter,
    ) -> Result<Trained> {
        let total = steps.len() as u64;
        let Progress { step: first, adapter, optimizer, metrics: written } = from;
        let mut trainer = Trainer {
            config: &self.config.train,
            engine: self.engine,
            records: self.records,
            total_steps: total,
            adapter,
            optimizer,
        };
        let copy = written.as_ref().map(|(path, bytes)| (path.as_path(), bytes.as_slice()));
        let mut metrics = StepLog::resume(&self.folder.file(METRICS), first, copy)?;
        let (mut best, mut evaluated) = (Best::default(), None);
        for metric in metrics::read(&self.folder.file(METRICS))? {
            match metric {
                Metric::Step(step) => gates.replay(&step),
                Metric::HeldOut(found) => {
                    best.take(&found);
                    evaluated = Some(found.step);
                }
            }
        }
        // Also where a signal came before the evaluation of the step that was saved.
        if self.evaluation.due(first, total) && evaluated != Some(first) {
            self.evaluate(first, &trainer.adapter, &mut metrics, &mut best, reporter)?;
        }
        saver.best = best.found().map(|(step, _)| step);
        if first > 0 {
            saver.remove_expired(first)?;
        }
        let patience = self.config.eval.patience;
        let spent = |best: &Best| patience.is_some_and(|patience| best.since() >= patience);
        let mut timing = self.resume_timing(first, reporter)?;
        if let Some(until) = scheduling.until(first) {
            timing.append(&until)?;
        }
        let started = Instant::now();
        let mut last_evaluation = started;
        let mut recent: VecDeque<(u64, Duration)> = VecDeque::new();
        let mut trained = Tally::default();
        // A signal while it was evaluated: what is due before the next step must not be passed over.
        let mut stopped = self.stop.is_set().then(|| BY_SIGNAL.to_string());
        let mut ended = None;
        for index in first..total {
            if stopped.is_some() {
                break;
            }
            if let (true, Some((at, _))) = (spent(&best), best.found()) {
                ended = Some(format!("no lower held-out loss in {} evaluations since step {at}", best.since()));
                break;
            }
            let step_started = Instant::now();
            let metric = trainer.step(index, &steps[index as usize], gates)?;
            let wall = step_started.elapsed();
            saver.check()?;
            metrics.append(&Metric::Step(metric.clone()))?;
            let logged = metrics.bytes();
            trained.add(metric.tokens, metric.padding);
            recent.push_back((metric.tokens, wall));
            if recent.len() > SPEED_STEPS {
                recent.pop_front();
            }

            let asked = Instant::now();
            let decision = scheduling.after_step(&StepInfo {
                step: metric.step,
                total_steps: total,
                wall_clock_ms: unix_ms_now(),
                since_last_save_ms: millis(saver.last.elapsed()),
                last_save_cost_ms: millis(saver.last_cost),
                loss: metric.loss,
            });
            let in_plugins = asked.elapsed();
            trained.plugins += in_plugins;
            timing.append(&StepTiming {
                step: metric.step,
                wall_ms: wall.as_secs_f64() * 1e3,
                tokens_per_s: metric.tokens as f64 / wall.as_secs_f64(),
                plugins_ms: in_plugins.as_secs_f64() * 1e3,
            })?;
            // A scheduler that fails ends the run, but not what was computed since the last save.
            let decision = match decision {
                Ok(decision) => decision,
                Err(error) => {
                    saver.start(self.snapshot(metric.step, steps, &trainer, None, logged), &metrics, &timing)?;
                    return Err(error);
                }
            };
            reporter.step(view(&metric, total, &recent));
            let mut is_best = false;
            // Where the scheduler stops, time is short: what is due is made up for when the run is resumed.
            let goes_on = !decision.stop || metric.step == total;
            if self.evaluation.due(metric.step, total) && goes_on {
                is_best = self.evaluate(metric.step, &trainer.adapter, &mut metrics, &mut best, reporter)?;
                saver.best = best.found().map(|(step, _)| step);
                last_evaluation = Instant::now();
            } else if self.evaluation.due_by_clock(last_evaluation) && goes_on {
                if let Some(found) = self.evaluation.by_clock(&trainer.adapter, metric.step, reporter)? {
                    timing.append(&Metric::HeldOut(found.clone()))?;
                    evaluation::say(&found, "; by the clock", reporter);
                }
                last_evaluation = Instant::now();
            }
            if metric.step < total {
                if self.stop.is_set() {
                    stopped = Some(BY_SIGNAL.to_string());
                } else if decision.stop {
                    stopped = Some(format!("the checkpoint scheduler stopped it: {}", decision.reason));
                }
            }
            let save = decision.save || stopped.is_some() || metric.step == total || is_best || spent(&best);
            gates.after_update(metric.step, metric.lr, save, &trainer.adapter)?;
            gates.warnings().iter().for_each(|warning| reporter.warn(warning));
            if save {
                let asked = Instant::now();
                let memory = scheduling.run.save();
                trained.plugins += asked.elapsed();
                let remembered = memory.as_ref().ok().cloned().flatten();
                saver.start(self.snapshot(metric.step, steps, &trainer, remembered, logged), &metrics, &timing)?;
                memory?;
            }
        }
        reporter.finish_steps();
        let Trainer { adapter, optimizer, .. } = trainer;
        Ok(Trained {
            step: optimizer.step,
            adapter,
            done_before: first,
            stopped,
            ended,
            best: best.found(),
            tokens: trained.tokens,
            padding: trained.padding(),
            wall: started.elapsed(),
            plugins: trained.plugins,
        })
    }

    /// Opens the clock readings. They decide nothing: where they are not whole, what is left of them is put aside, and said.
    fn resume_timing(&self, first: u64, reporter: &Reporter) -> Result<StepLog> {
        let path = self.folder.file(TIMING);
        match StepLog::resume(&path, first, None) {
            Err(e) if e.code() == "run::log_broken" => {
                let left = if path.exists() { Some(atomic::set_aside(&path, "broken")?) } else { None };
                let left = left.map_or(String::new(), |aside| format!("; what was there is now {}", aside.display()));
                reporter.warn(format!("{}: clock readings before step {} are lost{left}", e.message(), first + 1));
                StepLog::create(&path)
            }
            opened => opened,
        }
    }

    /// Evaluates after `step` steps and writes it down; whether it is the best so far.
    fn evaluate(
        &self,
        step: u64,
        adapter: &Adapter,
        metrics: &mut StepLog,
        best: &mut Best,
        reporter: &mut Reporter,
    ) -> Result<bool> {
        let Some(found) = self.evaluation.at_step(adapter, step, reporter)? else { return Ok(false) };
        metrics.append(&Metric::HeldOut(found.clone()))?;
        let is_best = best.take(&found);
        evaluation::say(&found, if is_best { "; the best so far" } else { "" }, reporter);
        Ok(is_best)
    }

    /// The state after `step`, with what the scheduler remembers and the length of the metrics.
    fn snapshot(
        &self,
        step: u64,
        steps: &[Step],
        trainer: &Trainer,
        memory: Option<Vec<u8>>,
        metrics_bytes: u64,
    ) -> Snapshot {
        let position = match steps.get(step as usize) {
            Some(next) => {
                let before = steps[..step as usize].iter().rev().take_while(|s| s.epoch == next.epoch).count();
                Position { epoch: next.epoch, step_in_epoch: before as u64 }
            }
            None => Position { epoch: self.config.train.epochs, step_in_epoch: 0 },
        };
        // Buffers were changed in place, by what this thread asked for: it must be done before another thread reads them.
        _ = self.engine.model.device.sync();
        let (adapter, optimizer) = (trainer.adapter.clone(), trainer.optimizer.clone());
        Snapshot { step, position, adapter, optimizer, memory, metrics_bytes }
    }
}

#[derive(Default)]
struct Tally {
    tokens: u64,
    rectangle: f64,
    plugins: Duration,
}

impl Tally {
    fn add(&mut self, tokens: u64, padding: f64) {
        self.tokens += tokens;
        self.rectangle += tokens as f64 / (1.0 - padding);
    }

    fn padding(&self) -> f64 {
        if self.rectangle > 0.0 { 1.0 - self.tokens as f64 / self.rectangle } else { 0.0 }
    }
}

fn millis(d: Duration) -> u64 {
    d.as_millis() as u64
}

fn view(metric: &StepMetrics, total: u64, recent: &VecDeque<(u64, Duration)>) -> StepView {
    let tokens: u64 = recent.iter().map(|(tokens, _)| tokens).sum();
    let wall: Duration = recent.iter().map(|(_, wall)| *wall).sum();
    StepView {
        step: metric.step,
        total,
        loss: metric.loss,
        tokens_per_s: tokens as f64 / wall.as_secs_f64(),
        padding: metric.padding,
        left: wall.mul_f64((total - metric.step) as f64 / recent.len() as f64),
    }
}
