//! `tunehost profile` as a person meets it.

mod common;

use common::{fails, ok, short};
use serde_json::Value;
use std::fs;

fn sum(rows: &Value, key: &str) -> f64 {
    rows.as_array().unwrap().iter().map(|row| row[key].as_f64().unwrap()).sum()
}

#[test]
fn the_tables_sum_to_the_step_and_count_the_work_that_the_plan_counts() {
    let dir = tempfile::tempdir().unwrap();
    let config = short::config(dir.path(), "").display().to_string();
    let trace = dir.path().join("trace.json");
    let wide = ["--set", "train.micro_batch=16", "--set", "train.max_steps=2"];
    for (weights, recompute) in [("f32", "selective"), ("bf16", "full")] {
        let sets = [format!("model.weights={weights}"), format!("train.recompute_granularity={recompute}")];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set.as_str()]).chain(wide).collect();
        let more = ["--json", "--steps", "4"];
        let report: Value = serde_json::from_str(&ok(&[&["profile", &config], &more[..], &sets].concat())).unwrap();
        let (phases, kernels) = (&report["phases"], &report["kernels"]);
        let step = report["step_mean_s"].as_f64().unwrap();
        let within = |found: f64| (0.95..=1.0 + 1e-9).contains(&(found / step));
        assert!(within(sum(phases, "s")), "{report:#}");
        // A kernel is in a phase, so kernels and all else in the phases are the step too.
        let other = sum(phases, "s") - sum(phases, "kernels_s");
        assert!(other > 0.0 && within(sum(kernels, "s") + other), "{report:#}");
        let names: Vec<&str> = phases.as_array().unwrap().iter().map(|row| row["phase"].as_str().unwrap()).collect();
        assert_eq!(names, ["data", "forward", "loss", "recompute", "backward", "optimiser", "plugins"]);

        // The operations that the kernels say they did are those that `plan` computes, and the shares follow from them. Each of
        // the two steps of the run was measured twice.
        let plan: Value = serde_json::from_str(&ok(&[&["plan", &config, "--json"], &sets[..]].concat())).unwrap();
        let number = |path: &str| report.pointer(path).unwrap().as_f64().unwrap();
        let performed = number("/work/performed_flop");
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(close(sum(kernels, "flop"), performed));
        for which in ["nominal_flop", "performed_flop"] {
            let planned = plan["steps"]["work"][which].as_f64().unwrap() / 2.0;
            assert!(close(report["work"][which].as_f64().unwrap(), planned), "{which}: {report:#} {planned}");
        }
        assert!(number("/work/nominal_flop") < performed);
        let product = if weights == "bf16" { "/peaks/bf16_product_flops/max" } else { "/peaks/f32_product_flops/max" };
        assert!((number("/mfu_performed") * step * number(product) / performed - 1.0).abs() < 1e-9);
        // Each kernel is one of the table whose hash it stands under.
        let resolved: Vec<&String> = report["resolved"].as_object().unwrap().keys().collect();
        for row in kernels.as_array().unwrap() {
            let name = row["kernel"].as_str().unwrap();
            assert!(resolved.iter().any(|kernel| name.starts_with(kernel.as_str())), "{name}");
        }
        assert_eq!(report["step_s"]["n"], 4);
        let hash = report["kernels_sha256"].as_str().unwrap();
        assert!(report["resolved"]["lora_linear"].as_str().unwrap().contains(weights) && hash.len() == 64);
    }

    let text = ok(&[&["profile", &config, "--trace", trace.to_str().unwrap()], &wide[..]].concat());
    assert!(text.contains("the run has 2 steps: they were computed in turn"), "{text}");
    for part in ["MFU", "the mean", "everything else", "windowed_attention, backward", "sliding", "GFLOP/s"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let events: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    let time =
        |event: &Value| (event["ts"].as_f64().unwrap(), event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap());
    let steps: Vec<_> = ["step 1", "step 2", "step 3"].map(|name| time(named(name)[0])).into();
    assert!(steps.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{steps:?}");
    assert!(events.iter().map(time).all(|(start, end)| start <= end && start >= steps[0].0 && end <= steps[2].1 + 1.0));
    assert_eq!(named("loss").len(), 3);
    let said = fails(&[&["profile", &config, "--trace", trace.to_str().unwrap()], &wide[..]].concat(), 2);
    assert!(said.contains("usage::trace_exists"), "{said}");
    let nowhere = dir.path().join("no-folder/trace.json");
    let said = fails(&[&["profile", &config, "--trace", nowhere.to_str().unwrap()], &wide[..]].concat(), 8);
    assert!(said.contains("no-folder") && !said.contains("trace.json"), "{said}");
}
