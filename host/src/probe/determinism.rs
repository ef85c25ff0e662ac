//! Whether a step gives the same bytes again, and with another number of threads.

use crate::error::{Error, Result};
use crate::hash::sha256;
use crate::model::adapter::{Adapter, values};
use crate::model::flat::Flat;
use crate::model::lora::group;
use crate::plan::Source;
use crate::train::optimizer::{AdamW, global_norm, learning_rate};
use crate::train::steps::Step;
use crate::train::trainer::{Computed, Trainer};
use serde::Serialize;
use std::fmt::{self, Display, Formatter};

/// Optimiser steps that are compared: in the first of a fresh adapter the gradient of A is zero.
pub const STEPS: usize = 2;

/// The same steps, several times.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By computing them.
    pub source: Source,
    /// Where.
    pub device: String,
    /// Optimiser steps in each pass.
    pub steps: usize,
    /// Tokens of them.
    pub tokens: usize,
    /// The passes.
    pub passes: Vec<Pass>,
}

/// One computation of the steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pass {
    /// Threads of the CPU that computed.
    pub threads: usize,
    /// SHA-256 of what each step gave.
    pub steps: Vec<StepHashes>,
}

/// A step's loss, and SHA-256 of the bytes of its results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepHashes {
    /// Mean loss per trained token; null where it is no number.
    pub loss: f64,
    /// The loss of every token.
    pub losses_sha256: String,
    /// The gradient of every adapter.
    pub gradients_sha256: String,
    /// The adapters after the update.
    pub adapters_sha256: String,
}

/// Computes the first steps of a run from `adapter` twice with the threads that there are and once with another number.
///
/// # Errors
/// `gate::nothing_trained`; `probe::threads` where no threads can be had.
pub fn probe(trainer: &Trainer, steps: &[Step], device: &str) -> Result<Report> {
    let steps = &steps[..steps.len().min(STEPS)];
    let threads = rayon::current_num_threads();
    let other = if threads > 1 { threads / 2 } else { 2 };
    let mut passes = Vec::new();
    for threads in [threads, threads, other] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| {
            Error::new("probe::threads", format!("cannot start {threads} threads: {e}"))
                .help("raise the limit of processes (ulimit -u)")
        })?;
        passes.push(Pass { threads, steps: pool.install(|| pass(trainer, steps))? });
    }
    let batches = steps.iter().flat_map(|step| &step.batches);
    Ok(Report {
        source: Source::Measured,
        device: device.into(),
        steps: steps.len(),
        tokens: batches.map(|batch| batch.tokens(trainer.records).0).sum(),
        passes,
    })
}

fn pass(trainer: &Trainer, steps: &[Step]) -> Result<Vec<StepHashes>> {
    let Trainer { config, engine, records, total_steps, ref adapter, ref optimizer } = *trainer;
    let (adapter, optimizer): (Adapter, AdamW) = (adapter.clone(), optimizer.clone());
    let mut trainer = Trainer { config, engine, records, total_steps, adapter, optimizer };
    let step = |(index, step): (u64, &Step)| {
        let Computed { losses, loss, gradients, .. } = trainer.compute(index, step)?;
        let losses_sha256 = hash(losses.iter().copied());
        let gradients_sha256 = hash_of(gradients.flat());
        let norm = global_norm(&gradients);
        trainer.update(gradients, norm, learning_rate(config, index, total_steps));
        Ok(StepHashes { loss, losses_sha256, gradients_sha256, adapters_sha256: hash_of(&trainer.adapter.flat) })
    };
    (0..).zip(steps).map(step).collect()
}

fn hash_of(flat: &Flat) -> String {
    hash(flat.tensors().flat_map(|(_, tensor)| values(&tensor)))
}

fn hash(values: impl Iterator<Item = f32>) -> String {
    sha256(&values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
}

impl Report {
    /// The first result of a pass that is not as in the first pass.
    ///
    /// # Errors
    /// `probe::determinism`; `probe::not_finite` for a loss that is no number.
    pub fn verdict(&self) -> Result<()> {
        let first = &self.passes[0];
        if let Some((step, hashes)) = (1..).zip(&first.steps).find(|(_, hashes)| !hashes.loss.is_finite()) {
            let message = format!("the loss of step {step} is {}: bytes that repeat say nothing then", hashes.loss);
            return Err(Error::new("probe::not_finite", message).expected("a finite loss").help(super::NOT_FINITE));
        }
        for (number, pass) in (2..).zip(&self.passes[1..]) {
            for (step, (a, b)) in (1..).zip(first.steps.iter().zip(&pass.steps)) {
                let pairs = [
                    ("losses", &a.losses_sha256, &b.losses_sha256),
                    ("gradients", &a.gradients_sha256, &b.gradients_sha256),
                    ("adapters", &a.adapters_sha256, &b.adapters_sha256),
                ];
                if let Some((what, was, is)) = pairs.into_iter().find(|(_, a, b)| a != b) {
                    let message = format!(
                        "the {what} of step {step} have the sha256 {is} in pass {number} with {} threads",
                        pass.threads
                    );
                    return Err(Error::new("probe::determinism", message)
                        .expected(format!("{was}, as in pass 1 with {} threads", first.threads))
                        .help("a run that is killed and resumed here will not come to the bytes of one that is not"));
                }
            }
        }
        Ok(())
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        writeln!(
            out,
            "determinism (measured) on {}, {} steps of {} tokens in all, sha256 of losses, gradients, adapters",
            self.device,
            self.steps,
            group(self.tokens)
        )?;
        for (number, Pass { threads, steps }) in (1..).zip(&self.passes) {
            for (step, hashes) in (1..).zip(steps) {
                let StepHashes { loss, losses_sha256, gradients_sha256, adapters_sha256 } = hashes;
                writeln!(
                    out,
                    "  pass {number}, {threads} threads, step {step}: loss {loss:.4}, {:.16} {:.16} {:.16}",
                    losses_sha256, gradients_sha256, adapters_sha256
                )?;
            }
        }
        match self.verdict().map_err(|error| error.code()) {
            Err("probe::not_finite") => write!(out, "a loss is no number"),
            Ok(()) => write!(out, "the same bytes in every pass"),
            Err(_) => write!(out, "not the same bytes in every pass"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_result_is_named_with_its_step_and_pass() {
        let hashes = |adapters: &str| StepHashes {
            loss: 1.0,
            losses_sha256: "a".into(),
            gradients_sha256: "b".into(),
            adapters_sha256: adapters.into(),
        };
        let pass = |threads, last: &str| Pass { threads, steps: vec![hashes("c"), hashes(last)] };
        let report = |last| Report {
            source: Source::Measured,
            device: "cpu".into(),
            steps: 2,
            tokens: 8,
            passes: vec![pass(2, "d"), pass(2, "d"), pass(1, last)],
        };
        report("d").verdict().unwrap();
        let error = report("e").verdict().unwrap_err();
        assert_eq!(error.code(), "probe::determinism");
        let said = error.message();
        assert!(said.contains("adapters of step 2") && said.contains("e in pass 3 with 1 threads"), "{error}");
    }

    #[test]
    fn a_loss_that_is_no_number_repeats_nothing() {
        let hash = || "a".to_string();
        let step =
            StepHashes { loss: f64::NAN, losses_sha256: hash(), gradients_sha256: hash(), adapters_sha256: hash() };
        let passes = vec![Pass { threads: 1, steps: vec![step] }; 3];
        let report = Report { source: Source::Measured, device: "cpu".into(), steps: 1, tokens: 1, passes };
        assert_eq!(report.verdict().unwrap_err().code(), "probe::not_finite");
        assert!(report.to_string().ends_with("a loss is no number"), "{report}");
    }

    #[test]
    fn a_hash_tells_values_that_compare_equal_apart() {
        assert_ne!(hash([0.0f32].into_iter()), hash([-0.0f32].into_iter()));
    }
}
