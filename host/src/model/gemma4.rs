//! The forward description of the Gemma-4 text family (tensor shapes in comments: N tokens of a micro-batch end to end).
//!
//! The residual stream and the router are f32; what the operations of a block pass to each other may be in 16 bits.
//!
//! Differentiability is the caller's choice: whatever the inputs are marked as, burn records.

use super::adapter::LayerAdapters;
use super::config::{LayerConfig, LayerKind, TextConfig};
use super::fp8;
use super::products::Products;
use super::spec::Slot;
use super::weights::{LayerWeights, Model, MoeWeights};
use burn::tensor::{DType, Device, Tensor};
use tunehost_kernels::{
    attention::{Attention, Segments},
    embedding::embedding,
    glu::geglu,
    linear::lora_linear,
    moe::{self, Routing},
    norm::{rms_norm, rms_norm_residual},
    rope::{RopeTable, rms_norm_rope},
};

/// What every layer needs to know of a micro-batch.
#[derive(Debug, Clone)]
pub struct Positions {
    segments: Segments,
    rope: Vec<(LayerKind, RopeTable)>,
}

impl Positions {
    /// `segments` are the documents; `position_ids` restart in each.
    pub fn new(config: &TextConfig, segments: Segments, position_ids: &[u32], device: &Device) -> Self {
        let mut rope: Vec<(LayerKind, RopeTable)> = Vec::new();
        for layer in &config.layers {
            if !rope.iter().any(|(kind, _)| *kind == layer.kind) {
                let table = RopeTable::new(&layer.rope, position_ids, device);
                rope.push((layer.kind, table.expect("the frequencies were checked with the configuration")));
            }
        }
        Self { segments, rope }
    }

    fn rope(&self, kind: LayerKind) -> &RopeTable {
        &self.rope.iter().find(|(k, _)| *k == kind).expect("a table for each layer kind").1
    }
}

/// One layer of the stack with its weights.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Shape of this layer.
    pub config: &'a LayerConfig,
    /// Query heads.
    pub heads: usize,
    /// RMS norm epsilon.
    pub eps: f64,
    /// Weights.
    pub weights: &'a LayerWeights,
    /// What its operations pass to each other.
    pub activations: DType,
}

impl Model {
    /// Embedded tokens `[N, H]`, times sqrt(H).
    pub fn embed(&self, ids: &[u32]) -> Tensor<2> {
        embedded(&self.embed, ids)
    }

    /// Layer `index`.
    pub fn layer(&self, index: usize) -> Layer<'_> {
        Layer {
            config: &self.config.layers[index],
            heads: self.config.heads,
            eps: self.config.rms_norm_eps,
            weights: &self.layers[index],
            activations: self.activations,
        }
    }

    /// The norm before the head, in the activations' dtype.
    pub fn final_norm(&self, h: Tensor<2>) -> Tensor<2> {
        rms_norm(h, Some(self.norm.clone()), self.config.rms_norm_eps, self.activations)
    }
}

/// What the queries of a layer, whose matrices are kept as `weights`, see in a micro-batch of these documents.
pub fn attention(layer: &LayerConfig, documents: &Segments, weights: DType) -> Attention {
    // The query norm carries the scale: scores are not divided by sqrt(head_dim).
    Attention { segments: documents.clone(), window: layer.window, scale: 1.0, operands: weights }
}

/// The rows of `embed` `[V, H]` for `ids`, times sqrt(H): `[N, H]`.
pub fn embedded(embed: &Tensor<2>, ids: &[u32]) -> Tensor<2> {
    let [_, hidden_size] = embed.dims();
    embedding(embed.clone(), ids, (hidden_size as f64).sqrt() as f32)
}

impl Layer<'_> {
    /// The residual stream `[N, H]` after this layer.
    pub fn forward(
        &self,
        h: Tensor<2>,
        adapters: &LayerAdapters,
        positions: &Positions,
        products: &mut Products,
    ) -> Tensor<2> {
        let h = self.attention_block(h, adapters, positions, products);
        self.feed_forward_block(h, adapters, products)
    }

    /// Attention and its residual.
    pub fn attention_block(
        &self,
        h: Tensor<2>,
        adapters: &LayerAdapters,
        positions: &Positions,
        products: &mut Products,
    ) -> Tensor<2> {
        let w = self.weights;
        let x = self.norm(h.clone(), &w.input_norm);
        let a = self.attention(x, adapters, positions, products);
        rms_norm_residual(a, w.post_attention_norm.clone(), self.eps, h, 1.0)
    }

    fn attention(
        &self,
        x: Tensor<2>,
        adapters: &LayerAdapters,
        positions: &Positions,
        products: &mut Products,
    ) -> Tensor<2> {
        let LayerConfig { head_dim, kv_heads, .. } = *self.config;
        let n = x.dims()[0];
        let table = positions.rope(self.config.kind);
        let mut project = |slot| self.linear(x.clone(), slot, adapters, products);
        let normed_and_rotated = |t: Tensor<2>, heads: usize, weight: &Tensor<1>| {
            rms_norm_rope(t.reshape([n, heads, head_dim]), weight.clone(), self.eps, table)
        };
        let q = normed_and_rotated(project(Slot::Q), self.heads, &self.weights.q_norm);
        let k_raw = project(Slot::K);
        // With k_eq_v the values are the raw projection: before the key norm and without rotation.
        let v_raw = if self.config.k_eq_v { k_raw.clone() } else { project(Slot::V) };
        let k = normed_and_rotated(k_raw, kv_heads, &self.weights.k_norm);
        let v = rms_norm(v_raw.reshape([n * kv_heads, head_dim]), None, self.eps, self.activations)
            .reshape([n, kv_heads, head_dim]);
        let attention = attention(self.config, &positions.segments, self.weights.matrix(Slot::O).dtype());
        let out = products.attention(q, k, v, &attention);
        self.linear(out.reshape([n, self.heads * head_dim]), Slot::O, adapters, products)
    }

    /// Dense MLP, experts, their residual and the layer's scalar.
    pub fn feed_forward_block(&self, h: Tensor<2>, adapters: &LayerAdapters, products: &mut Products) -> Tensor<2> {
        let w = self.weights;
        let x = self.norm(h.clone(), &w.pre_feedforward_norm);
        let gate = self.linear(x.clone(), Slot::Gate, adapters, products);
        let up = self.linear(x, Slot::Up, adapters, products);
        let dense = self.linear(geglu(gate, up), Slot::Down, adapters, products);
        let out = match (&w.moe, self.config.moe) {
            (Some(moe_weights), Some(moe)) => {
                let routing = self.route(h.clone(), moe_weights, moe.top_k);
                let x = self.norm(h.clone(), &moe_weights.pre_norm);
                let (gate_up, down) = (moe_weights.gate_up.clone(), moe_weights.down.clone());
                let sparse = match w.fp8_activations {
                    true => fp8::experts(x, &routing, gate_up, down),
                    false => products.experts(x, &routing, gate_up, down),
                };
                let dense = self.norm(dense, &moe_weights.post_dense_norm);
                rms_norm_residual(sparse, moe_weights.post_norm.clone(), self.eps, dense, 1.0)
            }
            _ => dense,
        };
        rms_norm_residual(out, w.post_feedforward_norm.clone(), self.eps, h, w.layer_scalar)
    }

    /// Expert choice for the residual stream after attention. The router reads the stream itself, not a normed copy.
    pub fn route(&self, h: Tensor<2>, moe: &MoeWeights, top_k: usize) -> Routing {
        let z = rms_norm(h, Some(moe.router_scale.clone()), self.eps, DType::F32);
        moe::route(lora_linear(z, moe.router.clone(), None), moe.per_expert_scale.clone(), top_k)
    }

    fn norm(&self, x: Tensor<2>, weight: &Tensor<1>) -> Tensor<2> {
        rms_norm(x, Some(weight.clone()), self.eps, self.activations)
    }

    fn linear(&self, x: Tensor<2>, slot: Slot, adapters: &LayerAdapters, products: &mut Products) -> Tensor<2> {
        let weight = self.weights.matrix(slot).clone();
        let x = if self.weights.fp8_activations { fp8::round_rows(x) } else { x };
        products.linear(slot, x, weight, adapters[slot as usize].as_ref())
    }
}
