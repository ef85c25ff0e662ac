//! A base streams from its files to the device, and from its files to an export: beside what the device holds, the host never
//! has more than a piece of a tensor, however large the base.
#![cfg(target_os = "linux")] // memory is measured and limited there

mod common;

use burn::tensor::Device;
use common::large::{HIDDEN, VISION, write_base};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use tunehost::config::WeightDtype;
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::peft::f32_safetensors;
use tunehost::model::weights::Model;

/// A line of `/proc/self/status`, in bytes.
fn status_bytes(field: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

fn stored_bytes(checkpoint: &Checkpoint) -> usize {
    checkpoint.entries().values().map(|e| e.size_bytes()).sum()
}

#[test]
fn the_host_holds_little_more_than_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let config = write_base(dir.path(), 6, 128);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let stored = stored_bytes(&checkpoint);
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

/// An adapter on one module of `base`.
fn write_adapter(dir: &Path, base: &Path, module: &str, output: usize) {
    const RANK: usize = 4;
    let wave = |count: usize, by: f32| -> Vec<f32> { (0..count).map(|i| (i as f32 * by).cos() * 0.05).collect() };
    let (a, b) = (wave(RANK * HIDDEN, 0.3), wave(output * RANK, 1.1));
    let names = ["lora_A", "lora_B"].map(|which| format!("base_model.model.{module}.{which}.weight"));
    let tensors = [(&names[0], [RANK, HIDDEN], &a), (&names[1], [output, RANK], &b)];
    let file = f32_safetensors(tensors.iter().map(|(name, shape, values)| (name.as_str(), &shape[..], &values[..])));
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("adapter_model.safetensors"), file).unwrap();
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": module.replace('.', r"\."),
        "base_model_name_or_path": base});
    fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Less than the base that is merged and judged, in f32 not even a third of it.
const LIMIT_BYTES: usize = 300 << 20;

#[test]
fn a_base_larger_than_the_memory_limit_is_merged_and_judged() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("base")).unwrap();
    write_base(&at("base"), 12, 40);
    let stored = Checkpoint::open(&at("base")).unwrap();
    assert!(stored_bytes(&stored) > LIMIT_BYTES * 3 / 2, "{}", stored_bytes(&stored));
    let module = "model.language_model.layers.3.self_attn.q_proj";
    let adapted = format!("{module}.weight");
    write_adapter(&at("adapter"), &at("base"), module, stored.entries()[&adapted].shape[0]);
    let record = |i: usize| json!({"id": format!("r{i}"), "input_ids": (0..12).map(|t| 3 + (i * 37 + t * 11) % 700).collect::<Vec<_>>()});
    fs::write(at("data.jsonl"), (0..3).map(|i| record(i).to_string()).collect::<Vec<_>>().join("\n")).unwrap();

    // Whether so small a change is a gain is not what is asked here.
    let report = limited_export(dir.path(), "out", &[]);
    let loss = |of: &str| report["proof"][of].as_f64().unwrap();
    assert!((loss("export") - loss("tuned")).abs() < 0.1 * (loss("base") - loss("tuned")).abs(), "{report:#}");

    let merged = Checkpoint::open(&at("out")).unwrap();
    assert!(merged.entries().contains_key(VISION) && merged.entries().keys().eq(stored.entries().keys()));
    for name in stored.entries().keys() {
        assert_eq!(merged.bytes(name).unwrap() == stored.bytes(name).unwrap(), *name != adapted, "{name}");
    }

    // What a GGUF file says of its vocabulary.
    fs::write(at("base/tokenizer.json"), r#"{"model": {"type": "BPE", "vocab": {}, "merges": []}}"#).unwrap();
    let exporters: [&[&str]; 2] =
        [&["merge-then-quantize", "--set", "scheme=nvfp4a16"], &["gguf", "--set", "type=q4_k_m"]];
    for exporter in exporters {
        let report = limited_export(dir.path(), exporter[0], &[&["--exporter"], exporter].concat());
        assert!(report["proof"]["kl"].as_f64().unwrap().is_finite(), "{report:#}");
        let smaller = Checkpoint::open(&at(exporter[0])).unwrap();
        assert_eq!(smaller.shapes().keys().len() + usize::from(exporter[0] == "gguf"), stored.shapes().len());
        assert!(stored_bytes(&smaller) < stored_bytes(&stored) / 2);
    }
}

/// Exports the adapter in `dir` with [`LIMIT_BYTES`] of memory that the process itself asks for; pages of mapped files are the
/// system's to take back. The report, whatever the verdict.
fn limited_export(dir: &Path, out: &str, more: &[&str]) -> Value {
    let limited = format!("ulimit -d {}; exec \"$@\"", LIMIT_BYTES >> 10);
    let out = dir.join(out);
    let ran = Command::new("sh")
        .args(["-c", &limited, "sh", env!("CARGO_BIN_EXE_tunehost"), "export"])
        .args([dir.join("adapter"), "--data".into(), dir.join("data.jsonl"), "--out".into(), out.clone()])
        .args(more)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(matches!(ran.status.code(), Some(0 | 10)), "{said}");
    serde_json::from_slice(&fs::read(out.join("export.json")).expect(&said)).unwrap()
}
