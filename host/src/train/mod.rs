//! Training: steps, batches, the engine, the optimiser, the gates and the loop around them.

pub mod batch;
pub mod engine;
pub mod evaluate;
pub mod gates;
pub mod optimizer;
pub mod state;
pub mod steps;
pub mod trainer;

/// Parts of a step, by the names under which they are recorded ([`trace`](tunehost_kernels::trace)).
pub mod phase {
    /// Micro-batches are laid out.
    pub const DATA: &str = "data";
    /// The first pass.
    pub const FORWARD: &str = "forward";
    /// Head and loss, and their gradient.
    pub const LOSS: &str = "loss";
    /// A layer is run again.
    pub const RECOMPUTE: &str = "recompute";
    /// A layer is pulled back.
    pub const BACKWARD: &str = "backward";
    /// The gradient's norm, and the update.
    pub const OPTIMISER: &str = "optimiser";
    /// The checkpoint scheduler is asked.
    pub const PLUGINS: &str = "plugins";

    /// All of them, in their order.
    pub const ALL: [&str; 7] = [DATA, FORWARD, LOSS, RECOMPUTE, BACKWARD, OPTIMISER, PLUGINS];
    /// One of the layers, within a phase.
    pub const LAYER: &str = "layer";
}
