//! Scales of quantised modules, chosen on the inputs that training records give them in the tuned model.

use super::proof::Judge;
use super::source::Tune;
use super::tensor::QuantizedWeight;
use crate::error::Result;
use crate::model::adapter::values;
use crate::model::experts::each_expert;
use crate::model::products::{Inputs, Products};
use crate::model::spec::Slot;
use crate::model::weights::LayerWeights;
use crate::train::batch::Batch;
use burn::tensor::Tensor;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use tunehost_kernels::glu::geglu;

/// What the search gained: squared errors of the outputs of all modules, in parts of the squared outputs. Where there was nothing
/// to search on, there are none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchReport {
    /// Records looked at.
    pub records: usize,
    /// Modules whose scales were searched; the others, whose inputs no record showed, have plain ones.
    pub modules: usize,
    /// All quantised modules.
    pub of: usize,
    /// With the chosen scales.
    pub error: Option<f64>,
    /// With plain ones.
    pub plain_error: Option<f64>,
}

impl fmt::Display for SearchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { records, modules, of, error, plain_error } = self;
        let (Some(error), Some(plain_error)) = (error, plain_error) else {
            let why = if *records == 0 {
                "there are no training records to search on"
            } else {
                "no training record reaches one"
            };
            return write!(f, "plain for all {of} modules: {why}; --training-data FILE names some");
        };
        write!(
            f,
            "searched for {modules} of {of} modules on {records} training records: relative squared error of their outputs \
             {error:.3e}, with plain rounding {plain_error:.3e}"
        )
    }
}

/// What a quantised module multiplies, within its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Linear(Slot),
    /// Gate or up rows of this expert.
    GateUp(usize),
    Down(usize),
}

/// Chooses the scales of `weights` on the training records of `tune`; `None` where nothing is quantised.
/// `progress` is told the layers done.
///
/// # Errors
/// Class `model`.
pub fn search_scales(
    judge: &Judge,
    tune: &Tune,
    weights: &[&QuantizedWeight],
    progress: &mut dyn FnMut(usize),
) -> Result<Option<SearchReport>> {
    if weights.is_empty() {
        return Ok(None);
    }
    if tune.training.is_empty() {
        return Ok(Some(SearchReport { records: 0, modules: 0, of: weights.len(), error: None, plain_error: None }));
    }
    let mut by_layer: HashMap<usize, Vec<(Place, &QuantizedWeight)>> = HashMap::new();
    for &weight in weights {
        if let Some((layer, place)) = place(tune, weight) {
            by_layer.entry(layer).or_default().push((place, weight));
        }
    }
    let batches: Vec<Batch> = tune.training.iter().map(|record| Batch::of([record])).collect();
    let (mut modules, mut error, mut plain_error, mut energy) = (0, 0.0, 0.0, 0.0);
    let mut done = 0;
    judge.through_layers(tune.on_disk(true), &batches, &mut |index, layer_weights, streams, forward| {
        let inputs: Vec<Inputs> = streams
            .iter_mut()
            .zip(&batches)
            .map(|(stream, batch)| {
                let mut products = Products::observing();
                *stream = forward(stream.clone(), batch, &mut products);
                products.into_inputs()
            })
            .collect();
        for (place, weight) in by_layer.get(&index).into_iter().flatten() {
            let mut moments = weight.no_moments();
            for inputs in &inputs {
                if let Some(rows) = rows_of(*place, inputs, layer_weights) {
                    moments.add(&values(&rows), rows.dims()[1]);
                }
            }
            // An expert that no record chose has shown nothing.
            if moments.values.iter().any(|sum| *sum != 0.0) {
                let searched = weight.search_scales(&moments);
                modules += 1;
                error += searched.error;
                plain_error += searched.plain_error;
                energy += searched.energy;
            }
        }
        done += 1;
        progress(done);
    })?;
    let part = |sum: f64| (energy > 0.0).then(|| sum / energy);
    let (error, plain_error) = (part(error), part(plain_error));
    Ok(Some(SearchReport { records: batches.len(), modules, of: weights.len(), error, plain_error }))
}

fn place(tune: &Tune, weight: &QuantizedWeight) -> Option<(usize, Place)> {
    let linear = tune.spec.modules.iter().find(|m| weight.tensor.strip_suffix(".weight") == Some(&m.path));
    if let Some(module) = linear {
        return Some((module.layer, Place::Linear(module.slot)));
    }
    let layer = weight.tensor.strip_prefix(&tune.spec.prefix)?.strip_prefix("layers.")?;
    let (layer, tensor) = layer.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let moe = tune.config.layers.get(layer)?.moe?;
    match tensor {
        "experts.gate_up_proj" => Some((layer, Place::GateUp(weight.rows.start / (2 * moe.intermediate_size)))),
        "experts.down_proj" => Some((layer, Place::Down(weight.rows.start / tune.config.hidden_size))),
        _ => None,
    }
}

/// The rows `[n, width]` that the module at `place` was multiplied with; none where there were none.
fn rows_of(place: Place, inputs: &Inputs, weights: &LayerWeights) -> Option<Tensor<2>> {
    let (expert, of_down) = match place {
        Place::Linear(slot) => return inputs.linear[slot as usize].clone(),
        Place::GateUp(expert) => (expert, false),
        Place::Down(expert) => (expert, true),
    };
    let (x, routing) = inputs.experts.as_ref()?;
    let moe = weights.moe.as_ref()?;
    let chosen = each_expert(routing).into_iter().find(|chosen| chosen.expert == expert)?;
    let rows = chosen.rows(x);
    if !of_down {
        return Some(rows);
    }
    let (gate, up) = chosen.gate_and_up(rows, &moe.gate_up);
    Some(geglu(gate, up))
}
