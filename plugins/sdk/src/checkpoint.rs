//! A merged model in Hugging Face's layout: weights in shards with their index, and the files that a server wants beside them.

use crate::{Dtype, ExportPlan, QuantizedModule, Scheme, Source, Tuned};
use serde_json::{Map, Value, json};

/// What a server reads beside the weights and `config.json`, copied where the base has it.
const COMPANIONS: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
];
const CONFIG: &str = "config.json";
const TEMPLATE: &str = "chat_template.jinja";
const INDEX: &str = "model.safetensors.index.json";

/// A part of the checkpoint, of one base tensor.
pub enum Part {
    /// The tensor under its own name, with the updates of its modules.
    Tensor(u32, Dtype),
    /// Rows of it as a quantised module; `file` is set by [`ExportPlan::checkpoint`].
    Quantized(QuantizedModule),
}

impl Tuned {
    /// The dimensions of a base tensor.
    pub fn dims(&self, tensor: usize) -> &[u64] {
        let start = if tensor == 0 { 0 } else { self.base_dim_ends[tensor - 1] as usize };
        &self.base_dims[start..self.base_dim_ends[tensor] as usize]
    }

    /// Whether each base tensor has an update.
    pub fn adapted(&self) -> Vec<bool> {
        let mut adapted = vec![false; self.base_tensors.len()];
        self.module_tensors.iter().for_each(|&tensor| adapted[tensor as usize] = true);
        adapted
    }

    /// Whether a base tensor is stored as numbers that can be rounded to another float.
    pub fn is_float(&self, tensor: usize) -> bool {
        matches!(self.base_dtypes[tensor].as_str(), "F32" | "BF16" | "F16")
    }

    /// The fields of the base's `config.json`.
    ///
    /// # Errors
    /// Where it is no JSON object.
    pub fn config(&self) -> Result<Map<String, Value>, String> {
        match serde_json::from_str(&self.base_config).map_err(|e| format!("config.json: {e}"))? {
            Value::Object(fields) => Ok(fields),
            _ => Err("config.json is not an object".into()),
        }
    }

    /// The text of `config.json`, with `dtype` wherever it says how the weights are stored.
    ///
    /// # Errors
    /// Where the base's is no JSON object.
    pub fn config_stored_as(&self, dtype: &str) -> Result<String, String> {
        let mut fields = self.config()?;
        if !fields.contains_key("torch_dtype") {
            fields.insert("dtype".into(), dtype.into());
        }
        let mut config = Value::Object(fields);
        set_dtypes(&mut config, dtype);
        Ok(format!("{config:#}\n"))
    }

    fn bytes(&self, part: &Part) -> u64 {
        match part {
            Part::Tensor(tensor, dtype) => {
                let tensor = *tensor as usize;
                let element = match dtype {
                    Dtype::Float32 => 4,
                    Dtype::Bfloat16 | Dtype::Float16 => 2,
                    // No other dtype is one of a safetensors file.
                    _ => stored_bytes(&self.base_dtypes[tensor]),
                };
                self.dims(tensor).iter().product::<u64>() * element
            }
            Part::Quantized(module) => {
                let width = self.dims(module.base_tensor as usize).last().copied().unwrap_or(0);
                // A row, and what the module has besides: its shape, or the scale of its scales.
                let (row, once) = match module.scheme {
                    Scheme::Fp8 => (width + 2, 0),
                    Scheme::Int4 => (width / 2 + width / u64::from(module.group_size) * 2, 16),
                    Scheme::Nvfp4 => (width / 2 + width / 16, 4),
                };
                module.rows * row + once
            }
        }
    }
}

fn set_dtypes(config: &mut Value, dtype: &str) {
    for (key, value) in config.as_object_mut().into_iter().flatten() {
        match value {
            Value::String(stored) if key == "dtype" || key == "torch_dtype" => *stored = dtype.into(),
            part => set_dtypes(part, dtype),
        }
    }
}

fn stored_bytes(dtype: &str) -> u64 {
    let digits: String = dtype.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse::<u64>().unwrap_or(8).div_ceil(8)
}

fn names(tuned: &Tuned, part: &Part) -> Vec<String> {
    match part {
        Part::Tensor(tensor, _) => vec![tuned.base_tensors[*tensor as usize].clone()],
        Part::Quantized(module) => {
            let suffixes: &[&str] = match module.scheme {
                Scheme::Fp8 => &["weight", "weight_scale"],
                Scheme::Int4 => &["weight_packed", "weight_scale", "weight_shape"],
                Scheme::Nvfp4 => &["weight_packed", "weight_scale", "weight_global_scale"],
            };
            suffixes.iter().map(|suffix| format!("{}.{suffix}", module.path)).collect()
        }
    }
}

impl ExportPlan {
    /// A plan of nothing.
    pub fn empty() -> Self {
        Self {
            names: vec![],
            sources: vec![],
            indices: vec![],
            dtypes: vec![],
            strengths: vec![],
            constants: vec![],
            constant_ends: vec![],
            tensor_files: vec![],
            tensor_file_ends: vec![],
            gguf_metadata: vec![],
            quantized: vec![],
            text_files: vec![],
            texts: vec![],
            copied_files: vec![],
            notes: vec![],
        }
    }

    /// One more tensor, of the file that is next to end.
    pub fn add_tensor(&mut self, name: String, source: Source, index: u32, dtype: Dtype) {
        self.names.push(name);
        self.sources.push(source);
        self.indices.push(index);
        self.dtypes.push(dtype);
        self.strengths.push(1.0);
    }

    /// The tensors since the last file are those of the file `name`.
    pub fn end_file(&mut self, name: String) {
        self.tensor_files.push(name);
        self.tensor_file_ends.push(self.names.len() as u32);
    }

    /// The chat template that was trained with, or the base's.
    pub fn add_template(&mut self, tuned: &Tuned) {
        match &tuned.chat_template {
            Some(template) => self.add_text(TEMPLATE, template.clone()),
            None => self.copied_files.push(TEMPLATE.into()),
        }
    }

    /// `parts` in shards of at most `max_shard_bytes`, or one part; `config` is the text of `config.json`, copied from the base
    /// where it is none. With the chat template that was trained with, or the base's.
    pub fn checkpoint(tuned: &Tuned, parts: Vec<Part>, max_shard_bytes: u64, config: Option<String>) -> Self {
        let mut shards: Vec<Vec<Part>> = vec![];
        let (mut filled, mut total) = (0, 0);
        for part in parts {
            let bytes = tuned.bytes(&part);
            if shards.is_empty() || (filled > 0 && filled + bytes > max_shard_bytes) {
                shards.push(vec![]);
                filled = 0;
            }
            filled += bytes;
            total += bytes;
            shards.last_mut().expect("pushed above").push(part);
        }
        let mut plan = Self { copied_files: COMPANIONS.map(String::from).into(), ..Self::empty() };
        let (count, adapted) = (shards.len(), tuned.adapted());
        let mut weight_map = Map::new();
        for (at, shard) in shards.into_iter().enumerate() {
            let file = match count {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
            };
            for part in shard {
                weight_map.extend(names(tuned, &part).into_iter().map(|name| (name, Value::from(file.as_str()))));
                match part {
                    Part::Quantized(module) => plan.quantized.push(QuantizedModule { file: at as u32, ..module }),
                    Part::Tensor(tensor, dtype) => {
                        let source = if adapted[tensor as usize] { Source::Merged } else { Source::Base };
                        plan.add_tensor(tuned.base_tensors[tensor as usize].clone(), source, tensor, dtype);
                    }
                }
            }
            plan.end_file(file);
        }
        if count > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            plan.add_text(INDEX, format!("{index:#}\n"));
        }
        match config {
            Some(text) => plan.add_text(CONFIG, text),
            None => plan.copied_files.push(CONFIG.into()),
        }
        plan.add_template(tuned);
        plan
    }

    fn add_text(&mut self, name: &str, text: String) {
        self.text_files.push(name.into());
        self.texts.push(text);
    }
}
