//! The adapter alone, as PEFT writes and reads it: its settings and its float32 tensors.

use serde::{Deserialize, Serialize};
use tunehost_plugin_sdk::{Dtype, ExportPlan, Exporter, Plugin, Source, Tuned};

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

/// `adapter_config.json`. A setting that PEFT has beside these is at its default.
#[derive(Serialize)]
struct AdapterConfig<'a> {
    base_model_name_or_path: &'a str,
    bias: &'a str,
    fan_in_fan_out: bool,
    inference_mode: bool,
    init_lora_weights: bool,
    lora_alpha: f64,
    lora_dropout: f64,
    modules_to_save: Option<&'a [&'a str]>,
    peft_type: &'a str,
    r: u32,
    target_modules: &'a str,
    task_type: &'a str,
    use_dora: bool,
    use_rslora: bool,
}

impl<'a> AdapterConfig<'a> {
    fn new(tuned: &'a Tuned) -> Self {
        Self {
            base_model_name_or_path: &tuned.base_path,
            bias: "none",
            fan_in_fan_out: false,
            inference_mode: true,
            init_lora_weights: true,
            lora_alpha: tuned.alpha,
            lora_dropout: tuned.dropout,
            modules_to_save: None,
            peft_type: "LORA",
            r: tuned.rank,
            target_modules: &tuned.modules_regex,
            task_type: "CAUSAL_LM",
            use_dora: false,
            use_rslora: tuned.rslora,
        }
    }
}

struct PeftAdapter;

impl Plugin for PeftAdapter {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Exporter for PeftAdapter {
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String> {
        let config = serde_json::to_string_pretty(&AdapterConfig::new(&tuned)).map_err(|error| error.to_string())?;
        let tensors = 2 * tuned.modules.len();
        let mut plan = ExportPlan {
            names: Vec::with_capacity(tensors),
            sources: Vec::with_capacity(tensors),
            indices: Vec::with_capacity(tensors),
            dtypes: vec![Dtype::Unchanged; tensors],
            strengths: vec![1.0; tensors],
            tensor_files: vec!["adapter_model.safetensors".into()],
            tensor_file_ends: vec![tensors as u32],
            text_files: vec!["adapter_config.json".into()],
            texts: vec![config + "\n"],
            copied_files: Vec::new(),
            quantized: Vec::new(),
        };
        for (module, path) in tuned.modules.iter().enumerate() {
            for (which, source) in [("lora_A", Source::LoraA), ("lora_B", Source::LoraB)] {
                plan.names.push(format!("base_model.model.{path}.{which}.weight"));
                plan.sources.push(source);
                plan.indices.push(module as u32);
            }
        }
        Ok(plan)
    }
}

tunehost_plugin_sdk::export_exporter!(PeftAdapter);

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned() -> Tuned {
        Tuned {
            base_tensors: vec!["model.layers.0.self_attn.q_proj.weight".into(), "model.norm.weight".into()],
            base_dtypes: vec!["BF16".into(), "BF16".into()],
            base_dims: vec![8, 4, 4],
            base_dim_ends: vec![2, 3],
            base_config: "{}".into(),
            base_path: "/models/a \"quoted\" one".into(),
            modules: vec!["model.layers.0.self_attn.q_proj".into(), "model.layers.0.mlp.up_proj".into()],
            module_tensors: vec![0, 0],
            modules_regex: r"model\.layers\.\d+\.(self_attn\.(q_proj)|mlp\.(up_proj))".into(),
            rank: 16,
            alpha: 32.0,
            rslora: false,
            dropout: 0.05,
            chat_template: None,
        }
    }

    #[test]
    fn the_settings_are_spelt_as_ever() {
        let plan = PeftAdapter.plan(tuned()).unwrap();
        assert_eq!(plan.text_files, ["adapter_config.json"]);
        assert_eq!(
            plan.texts,
            [r#"{
  "base_model_name_or_path": "/models/a \"quoted\" one",
  "bias": "none",
  "fan_in_fan_out": false,
  "inference_mode": true,
  "init_lora_weights": true,
  "lora_alpha": 32.0,
  "lora_dropout": 0.05,
  "modules_to_save": null,
  "peft_type": "LORA",
  "r": 16,
  "target_modules": "model\\.layers\\.\\d+\\.(self_attn\\.(q_proj)|mlp\\.(up_proj))",
  "task_type": "CAUSAL_LM",
  "use_dora": false,
  "use_rslora": false
}
"#]
        );
    }

    #[test]
    fn each_module_gives_its_a_and_its_b() {
        let plan = PeftAdapter.plan(tuned()).unwrap();
        let q = "base_model.model.model.layers.0.self_attn.q_proj";
        let up = "base_model.model.model.layers.0.mlp.up_proj";
        let names = [q, up].map(|path| ["lora_A", "lora_B"].map(|which| format!("{path}.{which}.weight")));
        assert_eq!(plan.names, names.as_flattened());
        assert_eq!(plan.sources, [Source::LoraA, Source::LoraB, Source::LoraA, Source::LoraB]);
        assert_eq!(plan.indices, [0, 0, 1, 1]);
        assert_eq!(plan.dtypes, [Dtype::Unchanged; 4]);
        assert_eq!(plan.strengths, [1.0; 4]);
        assert_eq!(plan.tensor_files, ["adapter_model.safetensors"]);
        assert_eq!(plan.tensor_file_ends, [4]);
        assert!(plan.copied_files.is_empty());
    }
}
