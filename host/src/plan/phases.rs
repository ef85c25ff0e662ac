//! Memory of what a run does beside its steps, in closed form: held-out records evaluated, and a merged model written and judged.

use super::blocks::tensor_device_bytes;
use super::memory::Model;
use crate::config::Config;
use crate::corpus::Record;
use crate::export;
use crate::model::checkpoint::{Checkpoint, TensorEntry};
use crate::model::config::LayerConfig;
use crate::model::spec::ModelSpec;
use crate::train::evaluate::{batches, tokens_at_once};
use burn::tensor::DType;
use serde::Serialize;
use tunehost_kernels::{Runtime, cross_entropy};

const F32: usize = size_of::<f32>();
/// Copies of the logits at hand while two models are compared: those of either, and what their divergence goes through.
const LOGIT_COPIES: usize = 5;

/// Memory while held-out records are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Evaluation {
    /// Tokens of the largest batch.
    pub batch_tokens: usize,
    /// The frozen base.
    pub base_bytes: usize,
    /// Adapters and AdamW's two moments.
    pub adapters_adamw_bytes: usize,
    /// As in a step.
    pub checkpoint_snapshot_bytes: usize,
    /// The residual stream, and the larger of one layer and the loss head, without anything for a backward pass.
    pub forward_bytes: usize,
    /// As in a step.
    pub process_bytes: usize,
    /// As in a step.
    pub slack_bytes: usize,
    /// All of it.
    pub peak_bytes: usize,
}

/// Memory while a merged model is written and judged: the base and the optimiser are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Export {
    /// The adapters.
    pub adapters_bytes: usize,
    /// Adapters once more and the largest tensor on its way to the file: host memory, and in the peak where that is the device's.
    pub writing_bytes: usize,
    /// The residual streams of two models over the records that are judged at once.
    pub streams_bytes: usize,
    /// At most one of the next two lives at the peak: a layer, its weights with what it computes.
    pub layer_bytes: usize,
    /// The heads of two models, and copies of some rows' logits.
    pub heads_bytes: usize,
    /// As in a step.
    pub process_bytes: usize,
    /// As in a step.
    pub slack_bytes: usize,
    /// The larger of writing and judging.
    pub peak_bytes: usize,
}

/// What a run does beside its steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beside {
    /// Where records are held out.
    pub evaluation: Option<Evaluation>,
    /// Where a merged model is asked for.
    pub export: Option<Export>,
}

/// The highest of a run's peaks.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct RunPeak {
    /// Whose it is: `steps`, `evaluation`, `export`.
    pub of: &'static str,
    /// The peak.
    pub peak_bytes: usize,
    /// Whether it fits; null where the limit is not known.
    pub fits: Option<bool>,
}

impl Model<'_> {
    /// The peak of an evaluation of `records` in a run whose largest micro-batch has `largest_tokens`; none of no records.
    pub fn evaluation(&self, records: &[&Record], largest_tokens: usize) -> Option<Evaluation> {
        let most = tokens_at_once(largest_tokens);
        let batch_tokens = batches(records, most).map(tokens_of).max()?;
        let adapters_adamw_bytes = 3 * self.lora.parameters() * F32;
        let forward_bytes =
            self.rope_bytes(batch_tokens) + self.layer_forward(batch_tokens).max(self.head_forward(batch_tokens));
        let sum = self.process_bytes + self.base_bytes + adapters_adamw_bytes + self.snapshot_bytes() + forward_bytes;
        let slack_bytes = self.slack(sum);
        Some(Evaluation {
            batch_tokens,
            base_bytes: self.base_bytes,
            adapters_adamw_bytes,
            checkpoint_snapshot_bytes: self.snapshot_bytes(),
            forward_bytes,
            process_bytes: self.process_bytes,
            slack_bytes,
            peak_bytes: sum + slack_bytes,
        })
    }

    /// The peak of the export of a merged model that is judged on `records`.
    pub fn export(&self, config: &Config, spec: &ModelSpec, checkpoint: &Checkpoint, records: &[&Record]) -> Export {
        let adapters_bytes = self.lora.parameters() * F32;
        let entries = checkpoint.entries();
        let tensor = entries.values().map(TensorEntry::size_bytes).max().unwrap_or(0);
        // f32 values, and as they are stored.
        let merged = self.lora.modules.iter().filter_map(|module| {
            let entry = entries.get(&format!("{}.weight", module.path))?;
            Some(module.input * module.output * F32 + entry.size_bytes())
        });
        let writing_bytes = adapters_bytes + merged.max().unwrap_or(0).max(tensor);

        let (hidden, vocab) = (self.text.hidden_size, self.text.vocab_size);
        let most = export::tokens_at_once(checkpoint, hidden);
        let group_tokens = batches(records, most).map(tokens_of).max().unwrap_or(0);
        let record_tokens = records.iter().map(|record| record.tokens.len()).max().unwrap_or(0);
        let weight_bytes = |name: &str| tensor_device_bytes(spec, name, config.model.weights);
        let layer = |index: usize| -> usize {
            let prefix = format!("{}layers.{index}.", spec.prefix);
            spec.tensors.keys().filter(|name| name.starts_with(&prefix)).map(|name| weight_bytes(name)).sum()
        };
        let embedding = weight_bytes(&format!("{}embed_tokens.weight", spec.prefix));
        let layer = (0..self.text.layers.len()).map(layer).max().unwrap_or(0);
        let computed = self.rope_bytes(record_tokens) + self.in_f32().layer_forward(record_tokens);
        let rows = export::rows_at_once(vocab).min(record_tokens);
        let (streams_bytes, layer_bytes, heads_bytes) = match records.is_empty() {
            true => (0, 0, 0),
            false => (
                2 * group_tokens * hidden * F32,
                embedding.max(layer + computed),
                2 * embedding + rows * (hidden + LOGIT_COPIES * vocab) * F32,
            ),
        };
        let judging = streams_bytes + layer_bytes.max(heads_bytes);
        let sum = self.process_bytes
            + adapters_bytes
            + match self.runtime {
                Runtime::Cpu { .. } => judging.max(writing_bytes),
                Runtime::Cubecl { .. } => judging,
            };
        let slack_bytes = self.slack(sum);
        Export {
            adapters_bytes,
            writing_bytes,
            streams_bytes,
            layer_bytes,
            heads_bytes,
            process_bytes: self.process_bytes,
            slack_bytes,
            peak_bytes: sum + slack_bytes,
        }
    }

    /// The same with activations in f32, in which exports are judged.
    fn in_f32(&self) -> Self {
        let runtime = match self.runtime {
            Runtime::Cubecl { bf16, .. } => Runtime::Cubecl { bf16, activations: DType::F32 },
            cpu => cpu,
        };
        Self { runtime, ..*self }
    }

    /// What a forward pass of any layer takes at most for `n` tokens, the residual stream included: at attention, in the dense MLP or at
    /// the experts.
    fn layer_forward(&self, n: usize) -> usize {
        let (hidden, dense) = (self.text.hidden_size, self.text.intermediate_size);
        let of_layer = |layer: &LayerConfig| {
            let (q, kv) = (self.text.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
            let of = |passed_on, in_f32| self.bytes(n, passed_on, in_f32);
            // stream and its norm; queries, keys, values, result and log-sum-exp
            let attention = of(hidden + 2 * q + 2 * kv, hidden + self.text.heads) + self.attention_workspace(layer, n);
            // the stream; gate, up and their activation
            let dense_mlp = of(3 * dense, hidden);
            let experts = layer.moe.map_or(0, |moe| {
                // the stream, the dense half, what goes into the experts and what comes out
                of(3 * hidden, hidden + 2 * moe.top_k) + self.experts_workspace(moe, n)
            });
            attention.max(dense_mlp).max(experts)
        };
        self.text.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// What the loss head takes for `n` tokens without a gradient, its input included.
    fn head_forward(&self, n: usize) -> usize {
        let (hidden, vocab) = (self.text.hidden_size, self.text.vocab_size);
        let chunk = self.train.loss_chunk_rows.min(n);
        self.bytes(n, hidden, 0) + cross_entropy::workspace_bytes(self.runtime, chunk, hidden, vocab)
    }
}

fn tokens_of(records: &[&Record]) -> usize {
    records.iter().map(|record| record.tokens.len()).sum()
}
