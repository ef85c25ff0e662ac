//! Where the time of a run's steps goes: some of them computed as a run computes them, with every kernel and every part of a
//! step recorded ([`trace`]), held against what this machine was measured to reach in the same process.

mod chrome;
pub mod peak;
mod setting;
mod table;
mod text;

pub use chrome::chrome_trace;
pub use setting::Setting;
pub use table::{KernelRow, LayerRow, PhaseRow, Table, Time};

use crate::config::Config;
use crate::device;
use crate::error::Result;
use crate::job::Rehearsal;
use crate::plan::Spread;
use crate::plan::memory::Model;
use crate::plan::work::Work;
use crate::plugins::StepInfo;
use crate::report::{duration, note};
use crate::run::clock::unix_ms_now;
use crate::run::metrics::StepMetrics;
use crate::train::gates::StepGates;
use crate::train::phase;
use crate::train::steps::Step;
use peak::Peaks;
use serde::Serialize;
use std::time::{Duration, Instant};
use tunehost_kernels::trace::{self, Span};

/// Steps before those that are measured: the first one asks the system for memory.
pub const WARM_UP_STEPS: usize = 1;

/// What takes longer is announced.
const ANNOUNCED: Duration = Duration::from_secs(10);

/// Where the time of some steps went.
#[derive(Debug, Serialize)]
pub struct Report {
    /// On what.
    #[serde(flatten)]
    pub setting: Setting,
    /// Optimiser steps of the run: where there are fewer than were computed, those are computed in turn.
    pub run_steps: usize,
    /// A step while its spans are recorded, seconds.
    pub step_s: Spread,
    /// The same step as a run computes it, before it was recorded. Null on the CPU, where recording waits for nothing; another device
    /// is waited for at both ends of every span, and does nothing beside anything else meanwhile.
    pub unrecorded_step_s: Option<Spread>,
    /// The mean of those.
    pub unrecorded_step_mean_s: Option<f64>,
    /// Tokens of all measured steps.
    pub tokens: usize,
    /// What the device reaches, measured before the steps.
    pub peaks: Peaks,
    /// Operations of a step, the mean: what the kernels say that they did, and what the lengths of its documents ask for.
    pub work: Work,
    /// Operations that were performed, per second of the unrecorded steps where there are such, as a share of the measured peak.
    pub mfu_performed: f64,
    /// The same of those that the model asks for, with nothing computed twice.
    pub mfu_nominal: f64,
    /// The step by phase, layer kind and kernel, means over the steps.
    #[serde(flatten)]
    pub table: Table,
}

/// A step's spans, and when it started and ended, from the start of the first.
pub struct Recorded {
    /// Start.
    pub start: Duration,
    /// End.
    pub end: Duration,
    /// What ran in it.
    pub spans: Vec<Span>,
}

/// Computes `count` steps of the run after one that is not measured; the first steps, and where there are fewer, again from the
/// first. Once `stop` says so, the step that is computed is the last.
///
/// # Errors
/// Classes `device`, `gate`, `plugin`: what would stop the run in these steps.
pub fn profile(
    config: &Config,
    rehearsal: &mut Rehearsal,
    count: usize,
    stop: &dyn Fn() -> bool,
) -> Result<(Report, Vec<Recorded>)> {
    let device = device::open(&config.model.device)?;
    let setting = Setting::of(config)?;
    let peaks = Peaks::measure(config, &device);
    let text = rehearsal.prepared.text.clone();
    let lora = rehearsal.prepared.lora.clone();
    let model = Model::new(config, &text, &rehearsal.prepared.spec, &lora);

    let engine = rehearsal.load_engine()?;
    let (mut trainer, steps, policies) = rehearsal.parts(&engine);
    let (records, run_steps) = (trainer.records, steps.len());
    let mut gates = StepGates::new(&config.gates, None);
    let (mut recorded, mut unrecorded_s, mut work, mut tokens) = (Vec::new(), Vec::new(), Work::default(), 0);
    let mut began = Instant::now();
    for number in 0..WARM_UP_STEPS + count {
        let step: &Step = &steps[number % steps.len()];
        if number == WARM_UP_STEPS {
            let left = began.elapsed().mul_f64(count as f64 / WARM_UP_STEPS as f64);
            if left > ANNOUNCED {
                note(format_args!("{count} steps are measured, in about {}", duration(left)));
            }
            began = Instant::now();
        }
        if number >= WARM_UP_STEPS && config.model.device != "cpu" {
            let started = Instant::now();
            trainer.step(number as u64, step, &mut gates)?;
            _ = device.sync();
            unrecorded_s.push(started.elapsed().as_secs_f64());
        }
        let start = began.elapsed();
        let waits = device.clone();
        // A device that fails fails in the step too, where the error is told.
        let (metrics, spans) = trace::record(
            move || _ = waits.sync(),
            || -> Result<StepMetrics> {
                let metrics = trainer.step(number as u64, step, &mut gates)?;
                let _phase = trace::scope(phase::PLUGINS);
                policies.scheduling.run.after_step(&StepInfo {
                    step: metrics.step,
                    total_steps: trainer.total_steps.max(metrics.step),
                    wall_clock_ms: unix_ms_now(),
                    since_last_save_ms: began.elapsed().as_millis() as u64,
                    last_save_cost_ms: 0,
                    loss: metrics.loss,
                })?;
                Ok(metrics)
            },
        );
        _ = device.sync();
        let end = began.elapsed();
        let metrics = metrics?;
        if number >= WARM_UP_STEPS {
            let documents = step.batches.iter().flat_map(|batch| batch.rows.iter().flatten());
            let lengths = documents.map(|i| records[*i as usize].tokens.len());
            work = work + model.work(lengths, metrics.trained_tokens as usize);
            tokens += metrics.tokens as usize;
            recorded.push(Recorded { start, end, spans });
            if stop() {
                break;
            }
        }
    }
    let told = recorded.iter().flat_map(|step: &Recorded| &step.spans).filter_map(|span| span.work);
    work.performed_flop = told.map(|work| work.flop).sum::<usize>() as f64;
    let recorded_s: Vec<f64> = recorded.iter().map(|step| (step.end - step.start).as_secs_f64()).collect();
    let as_in_a_run = if unrecorded_s.is_empty() { &recorded_s } else { &unrecorded_s };
    let (steps, total): (f64, f64) = (recorded_s.len() as f64, as_in_a_run.iter().sum());
    let peak = peaks.weights_product_flops();
    let report = Report {
        setting,
        run_steps,
        step_s: Spread::of(&recorded_s).expect("a step was measured"),
        unrecorded_step_mean_s: (!unrecorded_s.is_empty()).then_some(total / steps),
        unrecorded_step_s: Spread::of(&unrecorded_s),
        tokens,
        mfu_performed: work.performed_flop / total / peak,
        mfu_nominal: work.nominal_flop / total / peak,
        work: Work { nominal_flop: work.nominal_flop / steps, performed_flop: work.performed_flop / steps },
        table: Table::of(&recorded, &text.layers),
        peaks,
    };
    Ok((report, recorded))
}
