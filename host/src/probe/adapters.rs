//! Whether a gradient reaches every adapter, by one micro-batch of the run through the engine, an update, and the same again.
//!
//! Where B is zero, as in a fresh adapter, the gradient of A is zero whatever the model does: A is looked at after the update.

use crate::error::{Error, Result};
use crate::model::lora::group;
use crate::plan::Source;
use crate::train::engine::Gradients;
use crate::train::optimizer::{global_norm, learning_rate};
use crate::train::steps::{MicroBatch, Step};
use crate::train::trainer::{Computed, Trainer};
use serde::Serialize;
use std::fmt::{self, Display, Formatter};

const NO_NUMBER: &str = "its gradient is no number";

/// Gradients of every adapter.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By forward and backward passes of the engine.
    pub source: Source,
    /// Where it ran.
    pub device: String,
    /// Tokens of the micro-batch.
    pub tokens: usize,
    /// Those with a target.
    pub trained_tokens: usize,
    /// Mean loss per trained token before the update.
    pub loss_before: f64,
    /// After it, of the same micro-batch.
    pub loss_after: f64,
    /// By adapted module, in the model's order.
    pub modules: Vec<Module>,
}

/// Norms of one adapter's gradients.
#[derive(Debug, Serialize)]
pub struct Module {
    /// Its path in the model.
    pub path: String,
    /// Whether B was zero at the start.
    pub b_is_zero: bool,
    /// Of B, at the start.
    pub b_gradient_norm: f64,
    /// Of A, at the start: zero where B is.
    pub a_gradient_norm: f64,
    /// Of A after one update.
    pub a_gradient_norm_after_update: f64,
}

impl Module {
    /// What is wrong with its gradients.
    fn problem(&self) -> Option<&'static str> {
        let norms = [self.b_gradient_norm, self.a_gradient_norm, self.a_gradient_norm_after_update];
        match () {
            () if norms.iter().any(|norm| !norm.is_finite()) => Some(NO_NUMBER),
            () if self.b_gradient_norm == 0.0 => Some("no gradient reaches B"),
            () if self.a_gradient_norm_after_update == 0.0 => Some("no gradient reaches A after an update"),
            () => None,
        }
    }
}

/// Computes the first micro-batch of `steps` that trains a token, updates `trainer` by it, and computes it again.
///
/// # Errors
/// `gate::nothing_trained` where no micro-batch trains a token.
pub fn probe(trainer: &mut Trainer, steps: &[Step], device: &str) -> Result<Report> {
    let mut single = steps.iter().flat_map(|step| step.batches.iter().map(|batch| (step.epoch, batch)));
    let trains = |(epoch, batch): (u32, &MicroBatch)| {
        let records = batch.rows.iter().flatten().map(|i| &trainer.records[*i as usize]);
        let trained = records.flat_map(|record| record.tokens.trained().skip(1)).any(|trained| trained);
        trained.then(|| Step { epoch, batches: vec![batch.clone()] })
    };
    let step = single.find_map(trains).ok_or_else(|| {
        Error::new("gate::nothing_trained", "no micro-batch of the run trains a token")
            .help("tunehost corpus inspect shows which tokens are trained")
    })?;
    let b_is_zero: Vec<bool> = trainer.adapter.flat.squares().iter().map(|[_, b]| *b == 0.0).collect();
    let Computed { losses, loss, gradients, trained } = trainer.compute(0, &step)?;
    let before = norms(&gradients);
    let (size, lr) = (global_norm(&gradients), learning_rate(trainer.config, 0, trainer.total_steps));
    trainer.update(gradients, size, lr);
    let again = trainer.compute(0, &step)?;
    let after = norms(&again.gradients);
    let paths = trainer.adapter.plan.modules.iter().map(|module| module.path.clone());
    let modules = paths.zip(b_is_zero).zip(before.into_iter().zip(after));
    let module = |((path, b_is_zero), (before, after)): ((String, bool), ([f64; 2], [f64; 2]))| Module {
        path,
        b_is_zero,
        b_gradient_norm: before[1],
        a_gradient_norm: before[0],
        a_gradient_norm_after_update: after[0],
    };
    Ok(Report {
        source: Source::Measured,
        device: device.into(),
        tokens: losses.len(),
        trained_tokens: trained,
        loss_before: loss,
        loss_after: again.loss,
        modules: modules.map(module).collect(),
    })
}

/// Norms of the gradients of A and B, by module.
fn norms(gradients: &Gradients) -> Vec<[f64; 2]> {
    gradients.flat().squares().into_iter().map(|pair| pair.map(f64::sqrt)).collect()
}

impl Report {
    /// Modules of which something is wrong, and what.
    fn problems(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.modules.iter().filter_map(|module| Some((&module.path[..], module.problem()?)))
    }

    /// # Errors
    /// `probe::adapters` with the first module that does not learn.
    pub fn verdict(&self) -> Result<()> {
        let Some((path, problem)) = self.problems().next() else { return Ok(()) };
        let message = format!(
            "{} of {} adapters do not learn from this micro-batch, whose loss is {}; the first: {path}: {problem}",
            group(self.problems().count()),
            group(self.modules.len()),
            self.loss_before
        );
        let help = match problem {
            NO_NUMBER => super::NOT_FINITE,
            _ => {
                "a module that the model does not use, a layer scaled by 0 or documents of a single token have none; leave it out with lora.targets"
            }
        };
        Err(Error::new("probe::adapters", message)
            .expected("a gradient for B at the start and for A after one update, both finite")
            .help(help))
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        writeln!(
            out,
            "adapters (measured) on {}, a micro-batch of {} tokens, {} trained; loss {:.4}, {:.4} after an update",
            self.device,
            group(self.tokens),
            group(self.trained_tokens),
            self.loss_before,
            self.loss_after
        )?;
        let fresh = self.modules.iter().filter(|module| module.b_is_zero).count();
        writeln!(
            out,
            "B is zero in {} of {} modules: A gets its first gradient after an update there",
            group(fresh),
            group(self.modules.len())
        )?;
        let range = |norm: fn(&Module) -> f64| {
            let norms: Vec<f64> = self.modules.iter().map(norm).collect();
            let (least, most) =
                (norms.iter().copied().fold(f64::INFINITY, f64::min), norms.iter().copied().fold(0.0, f64::max));
            let finite = norms.iter().filter(|norm| norm.is_finite()).count();
            if finite < norms.len() {
                return format!("no number in {} modules", group(norms.len() - finite));
            }
            if most == 0.0 { "0".into() } else { format!("{least:.3e} to {most:.3e}") }
        };
        writeln!(out, "  gradient of B               {}", range(|m| m.b_gradient_norm))?;
        writeln!(out, "  gradient of A               {}", range(|m| m.a_gradient_norm))?;
        writeln!(out, "  gradient of A after update  {}", range(|m| m.a_gradient_norm_after_update))?;
        self.problems().try_for_each(|(path, problem)| writeln!(out, "  {path}: {problem}"))?;
        write!(out, "experts carry no adapter: one that no token is sent to leaves none without a gradient")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_without_a_gradient_is_named() {
        let module = |path: &str, norms: [f64; 3]| Module {
            path: path.into(),
            b_is_zero: true,
            b_gradient_norm: norms[0],
            a_gradient_norm: norms[1],
            a_gradient_norm_after_update: norms[2],
        };
        let report = |norms| Report {
            source: Source::Measured,
            device: "cpu".into(),
            tokens: 2,
            trained_tokens: 1,
            loss_before: 1.0,
            loss_after: 1.0,
            modules: vec![module("q", [1.0, 0.0, 1.0]), module("v", norms)],
        };
        report([1.0, 0.0, 1.0]).verdict().unwrap();
        for (norms, problem) in [
            ([0.0, 0.0, 1.0], "v: no gradient reaches B"),
            ([1.0, 0.0, 0.0], "v: no gradient reaches A after an update"),
            ([1.0, 0.0, f64::NAN], "v: its gradient is no number"),
        ] {
            let error = report(norms).verdict().unwrap_err();
            assert_eq!(error.code(), "probe::adapters");
            assert!(error.message().contains("1 of 2 adapters") && error.message().ends_with(problem), "{error}");
        }
    }
}
