//! The shape of a Gemma-4 text stack, read from a Hugging Face `config.json` in either of its two spellings.
//!
//! Published checkpoints name `global_head_dim` and `num_global_key_value_heads`; newer writers give the same as
//! `per_layer_config`, keyed by layer index. A field that the arithmetic needs and the file lacks is an error, never a default.

use crate::error::{Error, Result};
use serde_json::Value;
use std::path::Path;
use tunehost_kernels::rope::{RopeKind, RopeSpec};

/// Sliding-window or full attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerKind {
    /// A query sees itself and the `window - 1` keys before it.
    Sliding,
    /// A query sees every key before it.
    Full,
}

impl LayerKind {
    /// The word used in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sliding => "sliding",
            Self::Full => "full",
        }
    }
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts.
    pub experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Rows of an expert's gate (and of its up) projection.
    pub intermediate_size: usize,
}

/// One decoder layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// Attention kind.
    pub kind: LayerKind,
    /// Query and key head size.
    pub head_dim: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// One projection serves keys and values: there is no `v_proj`.
    pub k_eq_v: bool,
    /// Keys a query sees; `None` for all before it.
    pub window: Option<usize>,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// The experts beside the dense MLP, if any.
    pub moe: Option<MoeConfig>,
}

/// The text stack.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// First of `architectures`.
    pub architecture: String,
    /// Residual stream width H.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Dense MLP width.
    pub intermediate_size: usize,
    /// Query heads, the same in every layer.
    pub heads: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Logits are `cap * tanh(logits / cap)`.
    pub final_logit_softcapping: Option<f64>,
    /// The head is the embedding; otherwise the file has `lm_head.weight`.
    pub tied_head: bool,
    /// Beginning of sequence.
    pub bos_token_id: u32,
    /// End of sequence or of a turn; generation stops at any of them.
    pub eos_token_ids: Vec<u32>,
    /// Padding.
    pub pad_token_id: u32,
    /// The decoder layers.
    pub layers: Vec<LayerConfig>,
}

impl TextConfig {
    /// The layers whose attention has the same sizes and window: the first of each kind, and how many there are.
    pub fn attention_kinds(&self) -> Vec<(&LayerConfig, usize)> {
        let sizes = |layer: &LayerConfig| (layer.kind, layer.window, layer.kv_heads, layer.head_dim);
        let mut kinds: Vec<(&LayerConfig, usize)> = Vec::new();
        for layer in &self.layers {
            match kinds.iter_mut().find(|(known, _)| sizes(known) == sizes(layer)) {
                Some((_, layers)) => *layers += 1,
                None => kinds.push((layer, 1)),
            }
        }
        kinds
    }

    /// Reads `dir/config.json`; end-of-sequence ids also come from `dir/generation_config.json` where there is one.
    ///
    /// # Errors
    /// `model::not_found`, `model::bad_config` (with the field), `model::unsupported` (a feature of the architecture that
    /// this engine does not compute).
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let mut config = Self::parse(&read_json(&path)?).map_err(|e| e.help(format!("in {}", path.display())))?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let ids = token_ids(&read_json(&generation)?["eos_token_id"]);
            config.eos_token_ids.extend(ids);
            config.eos_token_ids.sort_unstable();
            config.eos_token_ids.dedup();
        }
        Ok(config)
    }

    /// Reads the parsed `config.json` of a text-only or a multimodal checkpoint.
    ///
    /// # Errors
    /// `model::bad_config`, `model::unsupported`.
    pub fn parse(root: &Value) -> Result<Self> {
        let text = match root.get("text_config") {
            Some(text) => text,
            None if root["model_type"] == "gemma4" => {
                return Err(bad("text_config", None, "the text model's fields in an object of that name"));
            }
            None => root,
        };
        refuse_unsupported(root, text)?;
        let fields = Fields(text);
        let count = fields.usize("num_hidden_layers")?;
        let kinds = layer_kinds(text, count)?;
        let moe = fields.moe()?;
        let layers = (0..count).map(|i| fields.layer(i, kinds[i], moe)).collect::<Result<Vec<_>>>()?;
        let mut eos_token_ids = token_ids(&text["eos_token_id"]);
        eos_token_ids.extend(token_ids(&root["eos_token_id"]));
        Ok(Self {
            architecture: root["architectures"][0].as_str().unwrap_or("Gemma4ForCausalLM").to_string(),
            hidden_size: fields.usize("hidden_size")?,
            vocab_size: fields.usize("vocab_size")?,
            intermediate_size: fields.usize("intermediate_size")?,
            heads: fields.usize("num_attention_heads")?,
            rms_norm_eps: fields.f64("rms_norm_eps")?,
            // null says that there is none; a file that does not say is not guessed at
            final_logit_softcapping: match text.get("final_logit_softcapping") {
                Some(Value::Null) => None,
                _ => Some(fields.f64("final_logit_softcapping")?),
            },
            tied_head: match Fields(root).optional_bool("tie_word_embeddings")? {
                Some(tied) => tied,
                None => fields.bool("tie_word_embeddings")?,
            },
            bos_token_id: token_ids(&text["bos_token_id"]).first().copied().unwrap_or(2),
            eos_token_ids,
            pad_token_id: token_ids(&text["pad_token_id"]).first().copied().unwrap_or(0),
            layers,
        })
    }
}

fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::new("model::not_found", format!("{} is missing", path.display()))
            .help("set `model.base` to a folder in Hugging Face layout"),
        _ => Error::io("read", path, e),
    })?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::new("model::bad_config", format!("{}: {e}", path.display())).expected("a JSON object"))
}

fn token_ids(v: &Value) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match v {
        Value::Array(ids) => ids.iter().filter_map(one).collect(),
        v => one(v).into_iter().collect(),
    }
}

fn bad(field: &str, found: Option<&Value>, expected: &str) -> Error {
    let message = match found {
        None | Some(Value::Null) => format!("config.json lacks `{field}`"),
        Some(v) => format!("config.json has `{field}` = {v}"),
    };
    Error::new("model::bad_config", message).expected(expected)
}

/// Features of the Gemma-4 family that change the arithmetic and are not computed here.
fn refuse_unsupported(root: &Value, text: &Value) -> Result<()> {
    let unsupported = |what: String, why: &str| Err(Error::new("model::unsupported", what).expected(why));
    match root["architectures"][0].as_str() {
        None | Some("Gemma4ForCausalLM" | "Gemma4ForConditionalGeneration") => {}
        Some(other) => {
            let known = "Gemma4ForCausalLM or Gemma4ForConditionalGeneration";
            return unsupported(format!("the checkpoint is of the architecture `{other}`"), known);
        }
    }
    match text.get("model_type").and_then(Value::as_str) {
        Some("gemma4_text") => {}
        Some(kind) => return unsupported(format!("the checkpoint is of the family `{kind}`"), "gemma4_text"),
        None => return Err(bad("model_type", text.get("model_type"), "gemma4_text")),
    }
    // The class default is 256: a missing key means that per-layer embeddings are on.
    match text.get("hidden_size_per_layer_input") {
        Some(Value::Null) => {}
        Some(v) if v.as_u64() == Some(0) => {}
        v => {
            let value = v.map_or("missing, which means 256".into(), Value::to_string);
            return unsupported(
                format!("`hidden_size_per_layer_input` is {value}: per-layer embeddings (E2B, E4B) are not supported"),
                "0",
            );
        }
    }
    let off = |field: &str| {
        text.get(field).is_none_or(|v| matches!(v, Value::Null | Value::Bool(false)) || v.as_f64() == Some(0.0))
    };
    for field in ["num_kv_shared_layers", "use_double_wide_mlp", "attention_bias", "attention_dropout"] {
        if !off(field) {
            return unsupported(format!("`{field}` is {}", text[field]), "0, false or absent");
        }
    }
    match text.get("hidden_activation").and_then(Value::as_str) {
        None | Some("gelu_pytorch_tanh") => {}
        Some(other) => return unsupported(format!("`hidden_activation` is {other}"), "gelu_pytorch_tanh"),
    }
    match text.get("use_bidirectional_attention").and_then(Value::as_str) {
        None | Some("vision") => Ok(()),
        Some(other) => {
            unsupported(format!("`use_bidirectional_attention` is {other}"), "null or vision: text is causal")
        }
    }
}

fn layer_kinds(text: &Value, count: usize) -> Result<Vec<LayerKind>> {
    let expected = format!("{count} of sliding_attention and full_attention, one for each layer");
    let list = text.get("layer_types").and_then(Value::as_array);
    let kinds: Option<Vec<LayerKind>> = list.map(|list| {
        list.iter()
            .filter_map(|v| match v.as_str() {
                Some("sliding_attention") => Some(LayerKind::Sliding),
                Some("full_attention") => Some(LayerKind::Full),
                _ => None,
            })
            .collect()
    });
    match kinds {
        Some(kinds) if kinds.len() == count && count > 0 => Ok(kinds),
        _ => Err(bad("layer_types", text.get("layer_types"), &expected)),
    }
}

struct Fields<'a>(&'a Value);

impl Fields<'_> {
    fn usize(&self, field: &str) -> Result<usize> {
        match self.0.get(field).and_then(Value::as_u64) {
            Some(v) if v > 0 && v < 1 << 32 => Ok(v as usize),
            _ => Err(bad(field, self.0.get(field), "a positive whole number")),
        }
    }

    fn f64(&self, field: &str) -> Result<f64> {
        let found = self.0.get(field);
        found.and_then(Value::as_f64).filter(|v| *v > 0.0).ok_or_else(|| bad(field, found, "a positive number"))
    }

    /// `None` where the field is absent or null; a value of another type is an error, since it would be read as absent.
    fn optional_bool(&self, field: &str) -> Result<Option<bool>> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            found => Err(bad(field, found, "true or false")),
        }
    }

    fn bool(&self, field: &str) -> Result<bool> {
        self.optional_bool(field)?.ok_or_else(|| bad(field, None, "true or false"))
    }

    fn moe(&self) -> Result<Option<MoeConfig>> {
        if !self.bool("enable_moe_block")? {
            return Ok(None);
        }
        let moe = MoeConfig {
            experts: self.usize("num_experts")?,
            top_k: self.usize("top_k_experts")?,
            intermediate_size: self.usize("moe_intermediate_size")?,
        };
        match moe.top_k <= moe.experts {
            true => Ok(Some(moe)),
            false => Err(bad("top_k_experts", self.0.get("top_k_experts"), "at most num_experts")),
        }
    }

    fn layer(&self, index: usize, kind: LayerKind, moe: Option<MoeConfig>) -> Result<LayerConfig> {
        let full = kind == LayerKind::Full;
        let k_eq_v = full && self.bool("attention_k_eq_v")?;
        let own = self.own_settings(index)?;
        let field = |name: &str, global: &str, use_global: bool| -> Result<usize> {
            if let Some(v) = own.and_then(|o| o.get(name)).and_then(Value::as_u64) {
                return Ok(v as usize);
            }
            match self.0.get(global).filter(|_| use_global) {
                // null says that it is as elsewhere; a file that has neither spelling is not guessed at
                None if use_global && self.0.get("per_layer_config").is_none() => Err(bad(
                    &format!("{global}` or `per_layer_config"),
                    None,
                    "the size in full layers in one of the two",
                )),
                None | Some(Value::Null) => self.usize(name),
                Some(_) => self.usize(global),
            }
        };
        let head_dim = field("head_dim", "global_head_dim", full)?;
        let kv_heads = field("num_key_value_heads", "num_global_key_value_heads", k_eq_v)?;
        let heads = self.usize("num_attention_heads")?;
        if head_dim % 2 != 0 || kv_heads == 0 || heads % kv_heads != 0 {
            return Err(Error::new(
                "model::bad_config",
                format!("layer {index} has head_dim {head_dim}, {heads} query heads and {kv_heads} key/value heads"),
            )
            .expected("an even head_dim, and query heads that are a multiple of the key/value heads"));
        }
        let window = match full {
            true => None,
            false => Some(self.usize("sliding_window")?),
        };
        Ok(LayerConfig { kind, head_dim, kv_heads, k_eq_v, window, rope: self.rope(kind, head_dim)?, moe })
    }

    /// The layer's entry in `per_layer_config`, whose keys are layer indices, some of them written with leading zeros.
    fn own_settings(&self, index: usize) -> Result<Option<&Value>> {
        let Some(entries) = self.0.get("per_layer_config").filter(|v| !v.is_null()) else { return Ok(None) };
        let entries =
            entries.as_object().ok_or_else(|| bad("per_layer_config", Some(entries), "an object by layer index"))?;
        let mut found = None;
        for (key, settings) in entries {
            let layer: usize = key.parse().map_err(|_| {
                Error::new("model::bad_config", format!("config.json has `per_layer_config.{key}`"))
                    .expected("layer indices as keys")
            })?;
            if layer == index {
                found = Some(settings);
            }
        }
        Ok(found)
    }

    fn rope(&self, kind: LayerKind, head_dim: usize) -> Result<RopeSpec> {
        let key = match kind {
            LayerKind::Sliding => "sliding_attention",
            LayerKind::Full => "full_attention",
        };
        let field = format!("rope_parameters.{key}");
        let rope = self.0.pointer(&format!("/rope_parameters/{key}"));
        let theta = rope.and_then(|r| r.get("rope_theta")).and_then(Value::as_f64);
        let Some((rope, theta)) = rope.zip(theta) else {
            return Err(bad(&field, rope, "{rope_type, rope_theta, ...}"));
        };
        let number = |name: &str| rope.get(name).and_then(Value::as_f64).unwrap_or(1.0);
        let kind = match rope.get("rope_type").and_then(Value::as_str) {
            None | Some("default") => RopeKind::Default,
            Some("proportional") => RopeKind::Proportional {
                partial_rotary_factor: number("partial_rotary_factor"),
                factor: number("factor"),
            },
            Some(other) => {
                return Err(Error::new("model::unsupported", format!("`{field}.rope_type` is {other}"))
                    .expected("default or proportional"));
            }
        };
        let spec = RopeSpec { head_dim, theta, kind };
        spec.frequencies().map_err(|e| Error::new("model::bad_config", format!("`{field}` in config.json: {e}")))?;
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::fixture;

    fn golden(name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(fixture("golden").join(name)).unwrap()).unwrap()
    }

    #[test]
    fn both_spellings_give_the_same_model() {
        let hub = TextConfig::parse(&golden("config_hub_style.json")).unwrap();
        let saved = TextConfig::parse(&golden("model/config.json")).unwrap();
        assert_eq!(hub, saved);
        let full = hub.layers[5];
        assert_eq!(
            (full.kind, full.head_dim, full.kv_heads, full.k_eq_v, full.window),
            (LayerKind::Full, 32, 1, true, None)
        );
        let mut padded = golden("model/config.json");
        let own = padded["text_config"]["per_layer_config"].as_object_mut().unwrap();
        let settings = own.remove("5").unwrap();
        own.insert("05".into(), settings);
        assert_eq!(TextConfig::parse(&padded).unwrap(), hub);
        padded["text_config"]["per_layer_config"]["last"] = serde_json::json!({});
        assert_eq!(TextConfig::parse(&padded).unwrap_err().code(), "model::bad_config");
        let near = hub.layers[0];
        assert_eq!(
            (near.kind, near.head_dim, near.kv_heads, near.k_eq_v, near.window),
            (LayerKind::Sliding, 16, 2, false, Some(16))
        );
        let kind = RopeKind::Proportional { partial_rotary_factor: 0.25, factor: 1.0 };
        assert_eq!(full.rope, RopeSpec { head_dim: 32, theta: 1e6, kind });
    }

    #[test]
    fn a_missing_or_wrong_field_is_named() {
        for field in [
            "model_type",
            "hidden_size",
            "vocab_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "global_head_dim",
            "num_global_key_value_heads",
            "sliding_window",
            "attention_k_eq_v",
            "enable_moe_block",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "rms_norm_eps",
            "final_logit_softcapping",
            "tie_word_embeddings",
            "layer_types",
            "rope_parameters",
        ] {
            let mut v = golden("config_hub_style.json");
            v.as_object_mut().unwrap().remove("tie_word_embeddings");
            v["text_config"].as_object_mut().unwrap().remove(field);
            let e = TextConfig::parse(&v).unwrap_err();
            assert_eq!(e.code(), "model::bad_config", "{field}");
            assert!(e.message().contains(field), "{e}");
        }
        for field in ["final_logit_softcapping", "attention_k_eq_v", "enable_moe_block", "tie_word_embeddings"] {
            let mut v = golden("config_hub_style.json");
            v.as_object_mut().unwrap().remove("tie_word_embeddings");
            v["text_config"][field] = "30".into();
            let e = TextConfig::parse(&v).unwrap_err();
            assert!(e.code() == "model::bad_config" && e.message().contains(field), "{e}");
        }
        let mut v = golden("config_hub_style.json");
        v["text_config"]["top_k_experts"] = 9.into();
        assert!(TextConfig::parse(&v).unwrap_err().to_string().contains("top_k_experts"));
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (field, value) in [
            ("hidden_size_per_layer_input", Value::from(256)),
            ("num_kv_shared_layers", 2.into()),
            ("use_double_wide_mlp", true.into()),
            ("hidden_activation", "silu".into()),
            ("use_bidirectional_attention", "all".into()),
            ("model_type", "llama".into()),
        ] {
            let mut v = golden("config_hub_style.json");
            v["text_config"][field] = value;
            let e = TextConfig::parse(&v).unwrap_err();
            assert_eq!(e.code(), "model::unsupported", "{field}");
        }
        let mut v = serde_json::json!({"model_type": "gemma4", "hidden_size": 64});
        assert!(TextConfig::parse(&v).unwrap_err().message().contains("text_config"));
        v = golden("config_hub_style.json");
        v["architectures"] = serde_json::json!(["LlamaForCausalLM"]);
        let e = TextConfig::parse(&v).unwrap_err();
        assert!(e.code() == "model::unsupported" && e.message().contains("LlamaForCausalLM"), "{e}");
        let mut v = golden("config_hub_style.json");
        v["text_config"].as_object_mut().unwrap().remove("hidden_size_per_layer_input");
        assert_eq!(TextConfig::parse(&v).unwrap_err().code(), "model::unsupported");
        v["text_config"]["hidden_size_per_layer_input"] = Value::Null;
        assert!(TextConfig::parse(&v).is_ok());
    }
}
