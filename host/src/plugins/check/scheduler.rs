//! Properties of a checkpoint scheduler.

use serde_json::Value;

use super::{Outcome, Report};
use crate::plugins::{CheckpointScheduler, Decision, PluginRef, StepInfo};

pub fn check(plugin: &PluginRef, config: &Value, report: &mut Report) {
    let start = || CheckpointScheduler::load(plugin, Some(config)).map_err(|error| error.to_string());
    let decisions = || decide(&mut start()?, &steps());
    report.add(
        "every step is answered: the first, the last, long waits, a loss that is no number",
        decisions().map(drop),
    );
    report.add("two instances decide alike", agree(decisions));
    report.add("a save or a stop has a reason, and nothing else has", reasons(decisions));
    report.add("a resumed run has the decisions of one that was never stopped", resumes(start));
}

/// Stopped at any step and started anew with what it saved, if anything, it must go on as if nothing had happened.
fn resumes(start: impl Fn() -> Result<CheckpointScheduler, String>) -> Outcome {
    let steps = steps();
    let text = |error: crate::error::Error| error.to_string();
    for cut in [0, 1, 2, 57, 333, 1000, 1003] {
        let (before, after) = steps.split_at(cut);
        let mut going_on = start()?;
        decide(&mut going_on, before)?;
        let memory = going_on.save().map_err(text)?;
        let mut resumed = start()?;
        resumed.restore(memory.as_deref()).map_err(text)?;
        let (expected, found) = (decide(&mut going_on, after)?, decide(&mut resumed, after)?);
        if let Some(at) = expected.iter().zip(&found).position(|(expected, found)| expected != found) {
            let remembers = match &memory {
                Some(bytes) => format!("it saved {} bytes", bytes.len()),
                None => "it exports no memory".into(),
            };
            return Err(format!(
                "stopped after {cut} calls ({remembers}), call {} has {:?} in place of {:?}",
                cut + at + 1,
                found[at],
                expected[at]
            ));
        }
    }
    Ok(())
}

/// A run of an hour and a half with slow, quick and late steps, then the ends of every number.
fn steps() -> Vec<StepInfo> {
    let ordinary = |step: u64| StepInfo {
        step,
        total_steps: 1000,
        wall_clock_ms: 1_700_000_000_000 + step * 5_400,
        since_last_save_ms: (step % 200) * 5_400,
        last_save_cost_ms: if step < 200 { 0 } else { 900 },
        loss: 5.0 / step as f64,
    };
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0].map(|loss| StepInfo { loss, ..ordinary(999) });
    let last = StepInfo {
        step: u64::MAX,
        total_steps: u64::MAX,
        wall_clock_ms: u64::MAX,
        since_last_save_ms: u64::MAX,
        last_save_cost_ms: u64::MAX,
        loss: f64::MAX,
    };
    let first =
        StepInfo { step: 1, total_steps: 1, wall_clock_ms: 0, since_last_save_ms: 0, last_save_cost_ms: 0, loss: 0.0 };
    (1..=1000).map(ordinary).chain(odd).chain([last, first]).collect()
}

fn decide(scheduler: &mut CheckpointScheduler, steps: &[StepInfo]) -> Result<Vec<Decision>, String> {
    let decide = |info: &StepInfo| scheduler.after_step(info).map_err(|error| format!("{info:?}: {error}"));
    steps.iter().map(decide).collect()
}

fn agree(decisions: impl Fn() -> Result<Vec<Decision>, String>) -> Outcome {
    let (first, second) = (decisions()?, decisions()?);
    match first.iter().zip(&second).position(|(first, second)| first != second) {
        None => Ok(()),
        Some(at) => Err(format!("after {at} calls: {:?} and {:?}", first[at], second[at])),
    }
}

fn reasons(decisions: impl Fn() -> Result<Vec<Decision>, String>) -> Outcome {
    match decisions()?.into_iter().find(|decision| (decision.save || decision.stop) == decision.reason.is_empty()) {
        None => Ok(()),
        Some(decision) => Err(format!("{decision:?}")),
    }
}
