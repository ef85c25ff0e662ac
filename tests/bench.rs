//! `tunehost bench` as a person meets it.

mod common;

use common::{fails, ok, short};
use serde_json::{Value, json};
use std::fs;

#[test]
fn parts_are_measured_with_the_kernels_of_a_run_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let config = short::config(dir.path(), "").display().to_string();
    let run = dir.path().join("run");
    ok(&["run", &config, "--run-dir", run.to_str().unwrap(), "--quiet"]);
    let with_run = ["bench", &config, "--json", "--times", "2", "--run", run.to_str().unwrap()];
    let report: Value = serde_json::from_str(&ok(&with_run)).unwrap();
    let mut provenance = short::provenance(&run);
    assert_eq!(report["same_as_run"], provenance["run_id"]);
    assert_eq!(report["kernels_sha256"], provenance["kernels_sha256"]);
    let rows = report["rows"].as_array().unwrap();
    for part in [
        "windowed_attention, sliding",
        "windowed_attention, full",
        "moe_experts with routing, forward",
        "loss and gradient",
        "lora_linear, ",
    ] {
        let found: Vec<&Value> = rows.iter().filter(|row| row["what"].as_str().unwrap().contains(part)).collect();
        assert!(found.iter().any(|row| row["shape"] == "median") && found.iter().any(|row| row["shape"] == "largest"));
        assert!(found.iter().all(|row| row["flop"].as_u64() > Some(0) && row["s"]["n"] == 2), "{part}: {found:?}");
    }
    let row_of = |part: &str| rows.iter().find(|row| row["what"].as_str().unwrap().starts_with(part)).expect(part);
    for part in ["data: ", "plugin bucket-to-pair: ", "plugin every-n-steps: "] {
        let row = row_of(part);
        assert!(row["s"]["median"].as_f64() > Some(0.0) && row["flop"].is_null(), "{row}");
    }
    // Its kernels multiply no matrices: they tell what they move.
    let optimiser = row_of("optimiser: ");
    assert!(optimiser["flop"] == 0 && optimiser["bytes"].as_u64() > Some(0), "{optimiser}");
    let tokens = |at: usize| report["shapes"][at]["tokens"].as_u64().unwrap();
    assert!(tokens(0) <= tokens(1));

    let written = |provenance: &Value| fs::write(run.join("provenance.json"), provenance.to_string()).unwrap();
    provenance["kernels_sha256"] = json!("0".repeat(64));
    written(&provenance);
    assert!(fails(&with_run, 6).contains("that of the kernels which it lists"));
    // As an earlier version wrote it.
    provenance.as_object_mut().unwrap().remove("kernels_sha256");
    provenance["kernels"]["lora_linear"]["resolved"] = json!("cubecl-f32-vulkan");
    written(&provenance);
    let said = fails(&with_run, 6);
    assert!(said.contains("run::other_kernels") && said.contains("lora_linear is cubecl-f32-vulkan"), "{said}");
    let text = ok(&["bench", &config, "--times", "1"]);
    assert!(text.contains("compared with no run") && text.contains("the largest micro-batch"), "{text}");
}
