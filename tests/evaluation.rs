//! Evaluation in the run: what it writes, the best checkpoint, early stop.

mod common;

use common::{fails, ok, root};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The bundled base on records of two roots, with a rate so high that it soon gets worse.
fn config(dir: &Path) -> PathBuf {
    let base = root().join("tests/fixtures/tiny-base");
    for root in ["one", "two"] {
        let line =
            |i: usize| format!(r#"{{"id": "{root}{i}", "text": "{}"}}"#, format!("{root} {i} ").repeat(2 + i % 5));
        fs::write(dir.join(format!("{root}.jsonl")), (0..40).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    }
    let path = dir.join("short.toml");
    let text = format!(
        r#"
name = "short"
model.base = "{}"
data = {{ max_seq_len = 128, held_out = 0.3, sources = [{{ path = "one.jsonl", root = "one" }}, {{ path = "two.jsonl", root = "two" }}] }}
train = {{ epochs = 4, micro_batch = 1, accumulation = 4, lr = 0.05, warmup_steps = 0, schedule = "constant", clip_norm = 0.0 }}
plugins.checkpoint_scheduler = "every-n-steps"
plugins.config.checkpoint_scheduler.n = 1000
eval = {{ every_steps = 2, patience = 2, every_minutes = 1e-6 }}
gates.loss_spike = "off"
export = {{ merged = false, checkpoint = "best" }}
"#,
        base.display()
    );
    fs::write(&path, text).unwrap();
    path
}

fn lines(path: PathBuf) -> Vec<Value> {
    fs::read_to_string(&path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_best_is_saved_and_exported_and_training_ends_when_it_is_not_undercut() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = dir.path().join("run");
    let said = ok(&["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()]);
    let provenance = || -> Value { serde_json::from_slice(&fs::read(run.join("provenance.json")).unwrap()).unwrap() };
    let outcome = provenance()["outcome"].clone();
    let evaluations: Vec<Value> =
        lines(run.join("metrics.jsonl")).into_iter().filter(|l| l["kind"] == "held-out").collect();
    let steps: Vec<u64> = evaluations.iter().map(|e| e["step"].as_u64().unwrap()).collect();
    let (best, last) = (outcome["best"]["step"].as_u64().unwrap(), outcome["step"].as_u64().unwrap());
    assert_eq!(steps, (0..=last).step_by(2).collect::<Vec<_>>());
    assert_eq!(last, best + 4, "two evaluations after the best\n{said}");
    let losses: Vec<f64> = evaluations.iter().map(|e| e["loss"].as_f64().unwrap()).collect();
    assert_eq!(losses[1..].iter().copied().fold(f64::MAX, f64::min), outcome["best"]["loss"].as_f64().unwrap());
    assert_eq!(evaluations[0]["roots"].as_array().unwrap().len(), 2);
    assert!(evaluations[0]["roots"][0]["standard_error"].as_f64().unwrap() > 0.0);
    assert_eq!((outcome["status"].as_str(), outcome["exported_step"].as_u64()), (Some("finished"), Some(best)));
    assert!(outcome["reason"].as_str().unwrap().contains("no lower held-out loss in 2 evaluations"), "{outcome}");
    assert!(said.contains("; the best so far") && said.contains("ended early after step"), "{said}");
    // By the clock: after the steps that the count leaves out, and in the other log.
    let clock: Vec<u64> = lines(run.join("timing.jsonl"))
        .iter()
        .filter(|l| l["kind"] == "held-out")
        .map(|l| l["step"].as_u64().unwrap())
        .collect();
    assert_eq!(clock, (1..last).step_by(2).collect::<Vec<_>>());

    let adapter = |path: String| fs::read(run.join(path).join("adapter_model.safetensors")).unwrap();
    let exported = adapter("export/adapter".into());
    assert!(exported != adapter(format!("checkpoints/step-{last:06}")));
    let of_best: Vec<u8> = adapter(format!("checkpoints/step-{best:06}"));
    let tensors = |bytes: &[u8]| bytes[8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize..].to_vec();
    assert!(tensors(&exported) == tensors(&of_best), "exported is the best");

    // It has ended: a resume computes nothing more.
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    ok(&["resume", run.to_str().unwrap()]);
    assert!(fs::read(run.join("metrics.jsonl")).unwrap() == metrics);
    assert_eq!(provenance()["outcome"]["best"], outcome["best"]);
}

#[test]
fn what_goes_by_evaluations_needs_some() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let text = fs::read_to_string(&config).unwrap().replace("every_steps = 2, ", "");
    fs::write(&config, text).unwrap();
    let said = fails(&["run", config.to_str().unwrap()], 2);
    assert!(said.contains("eval.patience") && said.contains("`eval.every_steps` beside it"), "{said}");
    let none = ["--set", "eval.patience=1", "--set", "eval.every_steps=2", "--set", "data.held_out=0.0"];
    let said = fails(&[&["run", config.to_str().unwrap()][..], &none].concat(), 2);
    assert!(said.contains("eval.every_steps") && said.contains("data.held_out"), "{said}");
}
