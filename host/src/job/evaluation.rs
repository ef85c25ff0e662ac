//! Held-out evaluation: before training, in the run and after it.

use crate::config::Config;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::report::Reporter;
use crate::run::atomic::{self, Existing};
use crate::run::folder::{HELD_OUT, RunFolder};
use crate::run::metrics::{HeldOutMetrics, Metric};
use crate::run::provenance::{GateRecord, Verdict};
use crate::run::signal::StopRequest;
use crate::train::engine::Engine;
use crate::train::evaluate::{RecordLoss, evaluate, finite, summary};
use crate::train::gates::{Records, settle};
use serde_json::json;
use std::cell::RefCell;
use std::fs;
use std::time::{Duration, Instant};
use tunehost_kernels::memory;

/// The file in [`HELD_OUT`] with the losses after `step` steps.
pub fn losses_name(step: u64) -> String {
    format!("step-{step:06}.json")
}

/// What an evaluation needs.
pub struct Evaluation<'a> {
    pub config: &'a Config,
    pub folder: &'a RunFolder,
    pub engine: &'a Engine,
    /// Names of the roots.
    pub roots: &'a [String],
    /// The held-out records to evaluate.
    pub records: &'a [&'a Record],
    /// Tokens of them that are evaluated at once.
    pub tokens_at_once: usize,
    /// The adapter before the first step, where it is not a fresh one, which adds nothing.
    pub initial: Option<&'a Adapter>,
    /// What the gate `not_finite` said of the losses so far, the worst of it.
    pub gate: &'a RefCell<Option<GateRecord>>,
    pub stop: &'a StopRequest,
}

impl Evaluation<'_> {
    /// Losses after `step` steps, from the run folder where they are, else computed and written there. `None` when there is
    /// nothing to evaluate, or a signal stopped it.
    ///
    /// # Errors
    /// `model::not_finite` where `gates.not_finite` stops, class `io`.
    pub fn losses(
        &self,
        adapter: Option<&Adapter>,
        step: u64,
        reporter: &mut Reporter,
    ) -> Result<Option<Vec<RecordLoss>>> {
        if self.records.is_empty() {
            return Ok(None);
        }
        let dir = self.folder.file(HELD_OUT);
        let path = dir.join(losses_name(step));
        if path.exists() {
            let text = fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
            let losses: Option<Vec<RecordLoss>> = serde_json::from_slice(&text).ok();
            // Evaluation is deterministic: a file that does not fit is computed again.
            if let Some(losses) =
                losses.filter(|l| l.iter().map(|l| l.id.as_str()).eq(self.records.iter().map(|r| &*r.id)))
            {
                self.look(&losses, reporter)?;
                return Ok(Some(losses));
            }
        }
        let Some(losses) = self.compute(adapter, reporter)? else { return Ok(None) };
        fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, e))?;
        let text = serde_json::to_vec(&losses).expect("losses are numbers and strings");
        atomic::write(&path, &text, Existing::Replace)?;
        Ok(Some(losses))
    }

    fn compute(&self, adapter: Option<&Adapter>, reporter: &mut Reporter) -> Result<Option<Vec<RecordLoss>>> {
        let total = self.records.len();
        let stop = || self.stop.is_set();
        let mut progress = |done| reporter.progress("held-out records", done, total);
        let losses = evaluate(self.engine, adapter, self.records, self.tokens_at_once, &mut progress, &stop);
        // Of other sizes than a step's, which would come on top of it.
        memory::give_back();
        losses.iter().try_for_each(|losses| self.look(losses, reporter))?;
        Ok(losses)
    }

    /// Lets the gate `not_finite` look at losses.
    fn look(&self, losses: &[RecordLoss], reporter: &Reporter) -> Result<()> {
        let mut records = Records::new();
        let look = || finite(losses).map(|()| "every held-out loss is a finite number".to_string());
        let settled = settle(&mut records, "not_finite", self.config.gates.not_finite, look);
        let mut said = self.gate.borrow_mut();
        if said.as_ref().is_none_or(|said| said.verdict == Verdict::Passed) {
            *said = records.into_values().next();
        }
        settled?.iter().for_each(|warning| reporter.warn(warning));
        Ok(())
    }

    /// Whether a run is evaluated after `step` of its `total` steps, by the count of steps.
    pub fn due(&self, step: u64, total: u64) -> bool {
        let every = self.config.eval.every_steps.filter(|_| !self.records.is_empty());
        every.is_some_and(|n| step.is_multiple_of(n) || step == total)
    }

    /// Whether `since` the last evaluation the clock asks for another.
    pub fn due_by_clock(&self, since: Instant) -> bool {
        let every = self.config.eval.every_minutes.filter(|_| !self.records.is_empty());
        every.is_some_and(|minutes| since.elapsed() >= Duration::from_secs_f64(60.0 * minutes))
    }

    /// The line of `metrics.jsonl` on the evaluation that is due after `step` steps; `None` where a signal stopped it.
    ///
    /// # Errors
    /// As [`Evaluation::losses`].
    pub fn at_step(&self, adapter: &Adapter, step: u64, reporter: &mut Reporter) -> Result<Option<HeldOutMetrics>> {
        // Before the first step: these are the losses that the run is compared with.
        let adapter = if step > 0 { Some(adapter) } else { self.initial };
        Ok(self.losses(adapter, step, reporter)?.map(|losses| self.summary(step, &losses)))
    }

    /// The line of `timing.jsonl` on an evaluation that the clock asked for: it leaves no other trace, since no two runs would
    /// have it at the same step.
    ///
    /// # Errors
    /// `model::not_finite`.
    pub fn by_clock(&self, adapter: &Adapter, step: u64, reporter: &mut Reporter) -> Result<Option<HeldOutMetrics>> {
        Ok(self.compute(Some(adapter), reporter)?.map(|losses| self.summary(step, &losses)))
    }

    fn summary(&self, step: u64, losses: &[RecordLoss]) -> HeldOutMetrics {
        summary(step, self.roots, losses, self.config.eval.resamples, self.config.train.seed)
    }
}

/// Says what an evaluation found; `note` ends the line.
pub fn say(found: &HeldOutMetrics, note: &str, reporter: &Reporter) {
    let error = |e: Option<f64>| e.map_or("n/a".to_string(), |e| format!("{e:.3}"));
    let roots = found.roots.iter().map(|r| format!("{} {:.3} ({})", r.root, r.loss, error(r.standard_error)));
    let roots = roots.collect::<Vec<_>>().join(", ");
    let (loss, all) = (found.loss, error(found.standard_error));
    reporter.line(format!("held out    step {}: {loss:.4} (s.e. {all}): {roots}{note}", found.step));
    let mut event = serde_json::to_value(Metric::HeldOut(found.clone())).expect("numbers and strings");
    event.as_object_mut().expect("a struct").insert("note".into(), json!(note.trim_start_matches("; ")));
    reporter.event("evaluation", event);
}
