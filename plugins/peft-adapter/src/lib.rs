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
        let mut plan = ExportPlan {
            text_files: vec!["adapter_config.json".into()],
            texts: vec![config + "\n"],
            notes: notes(&tuned),
            ..ExportPlan::empty()
        };
        for (module, path) in tuned.modules.iter().enumerate() {
            for (which, source) in [("lora_A", Source::LoraA), ("lora_B", Source::LoraB)] {
                let name = format!("base_model.model.{path}.{which}.weight");
                plan.add_tensor(name, source, module as u32, Dtype::Unchanged);
            }
        }
        plan.end_file("adapter_model.safetensors".into());
        Ok(plan)
    }
}

/// What is known of servers: a LoRA on a model with experts is refused, whichever modules it adapts.
fn notes(tuned: &Tuned) -> Vec<String> {
    match tuned.base_tensors.iter().any(|name| name.contains(".experts.")) {
        false => Vec::new(),
        true => vec![
            "vLLM is known to refuse a LoRA on Gemma 4 with experts (\"To support LoRA for MoE model, 'get_expert_mapping' \
             must be implemented\"), and its version 0.24.0 to load one over an NVFP4 base and answer as the base does: \
             serve merge-bf16 or merge-then-quantize there"
                .into(),
        ],
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
            weight_norms: vec![],
            update_norms: vec![],
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
    fn a_model_with_experts_comes_with_what_servers_make_of_it() {
        assert!(PeftAdapter.plan(tuned()).unwrap().notes.is_empty());
        let mut with_experts = tuned();
        with_experts.base_tensors[1] = "model.layers.0.experts.down_proj".into();
        let notes = PeftAdapter.plan(with_experts).unwrap().notes;
        assert!(notes[0].starts_with("vLLM is known to refuse"), "{notes:?}");
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
