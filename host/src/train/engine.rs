//! Loss and adapter gradients of a micro-batch.
//!
//! The base is frozen, so no gradient of a base weight is formed. The forward pass runs layer by layer; a recomputed layer
//! keeps its input and, where asked, the outputs of its products, and the backward pass runs it a second time with autodiff
//! on its input and its adapters (gradient checkpointing, arXiv 1604.06174, one layer a segment), computing no kept output
//! again. Between layers the residual stream, which is f32, may be kept in bf16: every layer then reads the rounded stream, in the first pass
//! as in the second and in evaluation. Peak memory is base + adapters + what the layers keep + one layer's activations + one chunk of the loss; a layer
//! that is not recomputed keeps all of its activations.

use super::batch::Batch;
use super::phase;
use crate::config::WeightDtype;
use crate::model::adapter::{Adapter, LayerAdapters, LowRank};
use crate::model::flat::Flat;
use crate::model::gemma4::Positions;
use crate::model::products::Products;
use crate::model::rng::derive_seed;
use crate::model::weights::Model;
use burn::tensor::{DType, Gradients as Tape, Tensor};
use tunehost_kernels::adamw::Write;
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::cross_entropy::{self, CrossEntropy, linear_cross_entropy};
use tunehost_kernels::trace;

/// A base with the settings that trade its memory for time.
#[derive(Debug)]
pub struct Engine {
    /// The frozen base.
    pub model: Model,
    /// Layers, from the first, whose activations are recomputed.
    pub recompute_layers: usize,
    /// Whether recomputed layers keep the outputs of their products, so that only the rest is computed twice.
    pub keep_products: bool,
    /// Rows of the loss head at once.
    pub loss_chunk_rows: usize,
    /// How the residual stream is kept between layers.
    pub residuals: WeightDtype,
}

/// Gradients of every adapter tensor, summed over micro-batches.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// Laid out as [`Adapter::flat`].
    flat: Flat,
    /// Whether there is a gradient of each module.
    written: Vec<bool>,
}

impl Gradients {
    /// Those of no micro-batch yet, of `adapter`.
    pub fn new(adapter: &Adapter) -> Self {
        Self { flat: adapter.flat.zeros_like(), written: vec![false; adapter.plan.modules.len()] }
    }

    /// As large as those of a micro-batch, for measuring: the adapter's own values.
    pub fn of(adapter: &Adapter) -> Self {
        let mut gradients = Self::new(adapter);
        adapter.pairs().enumerate().for_each(|(index, pair)| gradients.add(index, pair));
        gradients
    }

    /// Adds those of module `index`.
    pub fn add(&mut self, index: usize, gradient: LowRank) {
        let how = if self.written[index] { Write::Add } else { Write::Set };
        self.flat.write(index, gradient, how);
        self.written[index] = true;
    }

    /// All of them.
    ///
    /// # Panics
    /// If a module has none, which is an error of the engine.
    pub fn flat(&self) -> &Flat {
        let missing = self.written.iter().position(|written| !written);
        assert_eq!(missing, None, "the engine gave no gradient of this module");
        &self.flat
    }

    /// [`Gradients::flat`], given away.
    ///
    /// # Panics
    /// As that.
    pub fn into_flat(self) -> Flat {
        self.flat();
        self.flat
    }

    /// dA and dB of each module.
    ///
    /// # Panics
    /// As [`Gradients::flat`].
    pub fn pairs(&self) -> impl Iterator<Item = LowRank> {
        let flat = self.flat();
        (0..self.written.len()).map(|index| flat.pair(index))
    }
}

/// A layer's part of the graph that the backward pass consumes.
struct Recorded {
    /// In f32.
    input: Tensor<2>,
    leaves: Vec<LowRank>,
    output: Tensor<2>,
}

#[allow(clippy::large_enum_variant)] // one per layer and micro-batch: a box would save nothing
enum Saved {
    Input(Tensor<2>, Products),
    Graph(Recorded),
}

impl Engine {
    /// Per-token losses `[N]` (0 where nothing is trained) without gradients.
    pub fn losses(&self, adapter: Option<&Adapter>, batch: &Batch) -> Vec<f32> {
        let hidden = self.model.final_norm(self.hidden(adapter, batch, &mut |_, _| {}));
        self.head(hidden, batch, 0.0, false).loss
    }

    /// Logits `[N, V]`; for small inputs only.
    pub fn logits(&self, adapter: Option<&Adapter>, batch: &Batch) -> Tensor<2> {
        self.logits_of(self.hidden(adapter, batch, &mut |_, _| {}))
    }

    /// Logits `[N, V]` of residual-stream rows `[N, H]` after the last layer.
    pub fn logits_of(&self, hidden: Tensor<2>) -> Tensor<2> {
        let hidden = self.model.final_norm(hidden);
        cross_entropy::logits(hidden, self.model.head.clone(), self.model.config.final_logit_softcapping)
    }

    /// The residual stream `[N, H]` after the last layer; `visit` sees it before the first layer (index 0) and after each.
    pub fn hidden(
        &self,
        adapter: Option<&Adapter>,
        batch: &Batch,
        visit: &mut dyn FnMut(usize, &Tensor<2>),
    ) -> Tensor<2> {
        let positions = self.positions(batch);
        let mut h = self.kept(self.model.embed(&batch.ids)).cast(DType::F32);
        visit(0, &h);
        for index in 0..self.model.layers.len() {
            let adapters = adapter.map_or_else(LayerAdapters::default, |a| a.layer(index, None));
            h = self.model.layer(index).forward(h, &adapters, &positions, &mut Products::default());
            h = self.kept(h).cast(DType::F32);
            visit(index + 1, &h);
        }
        h
    }

    /// Adds the gradients of `grad_scale * (sum of token losses)` to `gradients`; per-token losses `[N]`.
    ///
    /// `dropout_seed` must differ between micro-batches; without dropout it changes nothing.
    pub fn accumulate(
        &self,
        adapter: &Adapter,
        batch: &Batch,
        grad_scale: f64,
        dropout_seed: u64,
        gradients: &mut Gradients,
    ) -> Vec<f32> {
        let forward = trace::scope(phase::FORWARD);
        let positions = self.positions(batch);
        // Nothing below the lowest adapted layer needs a gradient.
        let lowest = adapter.plan.modules.iter().map(|m| m.layer).min().unwrap_or(0);
        let mut h = self.kept(self.model.embed(&batch.ids));
        let mut saved = Vec::with_capacity(self.model.layers.len());
        for index in 0..self.model.layers.len() {
            let _layer = trace::scope_of(phase::LAYER, index);
            let input = h.clone().cast(DType::F32);
            let output = if index < lowest {
                drop(h);
                let none = LayerAdapters::default();
                self.model.layer(index).forward(input, &none, &positions, &mut Products::default())
            } else if index < self.recompute_layers {
                let adapters = adapter.layer(index, Some(layer_seed(dropout_seed, index)));
                let mut products = if self.keep_products { Products::kept() } else { Products::default() };
                let output = self.model.layer(index).forward(input, &adapters, &positions, &mut products);
                saved.push(Saved::Input(h, products.for_second_pass()));
                output
            } else {
                drop(h);
                let graph =
                    self.record(adapter, index, index > lowest, input, Products::default(), &positions, dropout_seed);
                let output = graph.output.clone().without_autodiff();
                saved.push(Saved::Graph(graph));
                output
            };
            h = self.kept(output);
        }

        drop(forward);

        let loss = trace::scope(phase::LOSS);
        let last = h.cast(DType::F32).autodiff().require_grad();
        let normed = self.model.final_norm(last.clone());
        // Divided by the tokens of a window, gradients would be lost below the smallest values of f16: there they are those of the sum of
        // the losses until they are added up.
        let (head_scale, late_scale) = match self.model.activations {
            DType::F16 => (1.0, Some(grad_scale as f32)),
            _ => (grad_scale, None),
        };
        let head = self.head(normed.clone().without_autodiff(), batch, head_scale, true);
        let Some(d_normed) = head.d_hidden else { return head.loss };
        let mut d_h = vector_jacobian(&normed, d_normed).remove(&last);
        drop((last, normed));
        drop(loss);

        for (index, saved) in (lowest..).zip(saved).collect::<Vec<_>>().into_iter().rev() {
            let graph = match saved {
                Saved::Graph(graph) => graph,
                Saved::Input(input, products) => {
                    let _phase = trace::scope(phase::RECOMPUTE);
                    let _layer = trace::scope_of(phase::LAYER, index);
                    let input = input.cast(DType::F32);
                    self.record(adapter, index, index > lowest, input, products, &positions, dropout_seed)
                }
            };
            let _phase = trace::scope(phase::BACKWARD);
            let _layer = trace::scope_of(phase::LAYER, index);
            let mut tape = vector_jacobian(&graph.output, d_h.clone());
            if index > lowest {
                d_h = tape.remove(&graph.input);
            }
            for ((module, _), leaf) in adapter.indices_of(index).zip(&graph.leaves) {
                let [a, b] = [&leaf.a, &leaf.b].map(|leaf| match late_scale {
                    Some(scale) => tape.remove(leaf).mul_scalar(scale),
                    None => tape.remove(leaf),
                });
                gradients.add(module, LowRank { a, b });
            }
            // Freed within the phase.
            drop((tape, graph));
        }
        head.loss
    }

    /// Runs layer `index` with autodiff on its adapters and, with `track_input`, on its input; computes no product that
    /// `products` holds.
    #[allow(clippy::too_many_arguments)]
    fn record(
        &self,
        adapter: &Adapter,
        index: usize,
        track_input: bool,
        input: Tensor<2>,
        mut products: Products,
        positions: &Positions,
        dropout_seed: u64,
    ) -> Recorded {
        let input = input.autodiff().set_require_grad(track_input);
        let mut leaves = Vec::new();
        let adapters = adapter.layer_of(index, Some(layer_seed(dropout_seed, index)), |pair| {
            let leaf = LowRank { a: pair.a.autodiff().require_grad(), b: pair.b.autodiff().require_grad() };
            leaves.push(leaf.clone());
            leaf
        });
        let output = self.model.layer(index).forward(input.clone(), &adapters, positions, &mut products);
        Recorded { input, leaves, output }
    }

    /// The residual stream as it is kept between layers.
    fn kept(&self, stream: Tensor<2>) -> Tensor<2> {
        stream.cast(self.residuals.dtype())
    }

    fn positions(&self, batch: &Batch) -> Positions {
        Positions::new(&self.model.config, batch.segments.clone(), &batch.position_ids, &self.model.device)
    }

    fn head(&self, hidden: Tensor<2>, batch: &Batch, grad_scale: f64, want_grad: bool) -> CrossEntropy {
        let weight = self.model.head.clone();
        let softcap = self.model.config.final_logit_softcapping;
        let chunk_rows = self.loss_chunk_rows;
        linear_cross_entropy(hidden, weight, &batch.targets, softcap, grad_scale, chunk_rows, want_grad)
    }
}

fn layer_seed(dropout_seed: u64, layer: usize) -> u64 {
    derive_seed(dropout_seed, &format!("layer {layer}"))
}

struct Removable(Tape);

impl Removable {
    fn remove<const D: usize>(&mut self, leaf: &Tensor<D>) -> Tensor<D> {
        leaf.grad_remove(&mut self.0).expect("every leaf feeds the layer's output")
    }
}

/// The tape after `output` was pulled back with the cotangent `d_output`.
fn vector_jacobian(output: &Tensor<2>, d_output: Tensor<2>) -> Removable {
    Removable(pull_back(output.clone(), d_output))
}
