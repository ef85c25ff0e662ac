//! Which type each tensor is stored as: the rule of llama.cpp's quantiser for the mixture `Q4_K_M`, and what it falls back to
//! where blocks do not divide a row.

use crate::FileType;
use tunehost_plugin_sdk::Dtype;

/// What the rule looks at.
pub struct Model {
    /// Layers.
    pub layers: u64,
    /// Experts of a layer; 0 where there are none.
    pub experts: u64,
    /// The head is not the embedding.
    pub own_head: bool,
    /// Layers that have a projection of values of their own, rising.
    pub attn_v: Vec<u64>,
}

/// What a tensor is stored as, and what the rule asked for before its width was looked at.
#[derive(Debug, PartialEq)]
pub struct Stored {
    pub wanted: Dtype,
    pub dtype: Dtype,
}

/// The layers with a tensor `attn_v`.
pub fn attn_v(named: &[(usize, String)]) -> Vec<u64> {
    let mut layers: Vec<u64> =
        named.iter().filter(|(_, name)| name.ends_with(".attn_v.weight")).filter_map(|(_, name)| layer(name)).collect();
    layers.sort_unstable();
    layers
}

fn layer(name: &str) -> Option<u64> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// As ggml calls it.
pub fn label(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Unchanged => "unchanged",
        Dtype::Float32 => "F32",
        Dtype::Bfloat16 => "BF16",
        Dtype::Float16 => "F16",
        Dtype::Q80 => "Q8_0",
        Dtype::Q50 => "Q5_0",
        Dtype::Q51 => "Q5_1",
        Dtype::Q4K => "Q4_K",
        Dtype::Q5K => "Q5_K",
        Dtype::Q6K => "Q6_K",
    }
}

fn block_values(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Q80 | Dtype::Q50 | Dtype::Q51 => 32,
        Dtype::Q4K | Dtype::Q5K | Dtype::Q6K => 256,
        _ => 1,
    }
}

impl Model {
    /// How the tensor `name` with rows of `width` values is stored.
    pub fn stored(&self, file_type: FileType, name: &str, dims: usize, width: u64) -> Stored {
        // Norms, scales and the router, which llama.cpp computes with in f32.
        if dims < 2 || !name.ends_with(".weight") || name.contains("_norm") || name.contains("ffn_gate_inp") {
            return Stored { wanted: Dtype::Float32, dtype: Dtype::Float32 };
        }
        let wanted = match file_type {
            FileType::Bf16 => Dtype::Bfloat16,
            FileType::Q8_0 => Dtype::Q80,
            FileType::Q4KM => self.q4_k_m(name),
        };
        Stored { wanted, dtype: fit(wanted, width) }
    }

    fn q4_k_m(&self, name: &str) -> Dtype {
        let part = name.rsplit('.').nth(1).unwrap_or_default();
        let more =
            |at: Option<u64>, of: u64| if at.is_some_and(|at| more_bits(at, of)) { Dtype::Q6K } else { Dtype::Q4K };
        let few_experts = self.experts == 8;
        match part {
            "output" => Dtype::Q6K,
            "token_embd" if !self.own_head => Dtype::Q6K,
            // With eight experts attention is a small part of the file.
            "attn_v" | "attn_k" if few_experts => Dtype::Q80,
            "attn_output" if few_experts => Dtype::Q5K,
            "attn_v" => {
                let at = self.attn_v.iter().position(|layer_of| Some(*layer_of) == layer(name));
                more(at.map(|at| at as u64), self.attn_v.len() as u64)
            }
            "ffn_down" | "ffn_down_exps" => more(layer(name), self.layers),
            _ => Dtype::Q4K,
        }
    }
}

/// The first and the last eighth of the layers, and every third between.
fn more_bits(at: u64, of: u64) -> bool {
    at < of / 8 || at >= 7 * of / 8 || (at - of / 8) % 3 == 2
}

/// `wanted`, or what stands in for it where its blocks do not divide a row.
fn fit(wanted: Dtype, width: u64) -> Dtype {
    let divides = |dtype| width.is_multiple_of(block_values(dtype));
    let second = match wanted {
        Dtype::Q4K => Dtype::Q50,
        Dtype::Q5K => Dtype::Q51,
        Dtype::Q6K => Dtype::Q80,
        other => other,
    };
    [wanted, second].into_iter().find(|dtype| divides(*dtype)).unwrap_or(Dtype::Float16)
}
