//! The merged text model as a GGUF file, with the names, metadata and types that llama.cpp gives Gemma 4.
//!
//! Vision and audio towers are left to the base's own multimodal projector file, which a LoRA on the text stack does not change.

mod metadata;
mod names;
mod types;

use serde::Deserialize;
use std::collections::BTreeMap;
use tunehost_plugin_sdk::{Dtype, ExportPlan, Exporter, GgufEntry, GgufValue, Plugin, Source, Tuned};
use types::Model;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default, rename = "type")]
    file_type: FileType,
    #[serde(default = "tuned_name")]
    name: String,
}

fn tuned_name() -> String {
    "tuned".into()
}

/// What most weights are stored as.
#[derive(Deserialize, Default, Clone, Copy, PartialEq, Debug)]
#[serde(rename_all = "lowercase")]
enum FileType {
    #[serde(alias = "BF16")]
    Bf16,
    #[serde(rename = "q8_0", alias = "Q8_0")]
    Q8_0,
    #[default]
    #[serde(rename = "q4_k_m", alias = "Q4_K_M")]
    Q4KM,
}

impl FileType {
    /// As files are called after it.
    fn label(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4KM => "Q4_K_M",
        }
    }
}

struct Gguf(Config);

impl Plugin for Gguf {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {
        "type": {"enum": ["bf16", "q8_0", "q4_k_m", "BF16", "Q8_0", "Q4_K_M"], "default": "q4_k_m", "description": "How most weights are stored; rows that a type's blocks do not divide take llama.cpp's fallback type, which is printed"},
        "name": {"type": "string", "default": "tuned", "description": "What the file calls the model, general.name"}}}"#;

    fn new(config: Config) -> Result<Self, String> {
        Ok(Self(config))
    }
}

/// Files that tunehost itself reads beside the weights.
const COMPANIONS: [&str; 4] = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];

impl Exporter for Gguf {
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String> {
        let file_type = self.0.file_type;
        let text = metadata::Text::read(&tuned.base_config)?;
        let adapted = tuned.adapted();
        let factors = text.rope_factors();
        let mut metadata = text.entries(file_type, &self.0.name);
        let template = tuned.chat_template.iter().map(|template| GgufEntry {
            key: "tokenizer.chat_template".into(),
            value: GgufValue::Text(template.clone()),
        });
        metadata.extend(template);
        let mut plan = ExportPlan {
            constant_ends: vec![factors.len() as u32],
            constants: factors,
            gguf_metadata: metadata,
            copied_files: COMPANIONS.map(String::from).into(),
            ..ExportPlan::empty()
        };
        let named: Vec<(usize, String)> = (0..tuned.base_tensors.len())
            .filter(|&tensor| !(text.tied_head && tuned.base_tensors[tensor] == "lm_head.weight"))
            .filter_map(|tensor| Some((tensor, gguf_name(&tuned.base_tensors[tensor])?)))
            .collect();
        let model = Model {
            layers: text.layers(),
            experts: text.experts,
            own_head: !text.tied_head,
            attn_v: types::attn_v(&named),
        };
        let (mut counts, mut fallbacks) = (BTreeMap::<&str, usize>::new(), BTreeMap::<_, usize>::new());
        for (tensor, name) in named {
            let dims = tuned.dims(tensor);
            let width = dims.last().copied().unwrap_or(1);
            let stored = model.stored(file_type, &name, dims.len(), width);
            if stored.wanted != stored.dtype {
                *fallbacks.entry((types::label(stored.wanted), types::label(stored.dtype), width)).or_default() += 1;
            }
            *counts.entry(types::label(stored.dtype)).or_default() += 1;
            let source = if adapted[tensor] { Source::Merged } else { Source::Base };
            plan.add_tensor(name, source, tensor as u32, stored.dtype);
        }
        plan.add_tensor(names::ROPE_FACTORS.into(), Source::Constant, 0, Dtype::Float32);
        plan.end_file(format!("model-{}.gguf", file_type.label()));
        plan.add_template(&tuned);
        let counted: Vec<String> = counts.iter().map(|(label, count)| format!("{count} {label}")).collect();
        plan.notes.push(format!("tensors by type: {}", counted.join(", ")));
        plan.notes.extend(fallbacks.into_iter().map(|((wanted, dtype, width), count)| {
            format!("{dtype} for {wanted}, whose blocks do not divide rows of {width} values: {}", tensors(count))
        }));
        let towers = tuned.base_tensors.iter().filter(|name| is_tower(name)).count();
        if towers > 0 {
            let left = tensors(towers);
            plan.notes
                .push(format!("other towers than text are not in the file, {left}: use the base's own mmproj file"));
        }
        Ok(plan)
    }
}

fn tensors(count: usize) -> String {
    format!("{count} tensor{}", if count == 1 { "" } else { "s" })
}

/// The name in a GGUF file; none for what a text model has not.
fn gguf_name(name: &str) -> Option<String> {
    let in_table = |table: &[(&str, &str)], part: &str| {
        table.iter().find(|(theirs, _)| *theirs == part).map(|(_, ours)| ours.to_string())
    };
    let text = name.strip_prefix("model.language_model.").or_else(|| name.strip_prefix("model.")).unwrap_or(name);
    let Some(layer) = text.strip_prefix("layers.") else { return in_table(&names::TOP, text) };
    let (layer, part) = layer.split_once('.')?;
    Some(format!("blk.{}.{}", layer.parse::<u32>().ok()?, in_table(&names::LAYER, part)?))
}

/// Whether the tensor belongs to another tower than the text model.
fn is_tower(name: &str) -> bool {
    gguf_name(name).is_none() && name.starts_with("model.") && !name.starts_with("model.language_model.")
}

tunehost_plugin_sdk::export_exporter!(Gguf);

#[cfg(test)]
mod tests;
