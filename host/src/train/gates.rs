//! Checks that stop a run whose numbers cannot be trusted, instead of letting it finish.

use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};

/// What the inert-adapter gate found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Movement {
    /// Every B moved.
    All,
    /// The modules whose B is as it was.
    SomeStill(Vec<String>),
}

/// Compares every B with its values before the step. An adapter whose B never moves leaves the base as it was, and nothing
/// else of a run shows it.
///
/// # Errors
/// `gate::inert_adapter` when no B moved.
pub fn movement(before: &[Vec<f32>], adapter: &Adapter) -> Result<Movement> {
    let modules = adapter.plan.modules.iter().zip(&adapter.modules).zip(before);
    let still: Vec<String> =
        modules.filter(|((_, pair), before)| values(&pair.b) == **before).map(|((m, _), _)| m.path.clone()).collect();
    if still.len() == adapter.modules.len() {
        return Err(Error::new("gate::inert_adapter", "no adapter moved in a step with a learning rate above 0")
            .expected("every lora_B to differ from its initial value")
            .help("no gradient reaches the adapters; a run like this would end with the base's own answers"));
    }
    Ok(if still.is_empty() { Movement::All } else { Movement::SomeStill(still) })
}

/// The values of every B.
pub fn snapshot(adapter: &Adapter) -> Vec<Vec<f32>> {
    adapter.modules.iter().map(|pair| values(&pair.b)).collect()
}

/// # Errors
/// `gate::not_finite` for a loss or gradient norm that is not a number; the step is not applied.
pub fn finite(step: u64, loss: f64, grad_norm: f64) -> Result<()> {
    if loss.is_finite() && grad_norm.is_finite() {
        return Ok(());
    }
    Err(Error::new("gate::not_finite", format!("step {step} has loss {loss} and gradient norm {grad_norm}"))
        .expected("finite numbers")
        .help("the step was not applied and the last checkpoint stands; try a lower `train.lr`, a longer warm-up, or look at the step's records in order-manifest.jsonl"))
}
