//! The base with the update merged in, its linear layers and experts quantised, in the layout of compressed-tensors.
//!
//! Experts leave the fused tensors of training one by one, as servers load them. Head, embeddings, router, norms and every
//! tower stay as they are.

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tunehost_plugin_sdk::{Dtype, ExportPlan, Exporter, Part, Plugin, QuantizedModule, Scheme, Tuned};

/// As Hugging Face's `save_pretrained` cuts by default.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Divides 704 and 2,112, the widths of Gemma-4 26B-A4B that 128 does not.
const INT4_GROUP: u32 = 64;
const NVFP4_GROUP: u32 = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    scheme: Named,
    #[serde(default = "int4_group")]
    group_size: u32,
    #[serde(default = "shard_bytes")]
    max_shard_size: u64,
}

fn int4_group() -> u32 {
    INT4_GROUP
}

fn shard_bytes() -> u64 {
    SHARD_BYTES
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Named {
    #[default]
    #[serde(alias = "FP8")]
    Fp8,
    #[serde(alias = "W4A16")]
    W4a16,
    #[serde(alias = "NVFP4A16")]
    Nvfp4a16,
}

struct MergeThenQuantize(Config);

impl Plugin for MergeThenQuantize {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {
        "scheme": {"enum": ["fp8", "w4a16", "nvfp4a16", "FP8", "W4A16", "NVFP4A16"], "default": "fp8", "description": "fp8: E4M3 with a scale for each row, activations rounded to E4M3 as they come; w4a16: 4-bit integers in groups; nvfp4a16: 4-bit floats in groups of 16"},
        "group_size": {"type": "integer", "minimum": 8, "multipleOf": 8, "default": 64, "description": "Columns of a group of w4a16"},
        "max_shard_size": {"type": "integer", "minimum": 1, "default": 5000000000, "description": "Bytes of tensors in a file; a larger tensor has one of its own"}}}"#;

    fn new(config: Config) -> Result<Self, String> {
        if config.max_shard_size == 0 {
            return Err("max_shard_size is 0, and must be at least 1 byte".into());
        }
        if config.group_size == 0 || !config.group_size.is_multiple_of(8) {
            return Err(format!("group_size is {}, and must be a multiple of 8", config.group_size));
        }
        Ok(Self(config))
    }
}

/// Modules of a layer that a server multiplies with at once share a scale: the last parts of their paths.
const FUSED: [&[&str]; 4] = [&["q_proj", "k_proj", "v_proj"], &["o_proj"], &["gate_proj", "up_proj"], &["down_proj"]];

/// What a base tensor is in a layer of the text stack.
enum Role {
    /// A linear module, `<layer>.self_attn.q_proj.weight` and so on: the layer's path, and the row of [`FUSED`].
    Linear(usize),
    /// The experts' gate and up rows, `[E, 2I, H]`.
    GateUp,
    /// The experts' down rows, `[E, H, I]`.
    Down,
}

/// The path of the tensor's layer, and what it is there; `None` for what stays as it is.
fn role(name: &str) -> Option<(&str, Role)> {
    let text = name.strip_prefix("model.language_model.layers.").or_else(|| name.strip_prefix("model.layers."))?;
    let (number, part) = text.split_once('.')?;
    number.parse::<u32>().ok()?;
    let layer = &name[..name.len() - part.len() - 1];
    let part = part.strip_suffix(".weight").unwrap_or(part);
    let role = match part.split_once('.')? {
        ("experts", "gate_up_proj") => Role::GateUp,
        ("experts", "down_proj") => Role::Down,
        ("self_attn" | "mlp", module) => Role::Linear(FUSED.iter().position(|names| names.contains(&module))?),
        _ => return None,
    };
    Some((layer, role))
}

impl MergeThenQuantize {
    fn scheme(&self) -> (Scheme, u32) {
        match self.0.scheme {
            Named::Fp8 => (Scheme::Fp8, 0),
            Named::W4a16 => (Scheme::Int4, self.0.group_size),
            Named::Nvfp4a16 => (Scheme::Nvfp4, NVFP4_GROUP),
        }
    }

    /// The quantised modules of a base tensor; `None` for what stays as it is.
    fn modules(
        &self,
        tuned: &Tuned,
        tensor: usize,
        shared: &mut Shared,
    ) -> Result<Option<Vec<QuantizedModule>>, String> {
        let name = &tuned.base_tensors[tensor];
        let Some((layer, role)) = role(name) else { return Ok(None) };
        let (scheme, group_size) = self.scheme();
        let dims = tuned.dims(tensor);
        let width = dims.last().copied().unwrap_or(0);
        if group_size > 0 && !width.is_multiple_of(u64::from(group_size)) {
            return Err(format!(
                "{name} is {width} columns wide, which groups of {group_size} do not divide; a module left unquantised is \
                 refused by servers: choose a group_size that divides every width, or another scheme"
            ));
        }
        let module = |path: String, first_row, rows, shared_scale| QuantizedModule {
            path,
            base_tensor: tensor as u32,
            first_row,
            rows,
            scheme,
            group_size,
            shared_scale,
            file: 0,
        };
        Ok(Some(match (role, dims) {
            (Role::Linear(fused), [rows, _]) => {
                let path = name.strip_suffix(".weight").unwrap_or(name).to_string();
                vec![module(path, 0, *rows, shared.number(layer, fused as u64))]
            }
            (Role::GateUp, [experts, rows, _]) => {
                let half = rows / 2;
                let halves = (0..*experts).flat_map(|e| [(e, "gate_proj", 0), (e, "up_proj", half)]);
                halves
                    .map(|(e, which, start)| {
                        let scale = shared.number(layer, FUSED.len() as u64 + 2 * e);
                        module(format!("{layer}.experts.{e}.{which}"), e * rows + start, half, scale)
                    })
                    .collect()
            }
            (Role::Down, [experts, rows, _]) => (0..*experts)
                .map(|e| {
                    let scale = shared.number(layer, FUSED.len() as u64 + 2 * e + 1);
                    module(format!("{layer}.experts.{e}.down_proj"), e * rows, *rows, scale)
                })
                .collect(),
            _ => return Err(format!("{name} has the shape {dims:?}, which no linear layer or fused experts have")),
        }))
    }

    fn quantization_config(&self, modules: &[String]) -> Value {
        let (format, weights, activations) = match self.0.scheme {
            Named::Fp8 => (
                "float-quantized",
                weights(8, "float", "channel", None),
                json!({
                    "num_bits": 8, "type": "float", "strategy": "token", "symmetric": true, "dynamic": true,
                }),
            ),
            Named::W4a16 => ("pack-quantized", weights(4, "int", "group", Some(self.0.group_size)), Value::Null),
            Named::Nvfp4a16 => {
                ("nvfp4-pack-quantized", weights(4, "float", "tensor_group", Some(NVFP4_GROUP)), Value::Null)
            }
        };
        json!({
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": format,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": null}},
            "ignore": modules,
        })
    }
}

fn weights(num_bits: u32, kind: &str, strategy: &str, group_size: Option<u32>) -> Value {
    json!({
        "num_bits": num_bits, "type": kind, "strategy": strategy, "group_size": group_size, "symmetric": true, "dynamic": false,
    })
}

/// Numbers the groups of modules that share a scale, by layer and place in it.
#[derive(Default)]
struct Shared(BTreeMap<(String, u64), u32>);

impl Shared {
    fn number(&mut self, layer: &str, place: u64) -> u32 {
        let next = self.0.len() as u32;
        *self.0.entry((layer.into(), place)).or_insert(next)
    }
}

impl Exporter for MergeThenQuantize {
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String> {
        let mut fields = tuned.config()?;
        if fields.contains_key("quantization_config") {
            return Err("the base is quantised already: export from the base that was quantised".into());
        }
        let (mut parts, mut shared, mut kept) = (Vec::new(), Shared::default(), Vec::new());
        for tensor in 0..tuned.base_tensors.len() {
            match self.modules(&tuned, tensor, &mut shared)? {
                Some(modules) => parts.extend(modules.into_iter().map(Part::Quantized)),
                None => {
                    parts.push(Part::Tensor(tensor as u32, Dtype::Unchanged));
                    // Whatever else may be a linear module to a server is named, so that it expects no scales of it.
                    let name = &tuned.base_tensors[tensor];
                    kept.extend(
                        name.strip_suffix(".weight").filter(|_| tuned.dims(tensor).len() == 2).map(String::from),
                    );
                }
            }
        }
        if !kept.iter().any(|name| name == "lm_head") {
            kept.push("lm_head".into());
        }
        fields.insert("quantization_config".into(), self.quantization_config(&kept));
        let config = format!("{:#}\n", Value::Object(fields));
        Ok(ExportPlan::checkpoint(&tuned, parts, self.0.max_shard_size, Some(config)))
    }
}

tunehost_plugin_sdk::export_exporter!(MergeThenQuantize);

#[cfg(test)]
mod tests;
