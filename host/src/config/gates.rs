//! `[gates]`: what a run does when its plan or its numbers cannot be trusted.

use serde::{Deserialize, Serialize};

/// What a gate does with what it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// The run does not start, or ends.
    Stop,
    /// It is said, and written into provenance.
    Warn,
    /// The gate does not look.
    Off,
}

/// What each gate does, and where it draws the line. The gates of a template (`template.accept_mismatch`) and of a device
/// in use (`model.allow_shared`) have their keys there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatesConfig {
    /// No adapter has moved: after the first step with a learning rate above 0, at each checkpoint, and after step
    /// `inert_adapter_step`. Where only some have not, the run goes on and names them.
    pub inert_adapter: Action,
    /// The step after which `inert_adapter` looks again.
    pub inert_adapter_step: u64,
    /// A loss or a gradient norm that is no finite number. With `warn` the step's update is left out.
    pub not_finite: Action,
    /// A loss far above those before it.
    pub loss_spike: Action,
    /// How far, in nats above the median of the steps before.
    pub loss_spike_nats: f64,
    /// How many steps before; the gate looks once there are so many.
    pub loss_spike_steps: usize,
    /// A gradient norm of exactly 0.
    pub zero_gradient: Action,
    /// A planned micro-batch in which no token is trained.
    pub nothing_trained: Action,
    /// Planned tokens a step far from what the configuration, or `tokens_per_step_planned`, says.
    pub tokens_per_step: Action,
    /// Tokens that a step should have; without it, those of `train.micro_batch` x `train.accumulation` rows of mean length.
    pub tokens_per_step_planned: Option<u64>,
    /// How many times more or fewer is far.
    pub tokens_per_step_factor: f64,
    /// Too many accumulation windows whose records come from a single root.
    pub single_root: Action,
    /// Their share of the windows beyond what chance alone gives, 0 to 1.
    pub single_root_excess: f64,
    /// Weights or a kernel that resolve to something else than was asked for.
    pub kernels: Action,
    /// Less free memory on the device than the run takes at the least.
    pub free_memory: Action,
    /// A micro-batch of so many tokens as a shape that `tunehost smoke` saw fail, or more.
    pub smoke: Action,
    /// Less free disk than the checkpoints that are there at once, the logs and the exports take at the least.
    pub free_disk: Action,
}

impl Default for GatesConfig {
    fn default() -> Self {
        Self {
            inert_adapter: Action::Stop,
            inert_adapter_step: 100,
            not_finite: Action::Stop,
            loss_spike: Action::Warn,
            loss_spike_nats: 2.0,
            loss_spike_steps: 20,
            zero_gradient: Action::Stop,
            nothing_trained: Action::Stop,
            tokens_per_step: Action::Stop,
            tokens_per_step_planned: None,
            tokens_per_step_factor: 2.0,
            single_root: Action::Stop,
            single_root_excess: 0.25,
            kernels: Action::Warn,
            free_memory: Action::Stop,
            smoke: Action::Stop,
            free_disk: Action::Stop,
        }
    }
}
