//! Optimiser steps of a run, when they would be saved, and how long they would take at a stated speed.

use super::Source;
use super::memory::Model;
use super::work::Work;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::plugins::{CheckpointScheduler, StepInfo};
use crate::train::steps::Step;
use serde::Serialize;

/// What the sampler's plan comes to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Steps {
    /// Counted from the encoded corpus and the plan.
    pub source: Source,
    /// Optimiser steps.
    pub optimiser_steps: usize,
    /// Micro-batches in all of them.
    pub micro_batches: usize,
    /// Micro-batches of the last step, fewer than `train.accumulation` where the window is partial.
    pub last_step_micro_batches: usize,
    /// Tokens computed.
    pub tokens: usize,
    /// Tokens with a target.
    pub trained_tokens: usize,
    /// Tokens of the rectangles around the rows of the micro-batches: an engine that pads computes these, this one does not.
    pub padded_tokens: usize,
    /// Tokens of the largest micro-batch.
    pub largest_micro_batch_tokens: usize,
    /// Tokens of the longest record.
    pub longest_record_tokens: usize,
    /// Operations of all steps.
    pub work: Work,
    /// Operations of each step that are performed.
    #[serde(skip)]
    pub step_flop: Vec<f64>,
    /// Tokens of each step, and the sum of the squares of its documents' lengths.
    #[serde(skip)]
    pub step_lengths: Vec<(f64, f64)>,
}

/// Counts the steps over `records`.
pub fn steps(model: &Model, steps: &[Step], records: &[Record]) -> Steps {
    let trained: Vec<usize> = records.iter().map(|r| r.tokens.trained().skip(1).filter(|t| *t).count()).collect();
    let mut out = Steps {
        source: Source::Computed,
        optimiser_steps: steps.len(),
        micro_batches: steps.iter().map(|step| step.batches.len()).sum(),
        last_step_micro_batches: steps.last().map_or(0, |step| step.batches.len()),
        tokens: 0,
        trained_tokens: 0,
        padded_tokens: 0,
        largest_micro_batch_tokens: 0,
        longest_record_tokens: 0,
        work: Work::default(),
        step_flop: Vec::with_capacity(steps.len()),
        step_lengths: Vec::with_capacity(steps.len()),
    };
    for step in steps {
        let of_step = || step.batches.iter().flat_map(|b| b.rows.iter().flatten()).map(|i| *i as usize);
        for batch in &step.batches {
            let (tokens, padded) = batch.tokens(records);
            out.tokens += tokens;
            out.padded_tokens += padded;
            out.largest_micro_batch_tokens = out.largest_micro_batch_tokens.max(tokens);
        }
        let with_target = of_step().map(|i| trained[i]).sum();
        out.trained_tokens += with_target;
        let lengths = || of_step().map(|i| records[i].tokens.len());
        let squares = lengths().map(|length| (length * length) as f64).sum();
        out.longest_record_tokens = lengths().max().unwrap_or(0).max(out.longest_record_tokens);
        out.step_lengths.push((lengths().sum::<usize>() as f64, squares));
        let work = model.work(lengths(), with_target);
        out.work = out.work + work;
        out.step_flop.push(work.performed_flop);
    }
    out
}

/// Operations per second that the device is said to reach.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// Stated by whoever asked.
    pub source: Source,
    /// Peak of the device, TFLOP/s.
    pub peak_tflops: f64,
    /// Share of it that is reached, lowest first.
    pub utilisation: Vec<f64>,
}

impl Speed {
    /// Both ends of the band.
    ///
    /// # Errors
    /// `usage::speed`.
    pub fn new(peak_tflops: f64, mut utilisation: Vec<f64>) -> Result<Self> {
        let shares = !utilisation.is_empty() && utilisation.iter().all(|share| *share > 0.0 && *share <= 1.0);
        if !(peak_tflops.is_finite() && peak_tflops > 0.0 && shares) {
            let shares: Vec<String> = utilisation.iter().map(f64::to_string).collect();
            let message = format!("--peak-tflops {peak_tflops} --utilisation {} is no speed", shares.join(","));
            return Err(Error::new("usage::speed", message)
                .expected("a positive number of TFLOP/s, and shares of it above 0 and up to 1, such as 0.1,0.25"));
        }
        utilisation.sort_by(f64::total_cmp);
        Ok(Self { source: Source::Assumed, peak_tflops, utilisation })
    }

    /// The run's `steps` at each share.
    pub fn paces(&self, steps: &Steps) -> Vec<Pace> {
        let at = |share: &f64| Pace {
            source: self.source,
            at: format!("{:.1}% of {} TFLOP/s", share * 100.0, self.peak_tflops),
            step_s: steps.step_flop.iter().map(|flop| flop / (self.peak_tflops * 1e12 * share)).collect(),
        };
        self.utilisation.iter().map(at).collect()
    }
}

/// How long each step of a run takes, on one ground.
#[derive(Debug, Clone, PartialEq)]
pub struct Pace {
    /// Where that comes from.
    pub source: Source,
    /// The same in words.
    pub at: String,
    /// Seconds of each step.
    pub step_s: Vec<f64>,
}

/// A run at one pace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Schedule {
    /// Where the pace comes from.
    pub source: Source,
    /// The same in words.
    pub at: String,
    /// Training alone: no evaluation, no export.
    pub training_s: f64,
    /// Steps after which the scheduler saves, and the last step that is run.
    pub checkpoints: Vec<u64>,
    /// Where the scheduler ended the run before its last step, and why.
    pub stopped: Option<String>,
}

/// The loss that a scheduler is told on the simulated clock: the same after every step.
const LOSS: f64 = 1.0;

/// Asks `scheduler` after each step on a clock that goes on by the step's time at `pace` from `start_ms`. A save takes no time: it is
/// written beside the training.
///
/// # Errors
/// Those of a call that fails.
pub fn schedule(scheduler: &mut CheckpointScheduler, pace: &Pace, start_ms: u64) -> Result<Schedule> {
    let total_steps = pace.step_s.len() as u64;
    let (mut elapsed_s, mut saved_s) = (0.0, 0.0);
    let (mut checkpoints, mut stopped) = (Vec::new(), None);
    for (step, seconds) in (1..).zip(&pace.step_s) {
        elapsed_s += seconds;
        let decision = scheduler.after_step(&StepInfo {
            step,
            total_steps,
            wall_clock_ms: start_ms + (elapsed_s * 1e3) as u64,
            since_last_save_ms: ((elapsed_s - saved_s) * 1e3) as u64,
            last_save_cost_ms: 0,
            loss: LOSS,
        })?;
        if decision.stop && step < total_steps {
            stopped = Some(format!("after step {step}: {}", decision.reason));
        }
        if decision.save || stopped.is_some() || step == total_steps {
            checkpoints.push(step);
            saved_s = elapsed_s;
        }
        if stopped.is_some() {
            break;
        }
    }
    let Pace { source, at, .. } = pace.clone();
    Ok(Schedule { source, at, training_s: elapsed_s, checkpoints, stopped })
}
