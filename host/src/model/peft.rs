//! Adapter folders as PEFT writes and reads them: `adapter_config.json` and `adapter_model.safetensors`.

use super::adapter::{Adapter, OTHER_BASE, TensorMap, values};
use super::checkpoint::to_f32;
use super::lora::{LoraPlan, never_adapted};
use super::spec::{ModelSpec, TIED_COPY};
use crate::config::{LoraConfig, Targets};
use crate::error::{Error, Result};
use burn::tensor::{Device, Tensor};
use regex::Regex;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, View};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// File with the settings.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// File with the tensors.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// Initialisations of A and B that leave the base as it is, beside true and false.
const BASE_STAYS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

const FILES: &str = "an adapter folder holds adapter_config.json and adapter_model.safetensors; an adapter_model.bin is to be \
                     saved again by PEFT, with safe_serialization";

/// The bytes of a safetensors file with the adapter's tensors in f32 under their PEFT names.
pub fn weights_bytes(adapter: &Adapter) -> Vec<u8> {
    tensor_file(adapter.flat.tensors().map(|(name, tensor)| (name.into(), tensor)))
}

/// A tensor of a device, whose values are copied when they are written.
struct OnDevice {
    shape: [usize; 2],
    tensor: Tensor<2>,
}

impl View for OnDevice {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(values(&self.tensor).iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

/// A safetensors file of f32 tensors on a device: beside its bytes memory holds one of them at a time.
pub fn tensor_file(tensors: impl IntoIterator<Item = (String, Tensor<2>)>) -> Vec<u8> {
    let views = tensors.into_iter().map(|(name, tensor)| (name, OnDevice { shape: tensor.dims(), tensor }));
    safetensors::serialize(views, Some(pt_metadata())).expect("names are distinct and headers small")
}

fn pt_metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_string(), "pt".to_string())])
}

/// A safetensors file of f32 tensors.
pub fn f32_safetensors<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [usize], &'a [f32])>) -> Vec<u8> {
    let bytes: Vec<(&str, &[usize], Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, shape, values)| (name, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).expect("the shape fits the values"))
    });
    safetensors::serialize(views, Some(pt_metadata())).expect("names are distinct and headers small")
}

/// 2-D float tensors of a safetensors buffer, by name.
///
/// # Errors
/// `model::bad_safetensors`, naming `origin`.
pub fn read_tensors(bytes: &[u8], origin: &Path) -> Result<TensorMap> {
    let broken = |what: String| Error::new("model::bad_safetensors", format!("{}: {what}", origin.display()));
    let file = SafeTensors::deserialize(bytes).map_err(|e| {
        let cut = "it may be cut short: compare its size with the original and copy it again";
        broken(e.to_string()).expected("a whole safetensors file").help(cut)
    })?;
    file.iter()
        .map(|(name, view)| {
            let shape: [usize; 2] = view.shape().try_into().map_err(|_| {
                broken(format!("tensor {name} has shape {:?}", view.shape()))
                    .expected("two dimensions")
                    .help("only the A and B of a LoRA can be in it")
            })?;
            let values = to_f32(view.data(), view.dtype()).ok_or_else(|| {
                broken(format!("tensor {name} is stored as {:?}", view.dtype()))
                    .expected("F32, BF16 or F16")
                    .help("save the adapter in one of these")
            })?;
            Ok((name.to_string(), (shape, values)))
        })
        .collect()
}

/// The base that the adapter in `dir` names.
///
/// # Errors
/// `model::adapter_config` where it names none that is here.
pub fn base_of(dir: &Path) -> Result<PathBuf> {
    let config = read_config(dir)?;
    let named = config["base_model_name_or_path"].as_str().unwrap_or_default();
    if Path::new(named).is_dir() {
        return Ok(named.into());
    }
    let path = dir.join(CONFIG_FILE);
    let message = match named {
        "" => format!("{} does not name the base that was tuned", path.display()),
        _ => format!("{} names the base {named:?}, which is no folder on this machine", path.display()),
    };
    Err(Error::new("model::adapter_config", message)
        .expected("`base_model_name_or_path` to be the folder of a model")
        .help("say where the base is: --base DIR"))
}

fn read_config(dir: &Path) -> Result<Value> {
    let path = dir.join(CONFIG_FILE);
    let text = std::fs::read(&path).map_err(|e| Error::io("read", &path, e).help(FILES))?;
    let bad = |what: String| {
        Error::new("model::adapter_config", format!("{}: {what}", path.display()))
            .expected("a JSON object with the settings of an adapter, as PEFT writes it")
            .help("it may be cut short or of something else: copy it again from where the adapter was saved")
    };
    let config: Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    if config.is_object() { Ok(config) } else { Err(bad("it holds no JSON object".into())) }
}

/// Reads the adapter folder `dir` for a base of shape `spec`.
///
/// # Errors
/// `model::adapter_config` for settings that this host does not apply (each by name), `model::adapter_tensor` for tensors
/// that do not fit the base.
pub fn read(dir: &Path, spec: &ModelSpec, device: &Device) -> Result<Adapter> {
    let (path, config) = (dir.join(CONFIG_FILE), read_config(dir)?);
    let plan = LoraPlan::new(&lora_config(&config, &path, spec)?, spec)?;
    let weights = dir.join(WEIGHTS_FILE);
    let bytes = std::fs::read(&weights).map_err(|e| Error::io("read", &weights, e).help(FILES))?;
    Adapter::from_tensors(plan, read_tensors(&bytes, &weights)?, device)
}

fn lora_config(config: &Value, path: &Path, spec: &ModelSpec) -> Result<LoraConfig> {
    let bad = |field: &str, expected: &str| {
        Error::new("model::adapter_config", format!("{} has `{field}` = {}", path.display(), config[field]))
            .expected(expected)
    };
    // Settings that change the arithmetic: applying such an adapter without them would be silently wrong.
    let unsupported = |field: &str, expected: &str| {
        bad(field, expected).help("merge such an adapter with PEFT itself (merge_and_unload), or train a plain LoRA")
    };
    for field in ["use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"] {
        if !matches!(config.get(field), None | Some(Value::Null | Value::Bool(false))) {
            return Err(unsupported(field, "false: plain LoRA and rsLoRA are applied, and DoRA and the like are not"));
        }
    }
    for field in [
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "trainable_token_indices",
        "layer_replication",
    ] {
        if !is_empty(&config[field]) {
            return Err(unsupported(
                field,
                "nothing: one rank and alpha are applied to linear modules, and to nothing else",
            ));
        }
    }
    // The others take something out of the base, which only a loader that knows of it does again.
    let init = &config["init_lora_weights"];
    if !matches!(init, Value::Null | Value::Bool(_)) && !BASE_STAYS.iter().any(|name| init == name) {
        return Err(bad("init_lora_weights", "true, false, gaussian, eva or orthogonal, which leave the base as it is")
            .help("save the adapter for the unchanged base: save_pretrained(..., path_initial_model_for_weight_conversion=...)"));
    }
    if config["peft_type"] != "LORA" {
        return Err(unsupported("peft_type", "LORA"));
    }
    if !matches!(config.get("bias"), None | Some(Value::Null)) && config["bias"] != "none" {
        return Err(unsupported("bias", "none"));
    }
    let damaged = |field: &str, expected: &str| {
        bad(field, expected).help("copy adapter_config.json again from where the adapter was saved")
    };
    let rank =
        config["r"].as_u64().filter(|r| (1..=1 << 16).contains(r)).ok_or_else(|| damaged("r", "a positive rank"))?;
    let paths = module_paths(config, spec).map_err(|(field, expected)| damaged(field, expected))?;
    let targets = &config["target_modules"];
    if expression(targets).is_some_and(|targets| adapts_head(&targets, spec)) {
        return Err(bad("target_modules", "linear modules of layers")
            .help(never_adapted(TIED_COPY).unwrap_or_default())
            .help("train the adapter again without them"));
    }
    if paths.is_empty() {
        let why = match targets {
            Value::String(word) if word == "all-linear" => {
                "write the names or an expression that it stood for in training"
            }
            targets if is_empty(targets) => "name the modules that were trained",
            targets => never_adapted(&targets.to_string()).unwrap_or(OTHER_BASE),
        };
        return Err(bad("target_modules", "modules of this base").help(why));
    }
    let targets = Targets::Regex(paths.into_iter().map(regex::escape).collect::<Vec<_>>().join("|"));
    Ok(LoraConfig {
        rank: rank as usize,
        alpha: config["lora_alpha"].as_f64().ok_or_else(|| damaged("lora_alpha", "a number"))?,
        rslora: config["use_rslora"].as_bool().unwrap_or(false),
        dropout: config["lora_dropout"].as_f64().unwrap_or(0.0),
        targets,
        init: None,
    })
}

/// Whether PEFT adapts the head or the embedding, one matrix in this family.
fn adapts_head(targets: &Regex, spec: &ModelSpec) -> bool {
    let head = TIED_COPY.trim_end_matches(".weight");
    targets.is_match(head) || targets.is_match(&format!("{}embed_tokens", spec.prefix))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Paths of the base's linear modules that PEFT adapts under `target_modules`, `exclude_modules` and `layers_to_transform`;
/// or the field that says no such thing, and what it should be.
fn module_paths<'a>(config: &Value, spec: &'a ModelSpec) -> Result<Vec<&'a str>, (&'static str, &'static str)> {
    let expression_of = |field: &'static str| {
        expression(&config[field]).ok_or((field, "a list of names or an expression for whole module paths"))
    };
    let targets = expression_of("target_modules")?;
    let excluded = match is_empty(&config["exclude_modules"]) {
        true => None,
        false => Some(expression_of("exclude_modules")?),
    };
    let layers = match &config["layers_to_transform"] {
        unset if is_empty(unset) => None,
        Value::Array(layers) => Some(layers.clone()),
        layer => Some(vec![layer.clone()]),
    };
    let pattern = &config["layers_pattern"];
    if layers.is_some() && !is_empty(pattern) && *pattern != "layers" && *pattern != json!(["layers"]) {
        return Err(("layers_pattern", "\"layers\", as this base calls them"));
    }
    let adapted = spec.modules.iter().filter(|m| {
        targets.is_match(&m.path)
            && !excluded.as_ref().is_some_and(|excluded| excluded.is_match(&m.path))
            && layers.as_ref().is_none_or(|layers| layers.contains(&json!(m.layer)))
    });
    Ok(adapted.map(|m| m.path.as_str()).collect())
}

/// PEFT names modules by one expression for the whole path, or by a list of paths or their last parts.
fn expression(value: &Value) -> Option<Regex> {
    let pattern = match value {
        Value::String(pattern) => pattern.clone(),
        Value::Array(names) => {
            let names: Option<Vec<String>> = names.iter().map(|n| n.as_str().map(regex::escape)).collect();
            format!(r"(.*\.)?({})", names?.join("|"))
        }
        _ => return None,
    };
    Regex::new(&format!("^(?:{pattern})$")).ok()
}
