//! Training: steps, batches, the engine, the optimiser, the gates and the loop around them.

pub mod batch;
pub mod engine;
pub mod evaluate;
pub mod gates;
pub mod optimizer;
pub mod state;
pub mod steps;
pub mod trainer;
