//! The trainer on the device that wgpu finds, beside the same trainer on the CPU.

mod common;

use common::{accounted::assert_accounted, fails, ok, root, short};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The metrics of two whole steps of the quickstart on `device`, and the provenance.
fn steps_on(device: &str, dir: &Path) -> (Vec<Value>, Value) {
    let run = dir.join(device);
    let sets = ["--device", device, "--set", "train.max_steps=2", "--set", "eval.max_records_per_root=0"];
    ok(&[&["run", "configs/quickstart.toml", "--run-dir", run.to_str().unwrap()], &sets[..]].concat());
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let provenance = fs::read(run.join("provenance.json")).unwrap();
    (
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        serde_json::from_slice(&provenance).unwrap(),
    )
}

#[test]
fn a_step_of_the_quickstart_gives_the_loss_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let (on_cpu, _) = steps_on("cpu", dir.path());
    let (on_wgpu, provenance) = steps_on("wgpu", dir.path());
    assert_eq!(on_wgpu.len(), 2);
    for (cpu, wgpu) in on_cpu.iter().zip(&on_wgpu) {
        // The second loss is after an update, so the gradients count too.
        for field in ["loss", "grad_norm"] {
            let number = |metrics: &Value| metrics[field].as_f64().unwrap_or_else(|| panic!("{field} in {metrics}"));
            println!("{field}: {} on the CPU, {} on wgpu", number(cpu), number(wgpu));
            assert!((number(cpu) - number(wgpu)).abs() <= 1e-3 * number(cpu).max(1.0), "{cpu}\n{wgpu}");
        }
    }
    for (name, kernel) in provenance["kernels"].as_object().unwrap() {
        assert!(kernel["requested"].as_str().unwrap().starts_with("wgpu"), "{name}: {kernel}");
        assert_eq!(kernel["resolved"], "cubecl-f32-wgpu<wgsl>", "{name}");
    }
    assert_eq!(provenance["machine"]["device"], "wgpu");
    assert!(provenance["machine"]["driver"].as_str().is_some_and(|driver| !driver.is_empty()), "{provenance}");
    // More than one for each kernel: forward, backward, and their parts.
    assert!(provenance["jit"]["compiled"].as_u64().unwrap() > 14, "{provenance}");
}

#[test]
fn steps_with_activations_in_f16_come_near_those_of_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let config = short::config(dir.path(), "").display().to_string();
    let run = |name: &str, sets: &[&str]| {
        let run = dir.path().join(name);
        ok(&[&["run", &config, "--run-dir", run.to_str().unwrap()], sets].concat());
        let [metrics, provenance] =
            ["metrics.jsonl", "provenance.json"].map(|file| fs::read_to_string(run.join(file)).unwrap());
        let metrics: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (metrics, serde_json::from_str::<Value>(&provenance).unwrap())
    };
    let (on_cpu, _) = run("cpu", &[]);
    let (in_f16, provenance) = run("f16", &["--device", "wgpu", "--set", "train.activations=f16"]);
    assert_eq!(on_cpu.len(), in_f16.len());
    let mut compared = 0;
    for (cpu, wgpu) in on_cpu.iter().zip(&in_f16) {
        // Updates in f16 lead elsewhere, which gradients show before losses.
        for (field, tolerance) in [("loss", 1e-2), ("grad_norm", 3e-2)] {
            let [cpu, wgpu] = [cpu, wgpu].map(|metrics| metrics[field].as_f64());
            let (Some(cpu), Some(wgpu)) = (cpu, wgpu) else { continue };
            println!("{field}: {cpu} in f32 on the CPU, {wgpu} in f16 on wgpu");
            assert!((cpu - wgpu).abs() <= tolerance * cpu.max(1.0), "{field}: {cpu} and {wgpu}");
            assert_ne!(cpu, wgpu, "nothing was rounded");
            compared += 1;
        }
    }
    assert!(compared >= 6, "{in_f16:#?}");
    for (name, kernel) in provenance["kernels"].as_object().unwrap() {
        let passed_on = if ["embedding", "adamw"].contains(&&name[..]) { "" } else { ", f16 in and out" };
        assert_eq!(kernel["resolved"], format!("cubecl-f32-wgpu<wgsl>{passed_on}"), "{name}");
        assert!(kernel["requested"].as_str().unwrap().ends_with(", activations f16"), "{name}: {kernel}");
    }
}

/// One configuration for all of it: each process compiles its kernels anew.
#[test]
fn what_a_step_takes_is_measured_there_by_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let config = short::config(dir.path(), "").display().to_string();
    let of = |command: &str, more: &[&str]| -> Value {
        let sets = ["--device", "wgpu", "--set", "train.max_steps=2", "--json"];
        serde_json::from_str(&ok(&[&[command, &config], &sets[..], more].concat())).unwrap()
    };
    let report = of("profile", &["--steps", "2"]);
    assert_accounted(&report, &of("plan", &[]));
    // The device is waited for at the ends of every span, and what that costs is told.
    let [recorded, as_in_a_run] = ["step_s", "unrecorded_step_s"].map(|name| &report[name]);
    assert!(recorded["n"] == 2 && as_in_a_run["n"] == 2 && as_in_a_run["min"].as_f64() > Some(0.0), "{report:#}");
    assert_eq!(report["resolved"]["windowed_attention"], "cubecl-f32-wgpu<wgsl>");

    let bench = of("bench", &["--times", "1"]);
    assert_eq!(bench["kernels_sha256"], report["kernels_sha256"]);
    let loss =
        bench["rows"].as_array().unwrap().iter().find(|row| row["what"] == "linear_cross_entropy, loss and gradient");
    assert!(loss.unwrap()["flop"].as_u64() > Some(0), "{bench:#}");

    // Memory is what the device's allocator holds, and the host's is told beside it. Records are cut to one width: one shape.
    let smoke = of("smoke", &["--steps", "3", "--set", "data.max_seq_len=7"]);
    let weights = fs::metadata(root().join("tests/fixtures/tiny-base/model.safetensors")).unwrap().len() as f64;
    for shape in smoke["shapes"].as_array().unwrap() {
        assert_eq!(shape["outcome"], "fits", "{shape:#}");
        let of_shape = |name: &str| shape[name].as_f64().unwrap_or_else(|| panic!("{name}: {shape:#}"));
        let [loaded, in_use, reserved, host] =
            ["loaded_bytes", "peak_in_use_bytes", "peak_bytes", "host_peak_bytes"].map(of_shape);
        // The base is in f32 there, and in bf16 on disk.
        assert!(loaded > weights && in_use > weights && reserved >= in_use && host > 0.0, "{shape:#}");
        let computed = of_shape("computed_peak_bytes");
        assert!((0.8..1.2).contains(&(computed / in_use)), "{computed} computed, {in_use} in use");
        // Pages are as large as the largest tensor that was asked for: beside tensors as small as these, much of them is nobody's.
        assert!(reserved < 1.6 * computed, "{computed} computed, {reserved} reserved");
    }
}

#[test]
fn weights_that_the_device_cannot_hold_are_refused_by_the_kernel_that_lacks_them() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let sets = ["--device", "wgpu", "--set", "model.weights=bf16"];
    let error =
        fails(&[&["run", "configs/quickstart.toml", "--run-dir", run.to_str().unwrap()], &sets[..]].concat(), 9);
    assert!(error.contains("device::unsupported") && error.contains("`lora_linear`"), "{error}");
    let sets = ["--device", "wgpu", "--set", "train.activations=bf16"];
    let error =
        fails(&[&["run", "configs/quickstart.toml", "--run-dir", run.to_str().unwrap()], &sets[..]].concat(), 9);
    for part in ["device::unsupported", "`rms_norm`", "no bf16", "--set train.activations=f16"] {
        assert!(error.contains(part), "{part} is not in\n{error}");
    }
    // A card that is pinned is that one, or none.
    let pinned = ["run", "configs/quickstart.toml", "--run-dir", run.to_str().unwrap(), "--device", "wgpu:9"];
    let error = fails(&pinned, 9);
    assert!(error.contains("device::unavailable") && error.contains("the discrete card 9"), "{error}");
}
