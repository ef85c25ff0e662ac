//! Memory of a training step in closed form: what lives at the moments at which most does.
//!
//! The engine recomputes one layer at a time (`train/engine.rs`), so there are three such moments: the loss head above all
//! layers, and in each layer's backward pass its feed-forward half and its attention half. What a kernel takes beside its
//! inputs and results it tells itself (`workspace_bytes`); everything else is a tensor of the layer.

use super::blocks::device_bytes;
use crate::config::{Config, Recompute, RecomputeGranularity, RecomputeWord, TrainConfig, WeightDtype};
use crate::model::config::{LayerConfig, MoeConfig, TextConfig};
use crate::model::lora::LoraPlan;
use crate::model::spec::{ModelSpec, Slot};
use crate::run::machine::resident_bytes;
use serde::{Deserialize, Serialize};
use tunehost_kernels::attention::{self, Heads};
use tunehost_kernels::{Runtime, cross_entropy, linear, memory, moe};

const F32: usize = size_of::<f32>();
/// Bytes of a logit where a loss is computed from full logits: bf16 logits, their f32 copy, the values before the softcap that
/// autodiff keeps, and the softmax that becomes the gradient.
const NAIVE_LOGIT_BYTES: usize = 2 + 4 + 4 + 4;
/// What computing adds to the memory of a process that has only planned: pages of the program, stacks of threads and what they
/// freed. An assumption, for a CPU.
pub const COMPUTING_BYTES: usize = 7 << 20;

/// A micro-batch whose rows are all full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Rows.
    pub micro_batch: usize,
    /// Tokens of each.
    pub seq_len_tokens: usize,
}

impl Shape {
    /// Tokens in all.
    pub fn tokens(self) -> usize {
        self.micro_batch * self.seq_len_tokens
    }
}

/// Bytes at the peak of a step, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The frozen base.
    pub base_bytes: usize,
    /// Adapters, the sum of their gradients, and AdamW's two moments; what lies between tensors, less than 512 bytes each, is not counted.
    pub adapters_gradients_adamw_bytes: usize,
    /// Adapters and moments once more, while a checkpoint is written beside the training; where the device's memory is the host's, with
    /// the bytes of its files.
    pub checkpoint_snapshot_bytes: usize,
    /// The residual stream before each layer as it is kept, and the tables of the rotary embedding.
    pub layer_inputs_bytes: usize,
    /// What the layers keep beside their inputs: products (selective), or the whole graph (no recompute).
    pub kept_bytes: usize,
    /// At most one of the next three lives at the peak: a layer while its attention is pulled back.
    pub attention_bytes: usize,
    /// A layer while its dense MLP and its experts are pulled back.
    pub feed_forward_bytes: usize,
    /// The loss head.
    pub loss_head_bytes: usize,
    /// Logits of the whole micro-batch.
    pub naive_logits: usize,
    /// Their bytes with their copies, if the loss head did not go by chunks; in no sum.
    pub naive_loss_head_bytes: usize,
    /// Program, plugins, tokenizer and corpus, where they share the device's memory: measured of the process that plans, and
    /// [`COMPUTING_BYTES`].
    pub process_bytes: usize,
    /// What the allocator holds beside what was asked for ([`Model::slack_share`]).
    pub slack_bytes: usize,
    /// The highest sum of parts that live at once, slack included.
    pub peak_bytes: usize,
}

/// What the memory of a step depends on, but for the shape of the micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Model<'a> {
    /// Shape of the base.
    pub text: &'a TextConfig,
    /// The adapters.
    pub lora: &'a LoraPlan,
    /// Recompute and loss chunk.
    pub train: &'a TrainConfig,
    /// Bytes of the base on the device.
    pub base_bytes: usize,
    /// Memory that the process holds before the base is read, where it shares the device's.
    pub process_bytes: usize,
    /// Whose kernels compute.
    pub runtime: Runtime,
    /// Whether the adapters drop out.
    pub dropout: bool,
}

impl<'a> Model<'a> {
    /// The model of a run of `config`. What this process uses by now, a run uses too before it reads its base: where they share
    /// memory it is counted. What it has freed, such as that of encoding a corpus, a run uses for its steps.
    pub fn new(config: &'a Config, text: &'a TextConfig, spec: &ModelSpec, lora: &'a LoraPlan) -> Self {
        memory::give_back();
        Self {
            text,
            lora,
            train: &config.train,
            base_bytes: device_bytes(spec, config.model.weights),
            process_bytes: match &*config.model.device {
                "cpu" => resident_bytes().unwrap_or(0) + COMPUTING_BYTES,
                _ => 0,
            },
            runtime: match &*config.model.device {
                "cpu" => Runtime::Cpu { threads: rayon::current_num_threads() },
                _ => Runtime::Cubecl {
                    bf16: config.model.weights == WeightDtype::Bf16,
                    activations: config.train.activations.dtype(),
                },
            },
            dropout: config.lora.dropout > 0.0,
        }
    }
}

impl Model<'_> {
    /// Bytes of a value that operations pass to each other.
    pub(super) fn activation_bytes(&self) -> usize {
        match self.runtime {
            Runtime::Cpu { .. } => F32,
            Runtime::Cubecl { activations, .. } => activations.size(),
        }
    }

    /// Bytes of `n` rows, each of so many values that operations pass to each other and so many in f32.
    pub(super) fn bytes(&self, n: usize, passed_on: usize, in_f32: usize) -> usize {
        n * (passed_on * self.activation_bytes() + in_f32 * F32)
    }

    /// Layers, from the first, that are recomputed.
    pub fn recomputed_layers(&self) -> usize {
        match self.train.recompute {
            Recompute::Word(RecomputeWord::All) => self.text.layers.len(),
            Recompute::Word(RecomputeWord::None) => 0,
            Recompute::Layers(n) => n.min(self.text.layers.len()),
        }
    }

    /// The lowest adapted layer: nothing below it is pulled back.
    pub fn lowest_layer(&self) -> usize {
        self.lora.modules.iter().map(|module| module.layer).min().unwrap_or(0)
    }

    /// The peak of a step whose largest micro-batch has this shape and trains every token.
    pub fn memory(&self, shape: Shape) -> Memory {
        let (n, hidden) = (shape.tokens(), self.text.hidden_size);
        let stream = n * hidden * F32;
        let normed = self.bytes(n, hidden, 0);
        let kept_stream = n * hidden * self.train.residuals.size_bytes();
        let adapters = self.lora.parameters() * F32;
        let fixed = self.process_bytes + self.base_bytes + 4 * adapters + self.snapshot_bytes();
        let tables = self.rope_bytes(n);

        let chunk = self.train.loss_chunk_rows.min(n);
        // the last stream, its norm, their gradients; the chunk's logits and its gathered rows
        let loss_head =
            2 * stream + 2 * normed + cross_entropy::workspace_bytes(self.runtime, chunk, hidden, self.text.vocab_size);

        let (mut inputs, mut kept) = (tables, 0);
        // (sum, inputs, kept) at the worst moment so far, and the largest layer
        // What is kept in bf16 is widened for the layer that runs.
        let widened = if kept_stream == stream { 0 } else { stream };
        let mut worst = (0, 0, 0);
        let (mut attention_most, mut feed_forward_most) = (0, 0);
        for (index, layer) in self.text.layers.iter().enumerate().skip(self.lowest_layer()) {
            let graph = self.graph(index, layer, n);
            let recomputed = index < self.recomputed_layers();
            inputs += if recomputed { kept_stream } else { stream };
            // What the layer itself kept becomes part of its graph.
            let attention = widened + graph.attention + self.attention_gradients(layer, n);
            let feed_forward =
                widened + graph.attention + graph.feed_forward + self.feed_forward_gradients(index, layer, n);
            let sum = inputs + kept + attention.max(feed_forward);
            if sum > worst.0 {
                worst = (sum, inputs, kept);
            }
            attention_most = attention_most.max(attention);
            feed_forward_most = feed_forward_most.max(feed_forward);
            kept += match (recomputed, self.train.recompute_granularity) {
                (true, RecomputeGranularity::Full) => 0,
                (true, RecomputeGranularity::Selective) => graph.products,
                (false, _) => graph.attention + graph.feed_forward,
            };
        }
        let at_loss = inputs + kept + loss_head;
        if at_loss > worst.0 {
            worst = (at_loss, inputs, kept);
        }
        let slack = self.slack(fixed + worst.0);
        Memory {
            base_bytes: self.base_bytes,
            adapters_gradients_adamw_bytes: 4 * adapters,
            checkpoint_snapshot_bytes: self.snapshot_bytes(),
            layer_inputs_bytes: worst.1,
            kept_bytes: worst.2,
            attention_bytes: attention_most,
            feed_forward_bytes: feed_forward_most,
            loss_head_bytes: loss_head,
            naive_logits: n * self.text.vocab_size,
            naive_loss_head_bytes: n * self.text.vocab_size * NAIVE_LOGIT_BYTES,
            process_bytes: self.process_bytes,
            slack_bytes: slack,
            peak_bytes: fixed + worst.0 + slack,
        }
    }

    /// Share of what is allocated that the allocator holds beside it: an assumption.
    pub fn slack_share(&self) -> f64 {
        match self.runtime {
            Runtime::Cpu { .. } => 0.02,
            Runtime::Cubecl { .. } => 0.05,
        }
    }

    /// What the allocator is assumed to hold beside `bytes`.
    pub(super) fn slack(&self, bytes: usize) -> usize {
        (bytes as f64 * self.slack_share()) as usize
    }

    /// What a checkpoint on its way takes: adapters and moments, and in the host's memory the bytes of its files.
    pub(super) fn snapshot_bytes(&self) -> usize {
        let copies = if matches!(self.runtime, Runtime::Cpu { .. }) { 3 + 3 } else { 3 };
        copies * self.lora.parameters() * F32
    }

    /// Cosines and sines for each kind of layer.
    pub(super) fn rope_bytes(&self, n: usize) -> usize {
        let mut heads: Vec<_> = self.text.layers.iter().map(|layer| (layer.kind, layer.head_dim)).collect();
        heads.sort_unstable();
        heads.dedup();
        heads.iter().map(|(_, dim)| n * dim * F32).sum()
    }

    fn adapted(&self, index: usize, slots: &[Slot]) -> bool {
        self.lora.modules.iter().any(|module| module.layer == index && slots.contains(&module.slot))
    }

    /// What autodiff holds of a layer, beside its input.
    fn graph(&self, index: usize, layer: &LayerConfig, n: usize) -> Graph {
        let (hidden, dense) = (self.text.hidden_size, self.text.intermediate_size);
        let (q, kv) = (self.text.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
        let rank = |slots: &[Slot]| {
            let of = self.lora.modules.iter().filter(|m| m.layer == index && slots.contains(&m.slot));
            of.count() * self.lora.rank
        };
        let (attention_slots, dense_slots) = (&Slot::ALL[..4], &Slot::ALL[4..]);
        let projections = q + if layer.k_eq_v { kv } else { 2 * kv } + hidden;
        let of = |passed_on, in_f32| self.bytes(n, passed_on, in_f32);
        // their result and log-sum-exp with them
        let attention_products = of(projections + q + rank(attention_slots), self.text.heads);
        let dense_products = of(2 * dense + hidden + rank(dense_slots), 0);
        let sparse_products = if layer.moe.is_some() { of(hidden, 0) } else { 0 };

        // What a linear layer multiplied is kept for the gradient of its adapter alone.
        let normed = if self.adapted(index, &[Slot::Q, Slot::K, Slot::V]) { hidden } else { 0 };
        // normed and rotated queries, keys, values; the stream after attention
        let attention = attention_products + of(normed + q + 2 * kv, hidden);
        let normed = if self.adapted(index, &[Slot::Gate, Slot::Up]) { hidden } else { 0 };
        let activation = if self.adapted(index, &[Slot::Down]) { dense } else { 0 };
        // what goes into the experts, the router's logits and choice, the sum of dense and sparse
        let sparse = layer.moe.map_or(0, |moe| of(2 * hidden, moe.experts + 2 * moe.top_k));
        let feed_forward = dense_products + sparse_products + of(normed + activation, hidden) + sparse;
        Graph { attention, feed_forward, products: attention_products + dense_products + sparse_products }
    }

    /// What is there beside the graph of the attention half while attention itself is pulled back: gradients and workspace.
    fn attention_gradients(&self, layer: &LayerConfig, n: usize) -> usize {
        let (q, kv) = (self.text.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
        let (hidden, activation) = (self.text.hidden_size, self.activation_bytes());
        // The layer's output, its gradient and that of the residual are there; what came after attention is used up, its
        // projection and the stream behind it. The gradients of result and queries, of keys and values.
        let stream = 2 * hidden * F32 - hidden * activation;
        n * (stream + (2 * q + 2 * kv) * activation) + self.attention_workspace(layer, n)
    }

    pub(super) fn attention_workspace(&self, layer: &LayerConfig, n: usize) -> usize {
        let heads = Heads { query: self.text.heads, kv: layer.kv_heads, dim: layer.head_dim };
        attention::workspace_bytes(self.runtime, n, heads)
    }

    pub(super) fn experts_workspace(&self, moe: MoeConfig, n: usize) -> usize {
        let shape = moe::Shape {
            tokens: n,
            top_k: moe.top_k,
            experts: moe.experts,
            hidden: self.text.hidden_size,
            intermediate: moe.intermediate_size,
        };
        moe::workspace_bytes(self.runtime, &shape)
    }

    /// What is there beside the graph of the whole layer at the worst moment of the feed-forward half, which goes from the sum
    /// of dense and sparse to the experts and the last dense product, then to the activation.
    fn feed_forward_gradients(&self, index: usize, layer: &LayerConfig, n: usize) -> usize {
        let (hidden, dense, passed_on) = (self.text.hidden_size, self.text.intermediate_size, self.activation_bytes());
        let rank = if self.adapted(index, &Slot::ALL[4..]) { self.lora.rank } else { 0 };
        let activation = if self.adapted(index, &[Slot::Down]) { dense } else { 0 };
        // of activation, gate and up, once the activation itself is used up
        let of_dense = 3 * dense - activation;
        let dense_workspace =
            linear::workspace_bytes(self.runtime, n, hidden.max(dense), hidden.max(dense), rank, self.dropout);
        let Some(moe) = layer.moe else {
            // the gradients of the layer's output and of the residual; the last dense product is used up
            return n * (2 * hidden * F32 - hidden * passed_on + of_dense * passed_on) + dense_workspace;
        };
        // While the experts are pulled back: gradients of the layer's output, of the residual, of both halves of the sum and of
        // what went into the experts; the sum and both halves are used up. At the activation, what went into the experts is
        // too, and its gradient is the only one left of the halves.
        let at_experts = n * (2 * hidden + moe.top_k) * F32 + self.experts_workspace(moe, n);
        let at_activation = n * (2 * hidden * F32 + of_dense * passed_on) + dense_workspace;
        let at_activation = at_activation.saturating_sub(3 * n * hidden * passed_on);
        at_experts.max(at_activation)
    }
}

/// Bytes of one layer's graph.
struct Graph {
    attention: usize,
    feed_forward: usize,
    /// Outputs of matrix products and of attention: a part of both.
    products: usize,
}
