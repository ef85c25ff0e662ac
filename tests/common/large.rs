//! A base that is large for its purpose: many experts, little else.

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tunehost::model::config::TextConfig;
use tunehost::model::spec::ModelSpec;

/// Hidden size.
pub const HIDDEN: usize = 512;
/// A tensor of another tower than text.
pub const VISION: &str = "model.vision_tower.std_bias";

/// Writes a bf16 checkpoint of `layers` layers in one shard each, with 1.2 MB for each of their `experts`. Its values repeat
/// after a prime number of them, so that no two rows are the same.
pub fn write_base(dir: &Path, layers: usize, experts: usize) -> TextConfig {
    let sizes = json!({"hidden_size": HIDDEN, "num_experts": experts, "moe_intermediate_size": 384});
    write_shape(dir, layers, &sizes)
}

/// Writes the model that `tests/bench/vs_hf` measures with other weights: 57 M parameters.
pub fn write_bench_base(dir: &Path) -> TextConfig {
    let sizes = json!({"vocab_size": 32768, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128,
        "sliding_window": 256, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 176});
    write_shape(dir, 6, &sizes)
}

/// Writes a checkpoint of the golden model with other `sizes`.
fn write_shape(dir: &Path, layers: usize, sizes: &Value) -> TextConfig {
    let golden = super::root().join("tests/fixtures/golden/config_hub_style.json");
    let mut json: Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    let text = &mut json["text_config"];
    for (field, size) in sizes.as_object().unwrap() {
        text[field] = size.clone();
    }
    text["num_hidden_layers"] = layers.into();
    text["layer_types"] =
        (0..layers).map(|i| if i % 6 == 5 { "full_attention" } else { "sliding_attention" }).collect();
    let config = TextConfig::parse(&json).unwrap();
    fs::write(dir.join("config.json"), json.to_string()).unwrap();
    let mut tensors = ModelSpec::new(&config, "model.language_model.").tensors;
    tensors.insert(VISION.into(), vec![1152]);
    let pattern: Vec<u8> =
        (0..4099).flat_map(|i| bf16::from_f32(0.03 * (i as f32 * 0.7).sin()).to_le_bytes()).collect();
    let mut weight_map = serde_json::Map::new();
    for layer in 0..=layers {
        let of_layer =
            |name: &str| name.contains(&format!("layers.{layer}.")) || (layer == layers && !name.contains("layers."));
        let file = format!("model-{layer:02}.safetensors");
        let bytes = |name: &str, shape: &[usize]| match name.ends_with("layer_scalar") {
            // A small one would leave nothing of the residual stream.
            true => bf16::ONE.to_le_bytes().to_vec(),
            false => pattern.iter().copied().cycle().take(2 * shape.iter().product::<usize>()).collect(),
        };
        let tensors: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
            .iter()
            .filter(|(name, _)| of_layer(name))
            .map(|(name, shape)| (name, shape, bytes(name, shape)))
            .collect();
        let views = tensors.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::BF16, s.to_vec(), b).unwrap()));
        serialize_to_file(views, None, &dir.join(&file)).unwrap();
        weight_map.extend(tensors.iter().map(|(name, ..)| (name.to_string(), file.clone().into())));
    }
    let index = json!({ "weight_map": weight_map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    config
}
