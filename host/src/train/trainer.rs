//! The arithmetic of an optimiser step: no files, no clock, no printing. All randomness is derived from the seed and the
//! step's number, so a step gives the same bytes whenever it runs.

use super::batch::Batch;
use super::engine::{Engine, Gradients};
use super::gates::StepGates;
use super::optimizer::{AdamW, clip_factor, global_norm, learning_rate};
use super::phase;
use super::steps::{MicroBatch, Step};
use crate::config::TrainConfig;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::rng::derive_seed;
use crate::run::metrics::StepMetrics;
use tunehost_kernels::trace;

/// Adapters in training.
#[derive(Debug)]
pub struct Trainer<'a> {
    /// Optimisation settings.
    pub config: &'a TrainConfig,
    /// The frozen base.
    pub engine: &'a Engine,
    /// Training records that the steps index.
    pub records: &'a [Record],
    /// Steps of the whole run.
    pub total_steps: u64,
    /// The adapters.
    pub adapter: Adapter,
    /// Their optimiser state.
    pub optimizer: AdamW,
}

/// What a step computes before its update.
#[derive(Debug)]
pub struct Computed {
    /// Loss of every token of its micro-batches, in their order; 0 where nothing is trained.
    pub losses: Vec<f32>,
    /// Mean loss per trained token.
    pub loss: f64,
    /// Gradient of that mean.
    pub gradients: Gradients,
    /// Tokens with a target.
    pub trained: usize,
}

impl Trainer<'_> {
    /// Runs step `index` (from 0) and applies its update where `gates` let it.
    ///
    /// # Errors
    /// `gate::nothing_trained`, and what `gates` found; the update is then not applied.
    pub fn step(&mut self, index: u64, step: &Step, gates: &mut StepGates) -> Result<StepMetrics> {
        let Computed { losses, loss, gradients, trained } = self.compute(index, step)?;
        let norm = trace::scope(phase::OPTIMISER);
        let grad_norm = global_norm(&gradients);
        drop(norm);
        let lr = learning_rate(self.config, index, self.total_steps);
        let rectangle: usize = step.batches.iter().map(|b| b.tokens(self.records).1).sum();
        let metrics = StepMetrics {
            step: index + 1,
            epoch: step.epoch,
            loss,
            lr,
            grad_norm,
            tokens: losses.len() as u64,
            trained_tokens: trained as u64,
            padding: 1.0 - losses.len() as f64 / rectangle as f64,
        };
        if gates.before_update(&metrics)? {
            self.update(gradients, grad_norm, lr);
        } else {
            self.optimizer.skip();
        }
        Ok(metrics)
    }

    /// Applies gradients of norm `grad_norm`, clipped.
    pub fn update(&mut self, gradients: Gradients, grad_norm: f64, lr: f64) {
        let _phase = trace::scope(phase::OPTIMISER);
        let factor = clip_factor(grad_norm, self.config.clip_norm);
        self.optimizer.update(&mut self.adapter, gradients, factor, lr);
    }

    /// Losses and gradients of step `index`; nothing is updated.
    ///
    /// # Errors
    /// `gate::nothing_trained`.
    pub fn compute(&self, index: u64, step: &Step) -> Result<Computed> {
        let data = trace::scope(phase::DATA);
        let batches: Vec<Batch> = step.batches.iter().map(|b| self.batch(b)).collect();
        drop(data);
        let trained: usize = batches.iter().map(Batch::trained).sum();
        if trained == 0 {
            return Err(Error::new("gate::nothing_trained", format!("step {} has no trained token", index + 1))
                .expected("at least one token with a loss in an accumulation window")
                .help(format!("its records: {}", self.record_ids(step))));
        }
        // The sum over the window is divided once, so that a token weighs the same in whichever micro-batch it stands.
        let grad_scale = 1.0 / trained as f64;
        let mut gradients = Gradients::new(&self.adapter);
        let (mut losses, mut loss_sum) = (Vec::new(), 0.0);
        for (i, batch) in batches.iter().enumerate() {
            let seed = derive_seed(self.config.seed, &format!("dropout of step {index} micro-batch {i}"));
            let of_batch = self.engine.accumulate(&self.adapter, batch, grad_scale, seed, &mut gradients);
            loss_sum += of_batch.iter().map(|l| f64::from(*l)).sum::<f64>();
            losses.extend(of_batch);
        }
        Ok(Computed { losses, loss: loss_sum * grad_scale, gradients, trained })
    }

    fn batch(&self, micro_batch: &MicroBatch) -> Batch {
        let records = micro_batch.rows.iter().flatten().map(|i| &self.records[*i as usize]);
        Batch::of(records)
    }

    fn record_ids(&self, step: &Step) -> String {
        let records = step.batches.iter().flat_map(|b| b.rows.iter().flatten());
        records.map(|i| &*self.records[*i as usize].id).collect::<Vec<_>>().join(", ")
    }
}
