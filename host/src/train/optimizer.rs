//! AdamW over the adapters (decoupled weight decay, arXiv 1711.05101), all state in f32, and the norm of the gradient.

use super::engine::Gradients;
use crate::config::{Schedule, TrainConfig};
use crate::model::adapter::Adapter;
use crate::model::flat::Flat;
use std::f64::consts::PI;
use tunehost_kernels::adamw::Step;

/// Optimiser state.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// Steps taken.
    pub step: u64,
    /// First and second moment of every value of [`Adapter::flat`]: means of the gradient and of its square.
    pub moments: [Flat; 2],
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
}

impl AdamW {
    /// Zero moments for every tensor of `adapter`.
    pub fn new(config: &TrainConfig, adapter: &Adapter) -> Self {
        let moments = [(); 2].map(|()| adapter.flat.zeros_like());
        Self { step: 0, moments, betas: config.betas, eps: config.eps, weight_decay: config.weight_decay }
    }

    /// Counts a step whose update is left out, so that a run resumed after it counts the same.
    pub fn skip(&mut self) {
        self.step += 1;
    }

    /// One update of every adapter tensor with gradients times `grad_factor`, in one launch.
    ///
    /// # Panics
    /// If a module has no gradient.
    pub fn update(&mut self, adapter: &mut Adapter, gradients: Gradients, grad_factor: f64, lr: f64) {
        self.step += 1;
        let step = self.step as i32;
        let [beta1, beta2] = self.betas;
        let step = Step {
            grad_factor,
            betas: self.betas,
            eps: self.eps,
            decay: 1.0 - lr * self.weight_decay,
            step_size: lr / (1.0 - beta1.powi(step)),
            correction: (1.0 - beta2.powi(step)).sqrt(),
        };
        adapter.flat.update(&mut self.moments, gradients.into_flat(), &step);
    }
}

/// Global L2 norm of the gradients, summed in module order.
pub fn global_norm(gradients: &Gradients) -> f64 {
    gradients.flat().squares().iter().map(|[a, b]| a + b).sum::<f64>().sqrt()
}

/// Factor that brings a gradient of `norm` down to `clip_norm`; 1 when it is smaller or clipping is off (0).
pub fn clip_factor(norm: f64, clip_norm: f64) -> f64 {
    // PyTorch's clip_grad_norm_ adds the same 1e-6.
    if clip_norm > 0.0 { (clip_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Learning rate of optimiser step `step` (from 0) out of `total`: linear warm-up, then the configured shape.
pub fn learning_rate(config: &TrainConfig, step: u64, total: u64) -> f64 {
    if step < config.warmup_steps {
        return config.lr * (step + 1) as f64 / config.warmup_steps as f64;
    }
    let decay_steps = total.saturating_sub(config.warmup_steps).max(1) as f64;
    let progress = ((step - config.warmup_steps) as f64 / decay_steps).min(1.0);
    let shape = match config.schedule {
        Schedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        Schedule::Linear => 1.0 - progress,
        Schedule::Constant => return config.lr,
    };
    config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_warms_up_and_decays() {
        let mut config = TrainConfig { lr: 1.0, warmup_steps: 10, min_lr_ratio: 0.1, ..TrainConfig::default() };
        let at = |config: &TrainConfig, step| learning_rate(config, step, 110);
        assert!((at(&config, 0) - 0.1).abs() < 1e-12 && (at(&config, 9) - 1.0).abs() < 1e-12);
        assert!((at(&config, 10) - 1.0).abs() < 1e-12);
        assert!((at(&config, 60) - 0.55).abs() < 1e-12);
        assert!((at(&config, 110) - 0.1).abs() < 1e-12 && (at(&config, 500) - 0.1).abs() < 1e-12);
        config.schedule = Schedule::Linear;
        assert!((at(&config, 35) - (0.1 + 0.9 * 0.75)).abs() < 1e-12);
        config.schedule = Schedule::Constant;
        assert_eq!(at(&config, 109), 1.0);
        config.warmup_steps = 0;
        assert_eq!(at(&config, 0), 1.0);
    }

    #[test]
    fn clipping_only_shrinks() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(50.0, 0.0), 1.0);
        assert!((clip_factor(10.0, 1.0) - 0.1).abs() < 1e-6);
    }
}
