//! A base streams from its files to the device: beside what the device holds, the host never has more than a piece of a
//! tensor, however large the base.

use burn::tensor::Device;
use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use std::fs;
use std::path::Path;
use tunehost::config::WeightDtype;
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::config::TextConfig;
use tunehost::model::spec::ModelSpec;
use tunehost::model::weights::Model;

/// A line of `/proc/self/status`, in bytes.
fn status_bytes(field: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// A bf16 checkpoint of 6 layers in one shard each, of 0.9 GB in all; its largest tensor has 100 MB.
fn write_base(dir: &Path) -> TextConfig {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/config_hub_style.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    let layers = 6;
    let text = &mut json["text_config"];
    text["hidden_size"] = 512.into();
    text["num_experts"] = 128.into();
    text["moe_intermediate_size"] = 384.into();
    text["num_hidden_layers"] = layers.into();
    text["layer_types"] =
        (0..layers).map(|i| if i % 6 == 5 { "full_attention" } else { "sliding_attention" }).collect();
    let config = TextConfig::parse(&json).unwrap();
    let spec = ModelSpec::new(&config, "model.");
    let mut weight_map = serde_json::Map::new();
    for layer in 0..=layers {
        let of_layer =
            |name: &str| name.contains(&format!("layers.{layer}.")) || (layer == layers && !name.contains("layers."));
        let file = format!("model-{layer:02}.safetensors");
        let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = spec
            .tensors
            .iter()
            .filter(|(name, _)| of_layer(name))
            .map(|(name, shape)| {
                let one = bf16::from_f32(0.01).to_le_bytes();
                (name.clone(), shape.clone(), one.repeat(shape.iter().product()))
            })
            .collect();
        let views = tensors.iter().map(|(n, s, b)| (n.clone(), TensorView::new(Dtype::BF16, s.clone(), b).unwrap()));
        serialize_to_file(views, None, &dir.join(&file)).unwrap();
        weight_map.extend(tensors.iter().map(|(name, ..)| (name.clone(), file.clone().into())));
    }
    let index = serde_json::json!({ "weight_map": weight_map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    config
}

#[test]
#[cfg(target_os = "linux")]
fn the_host_holds_little_more_than_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let config = write_base(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let stored: usize = checkpoint.entries().values().map(|e| e.size_bytes()).sum();
    let largest: usize = checkpoint.entries().values().map(|e| e.size_bytes()).max().unwrap();
    // What making the files cost is not what loading them costs.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmRSS");
    let model = Model::load(config, &checkpoint, &Device::flex(), WeightDtype::F32, &mut |_| {}).unwrap();
    let peak = status_bytes("VmHWM") - before;
    // On the CPU the device is the host: every bf16 value becomes four bytes that stay.
    let device = 2 * stored;
    let host = peak.saturating_sub(device);
    println!("stored {stored}, largest {largest}, device {device}, peak {peak}, host {host} bytes");
    assert_eq!(model.layers.len(), 6);
    assert!(stored > 800_000_000, "{stored}");
    assert!(largest > 100_000_000 && host < 64 << 20, "host {host}, largest tensor {largest}");
}
