//! The metadata that llama.cpp reads of a Gemma 4 text model, from the base's `config.json` in either of its spellings.

use crate::FileType;
use serde_json::Value;
use tunehost_plugin_sdk::{GgufEntry, GgufValue};

/// Divides a rotary frequency to next to nothing: the pair does not turn.
const STANDS_STILL: f32 = 1e30;

/// The text model's part of `config.json`.
pub struct Text {
    fields: Value,
    /// The head is the embedding.
    pub tied_head: bool,
    /// Experts of a layer; 0 where there are none.
    pub experts: u64,
    sliding: Vec<bool>,
    /// Index of a full-attention layer.
    full: usize,
}

impl Text {
    /// Reads the text of `config.json`.
    pub fn read(config: &str) -> Result<Self, String> {
        let config: Value = serde_json::from_str(config).map_err(|e| format!("config.json: {e}"))?;
        let kind = config["model_type"].as_str().unwrap_or_default();
        if !matches!(kind, "gemma4" | "gemma4_text") {
            return Err(format!("config.json says model_type {kind:?}: only Gemma 4 is laid out for llama.cpp here"));
        }
        let fields = if config["text_config"].is_object() { config["text_config"].clone() } else { config.clone() };
        if [&fields["hidden_size_per_layer_input"], &fields["num_kv_shared_layers"]]
            .iter()
            .any(|v| v.as_u64().unwrap_or(0) > 0)
        {
            return Err("models with per-layer embeddings or shared keys and values are not laid out here".into());
        }
        let kinds = fields["layer_types"].as_array().ok_or("config.json has no layer_types")?;
        let sliding: Vec<bool> = kinds.iter().map(|kind| kind == "sliding_attention").collect();
        let full = sliding.iter().position(|sliding| !sliding).ok_or("config.json has no layer with full attention")?;
        let tied = |from: &Value| from["tie_word_embeddings"].as_bool();
        let tied_head = tied(&config).or(tied(&fields)).unwrap_or(true);
        let has_experts = fields["enable_moe_block"].as_bool().unwrap_or(false);
        let experts = if has_experts { fields["num_experts"].as_u64().unwrap_or(0) } else { 0 };
        let text = Self { fields, tied_head, experts, sliding, full };
        // What the file cannot do without is found missing now, not in the middle.
        text.required()?;
        Ok(text)
    }

    /// Layers.
    pub fn layers(&self) -> u64 {
        self.sliding.len() as u64
    }

    fn number(&self, key: &str) -> Result<u64, String> {
        self.fields[key].as_u64().ok_or_else(|| format!("config.json has no {key}"))
    }

    fn required(&self) -> Result<(), String> {
        for key in [
            "max_position_embeddings",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "sliding_window",
            "head_dim",
        ] {
            self.number(key)?;
        }
        if self.experts > 0 {
            self.number("top_k_experts")?;
            self.number("moe_intermediate_size")?;
        }
        for kind in ["sliding_attention", "full_attention"] {
            self.rope(kind, "rope_theta")
                .ok_or_else(|| format!("config.json has no rope_parameters.{kind}.rope_theta"))?;
        }
        match self.fields["rope_parameters"]["full_attention"]["rope_type"].as_str() {
            Some("proportional") => Ok(()),
            other => {
                Err(format!("full attention has the rope_type {other:?}, where llama.cpp expects \"proportional\""))
            }
        }
    }

    fn rope(&self, kind: &str, key: &str) -> Option<f64> {
        self.fields["rope_parameters"][kind][key].as_f64()
    }

    fn own(&self, layer: usize, key: &str) -> Option<u64> {
        self.fields["per_layer_config"][layer.to_string()][key].as_u64()
    }

    fn head_dim(&self, layer: usize) -> u64 {
        let global = || self.fields["global_head_dim"].as_u64().filter(|_| !self.sliding[layer]);
        self.own(layer, "head_dim").or_else(global).or_else(|| self.fields["head_dim"].as_u64()).unwrap_or(0)
    }

    fn kv_heads(&self, layer: usize) -> u32 {
        let global = || self.fields["num_global_key_value_heads"].as_u64().filter(|_| !self.sliding[layer]);
        let heads = self.own(layer, "num_key_value_heads").or_else(global);
        heads.or_else(|| self.fields["num_key_value_heads"].as_u64()).unwrap_or(0) as u32
    }

    /// What the frequencies of full-attention layers are divided by: of half a head's pairs, the first part turns.
    pub fn rope_factors(&self) -> Vec<f32> {
        let pairs = self.head_dim(self.full) / 2;
        let part = self.rope("full_attention", "partial_rotary_factor").unwrap_or(1.0);
        let turning = (part * pairs as f64) as u64;
        (0..pairs).map(|pair| if pair < turning { 1.0 } else { STANDS_STILL }).collect()
    }

    /// All entries but those of the vocabulary, which tunehost adds.
    pub fn entries(&self, file_type: FileType, name: &str) -> Vec<GgufEntry> {
        use GgufValue::{Count, Counts, Real, Text, Truth, Truths};
        let number = |key: &str| Count(self.fields[key].as_u64().unwrap_or(0) as u32);
        let real = |value: Option<f64>| Real(value.unwrap_or(0.0) as f32);
        let sliding = self.sliding.iter().position(|sliding| *sliding).unwrap_or(self.full);
        let [full_dim, sliding_dim] = [self.full, sliding].map(|layer| Count(self.head_dim(layer) as u32));
        let kv_heads = (0..self.sliding.len()).map(|layer| self.kv_heads(layer)).collect();
        let llama_file_type = match file_type {
            FileType::Bf16 => 32,
            FileType::Q8_0 => 7,
            FileType::Q4KM => 15,
        };
        let mut entries = vec![
            ("general.architecture", Text("gemma4".into())),
            ("general.type", Text("model".into())),
            ("general.name", Text(name.into())),
            ("general.file_type", Count(llama_file_type)),
            ("general.quantization_version", Count(2)),
            ("gemma4.context_length", number("max_position_embeddings")),
            ("gemma4.embedding_length", number("hidden_size")),
            ("gemma4.embedding_length_per_layer_input", Count(0)),
            ("gemma4.block_count", Count(self.layers() as u32)),
            ("gemma4.feed_forward_length", number("intermediate_size")),
            ("gemma4.attention.head_count", number("num_attention_heads")),
            ("gemma4.attention.head_count_kv", Counts(kv_heads)),
            ("gemma4.attention.layer_norm_rms_epsilon", real(self.fields["rms_norm_eps"].as_f64())),
            ("gemma4.attention.key_length", full_dim.clone()),
            ("gemma4.attention.value_length", full_dim.clone()),
            ("gemma4.attention.key_length_swa", sliding_dim.clone()),
            ("gemma4.attention.value_length_swa", sliding_dim.clone()),
            ("gemma4.attention.sliding_window", number("sliding_window")),
            ("gemma4.attention.sliding_window_pattern", Truths(self.sliding.clone())),
            ("gemma4.attention.shared_kv_layers", Count(0)),
            ("gemma4.rope.freq_base", real(self.rope("full_attention", "rope_theta"))),
            ("gemma4.rope.freq_base_swa", real(self.rope("sliding_attention", "rope_theta"))),
            // The factors, not the count, say which pairs of full attention turn.
            ("gemma4.rope.dimension_count", full_dim),
            ("gemma4.rope.dimension_count_swa", sliding_dim),
            ("tokenizer.ggml.model", Text("gemma4".into())),
            ("tokenizer.ggml.add_bos_token", Truth(true)),
            ("tokenizer.ggml.add_space_prefix", Truth(false)),
        ];
        if let Some(cap) = self.fields["final_logit_softcapping"].as_f64() {
            entries.push(("gemma4.final_logit_softcapping", Real(cap as f32)));
        }
        if self.experts > 0 {
            entries.push(("gemma4.expert_count", Count(self.experts as u32)));
            entries.push(("gemma4.expert_used_count", number("top_k_experts")));
            entries.push(("gemma4.expert_feed_forward_length", number("moe_intermediate_size")));
        }
        entries.into_iter().map(|(key, value)| GgufEntry { key: key.into(), value }).collect()
    }
}
