//! `tunehost runs` on short runs.

mod common;

use common::{fails, ok, root};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A run of three steps that makes every kind of file.
fn config(dir: &Path) -> PathBuf {
    let base = root().join("tests/fixtures/tiny-base");
    let base = base.display();
    let line = |i: usize| format!(r#"{{"id": "r{i}", "text": "{}"}}"#, format!("word {i} ").repeat(1 + i % 5));
    fs::write(dir.join("records.jsonl"), (0..24).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let path = dir.join("short.toml");
    let text = format!(
        r#"
name = "short"
model.base = "{base}"
run.root = "runs"
data = {{ template = "base", max_seq_len = 128, held_out = 0.2, sources = [{{ path = "records.jsonl", root = "records" }}] }}
train = {{ max_steps = 3, micro_batch = 2, accumulation = 1, lr = 1e-3 }}
eval.every_steps = 2
"#
    );
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn runs_are_listed_compared_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let config = config(dir);
    let run = |name: &str, more: &[&str]| {
        let folder = dir.join("runs").join(name);
        ok(&[&["run", config.to_str().unwrap(), "--run-dir", folder.to_str().unwrap()], more].concat());
        folder.to_str().unwrap().to_string()
    };
    let a = run("a", &[]);
    let again = run("again", &["--quiet"]);
    let lr = run("lr", &["--set", "train.lr=2e-3"]);
    let sampler = run("sampler", &["--plugins", "sampler=shuffled"]);
    let bf16 = run("bf16", &["--set", "model.weights=bf16"]);
    assert_eq!(ok(&["runs", "diff", &a, &again]).trim(), "no difference");
    for (b, line) in
        [(&lr, "train.lr: 0.001 | 0.002"), (&sampler, "plugin/sampler: "), (&bf16, "model.weights: \"f32\" | ")]
    {
        let lines = ok(&["runs", "diff", &a, b]);
        assert!(lines.starts_with(line) && lines.lines().count() == 1, "{lines}");
    }

    let list = ok(&["runs", "list", dir.join("runs").to_str().unwrap()]);
    assert_eq!(list.lines().count(), 6, "{list}");
    assert!(
        list.lines().any(|l| l.starts_with("sampler ") && l.contains("finished") && l.contains("records ")),
        "{list}"
    );
    let shown = ok(&["runs", "show", &a]);
    for word in
        ["tunehost 0.1.0", "windowed_attention", "plugin       sampler: bucket-to-pair", "gate         device: passed"]
    {
        assert!(shown.contains(word), "{word} is not in\n{shown}");
    }
    let whole: Value = serde_json::from_str(&ok(&["runs", "show", &a, "--json"])).unwrap();
    assert_eq!(whole["jit"]["compiled"], 0);
    assert_eq!(whole["dtypes"]["weights"]["resolved"], "f32");

    let checks: Vec<Value> = serde_json::from_str(&ok(&["runs", "verify", &a, "--json"])).unwrap();
    let names: Vec<&str> = checks.iter().map(|c| c["what"].as_str().unwrap()).collect();
    for name in [
        "base/model.safetensors",
        "tokenizer",
        "template",
        "corpus[0]",
        "plugin/sampler",
        "configuration",
        "order manifest",
        "metrics",
        "checkpoint/step-000003",
        "export/adapter/adapter_model.safetensors",
        "export/merged/model.safetensors",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    // A flipped bit in a checkpoint, a changed line, another corpus: each is named.
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let folder = dir.join("runs/a");
    flip(&folder.join("checkpoints/step-000003/optimizer.safetensors"));
    flip(&folder.join("export/adapter/adapter_model.safetensors"));
    let metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    fs::write(
        folder.join("metrics.jsonl"),
        metrics.replacen("{\"kind\":\"step\",\"step\":2,", "{\"kind\":\"step\",\"step\":3,", 1),
    )
    .unwrap();
    fs::write(dir.join("records.jsonl"), "{\"text\": \"another\"}").unwrap();
    let said = fails(&["runs", "verify", &a], 6);
    assert!(said.contains("run::verify_failed") && said.contains("4 of "), "{said}");
    for name in ["corpus[0]", "metrics", "checkpoint/step-000003", "export/adapter/adapter_model.safetensors"] {
        assert!(said.contains(name), "{name} is not in {said}");
    }
    let said = fails(&["runs", "show", dir.to_str().unwrap()], 8);
    assert!(said.contains("provenance.json"), "{said}");
}
