//! `tunehost profile` as a person meets it.

mod common;

use common::{accounted::assert_accounted, fails, ok, short, signalled, tunehost};
use serde_json::Value;
use std::fs;

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
        let names: Vec<&Value> = report["phases"].as_array().unwrap().iter().map(|row| &row["phase"]).collect();
        assert_eq!(names, ["data", "forward", "loss", "recompute", "backward", "optimiser", "plugins"]);
        let plan: Value = serde_json::from_str(&ok(&[&["plan", &config, "--json"], &sets[..]].concat())).unwrap();
        assert_accounted(&report, &plan);
        // Its kernels are done when they return: nothing is waited for.
        assert!(report["unrecorded_step_s"].is_null() && report["step_s"]["n"] == 4);
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

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let config = short::config(dir.path(), "").display().to_string();
    let trace = dir.path().join("trace.json").display().to_string();
    let (profile, bench) =
        (["profile", &config, "--steps", "1000000", "--trace", &trace], ["bench", &config, "--times", "1000000"]);
    for (command, list) in [(&profile[..], "phases"), (&bench[..], "rows")] {
        let out = signalled("INT", 3.0, tunehost(&[command, &["--json"]].concat()));
        assert_eq!(out.status.code(), Some(0), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
        let report: Value = serde_json::from_slice(&out.stdout).expect("whole");
        assert!(!report[list].as_array().unwrap().is_empty(), "{report}");
    }
    let events: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).expect("whole");
    assert!(events["traceEvents"][0]["name"] == "step 1", "{events}");
}
