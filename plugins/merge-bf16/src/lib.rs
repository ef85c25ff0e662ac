//! The base with the update merged in, as a server loads it: W + scale B A, every other tensor byte for byte.

use serde::Deserialize;
use tunehost_plugin_sdk::{Dtype, ExportPlan, Exporter, Part, Plugin, Tuned};

/// As Hugging Face's `save_pretrained` cuts by default.
const SHARD_BYTES: u64 = 5_000_000_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default = "shard_bytes")]
    max_shard_size: u64,
    #[serde(default)]
    dtype: Stored,
}

fn shard_bytes() -> u64 {
    SHARD_BYTES
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Stored {
    #[default]
    Unchanged,
    Bfloat16,
    Float16,
    Float32,
}

struct MergeBf16(Config);

impl Plugin for MergeBf16 {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {
        "max_shard_size": {"type": "integer", "minimum": 1, "default": 5000000000, "description": "Bytes of tensors in a file; a larger tensor has one of its own"},
        "dtype": {"enum": ["unchanged", "bfloat16", "float16", "float32"], "default": "unchanged", "description": "How every floating-point tensor is stored; unchanged is as in the base"}}}"#;

    fn new(config: Config) -> Result<Self, String> {
        match config.max_shard_size {
            0 => Err("max_shard_size is 0, and must be at least 1 byte".into()),
            _ => Ok(Self(config)),
        }
    }
}

impl Exporter for MergeBf16 {
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String> {
        let (dtype, name) = match self.0.dtype {
            Stored::Unchanged => (Dtype::Unchanged, None),
            Stored::Bfloat16 => (Dtype::Bfloat16, Some("bfloat16")),
            Stored::Float16 => (Dtype::Float16, Some("float16")),
            Stored::Float32 => (Dtype::Float32, Some("float32")),
        };
        let config = name.map(|name| tuned.config_stored_as(name)).transpose()?;
        let parts = (0..tuned.base_tensors.len()).map(|tensor| {
            let dtype = if tuned.is_float(tensor) { dtype } else { Dtype::Unchanged };
            Part::Tensor(tensor as u32, dtype)
        });
        let parts = parts.collect();
        Ok(ExportPlan::checkpoint(&tuned, parts, self.0.max_shard_size, config))
    }
}

tunehost_plugin_sdk::export_exporter!(MergeBf16);

#[cfg(test)]
mod tests {
    use super::*;
    use tunehost_plugin_sdk::Source;

    fn tuned() -> Tuned {
        Tuned {
            base_tensors: ["a.weight", "b.weight", "c.ids"].map(String::from).into(),
            base_dtypes: ["BF16", "F32", "I64"].map(String::from).into(),
            base_dims: vec![8, 4, 4, 6],
            base_dim_ends: vec![2, 3, 4],
            base_config: "{}".into(),
            base_path: "/base".into(),
            modules: vec!["a".into()],
            module_tensors: vec![0],
            modules_regex: "a".into(),
            rank: 2,
            alpha: 4.0,
            rslora: false,
            dropout: 0.0,
            weight_norms: vec![],
            update_norms: vec![],
            chat_template: Some("{{ messages }}".into()),
        }
    }

    fn plan(config: &str) -> ExportPlan {
        MergeBf16(serde_json::from_str(config).unwrap()).plan(tuned()).unwrap()
    }

    #[test]
    fn what_fits_is_one_file_without_an_index() {
        let plan = plan("{}");
        assert_eq!(plan.names, ["a.weight", "b.weight", "c.ids"]);
        assert_eq!(plan.sources, [Source::Merged, Source::Base, Source::Base]);
        assert_eq!(plan.dtypes, [Dtype::Unchanged; 3]);
        assert_eq!(plan.tensor_files, ["model.safetensors"]);
        assert_eq!(plan.text_files, ["chat_template.jinja"]);
        for name in ["config.json", "tokenizer.json", "tokenizer.model", "added_tokens.json"] {
            assert!(plan.copied_files.iter().any(|copied| copied == name), "{name}");
        }
    }

    #[test]
    fn the_configuration_says_how_weights_are_stored() {
        let mut tuned = tuned();
        tuned.base_config = r#"{"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "layers": 2}}"#.into();
        let plan = MergeBf16(serde_json::from_str(r#"{"dtype": "float32"}"#).unwrap()).plan(tuned).unwrap();
        let at = plan.text_files.iter().position(|name| name == "config.json").unwrap();
        let config: serde_json::Value = serde_json::from_str(&plan.texts[at]).unwrap();
        assert_eq!(config["dtype"], "float32");
        assert_eq!(config["text_config"], serde_json::json!({"dtype": "float32", "layers": 2}));
    }

    #[test]
    fn shards_are_listed_in_an_index() {
        // 64, 16 and 48 bytes.
        let plan = plan(r#"{"max_shard_size": 70}"#);
        assert_eq!(plan.tensor_file_ends, [1, 3]);
        let index: serde_json::Value = serde_json::from_str(&plan.texts[0]).unwrap();
        assert_eq!(index["metadata"]["total_size"], 128);
        assert_eq!(index["weight_map"]["c.ids"], "model-00002-of-00002.safetensors");
    }

    #[test]
    fn integers_keep_their_dtype() {
        assert_eq!(plan(r#"{"dtype": "float16"}"#).dtypes, [Dtype::Float16, Dtype::Float16, Dtype::Unchanged]);
    }
}
