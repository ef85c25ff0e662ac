//! A run that is stopped or killed and resumed ends with the bytes of one that was not.

mod common;

use common::{fails, ok, tunehost};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: usize = 14;

/// A short run of the bundled base: two epochs' worth of orders, dropout on, so that every kind of randomness is in it.
fn config(dir: &Path) -> PathBuf {
    let path = dir.join("short.toml");
    let fixtures = common::root().join("tests/fixtures");
    let fixtures = fixtures.display();
    let lines: Vec<String> = (0..48)
        .map(|i| format!(r#"{{"id": "r{i}", "messages": [{{"role": "user", "content": "Say {i}."}}, {{"role": "assistant", "content": "{}"}}]}}"#, "word ".repeat(1 + i % 7)))
        .collect();
    fs::write(dir.join("records.jsonl"), lines.join("\n")).unwrap();
    let text = format!(
        r#"
name = "short"
model.base = "{fixtures}/tiny-base"
run.root = "runs"
[data]
template = "{fixtures}/tiny-base/chat_template.jinja"
max_seq_len = 128
held_out = 0.2
sources = [{{ path = "records.jsonl", root = "records" }}]
[lora]
dropout = 0.1
[train]
epochs = 3
max_steps = {STEPS}
micro_batch = 2
accumulation = 3
lr = 1e-3
warmup_steps = 3
[plugins]
checkpoint_scheduler = "every-n-steps"
[plugins.config.checkpoint_scheduler]
n = 4
"#
    );
    fs::write(&path, text).unwrap();
    path
}

/// Every file whose bytes a resume must reproduce.
fn contents(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let step = format!("checkpoints/step-{STEPS:06}");
    let names = [
        "order-manifest.jsonl".to_string(),
        "metrics.jsonl".into(),
        "truncation-report.json".into(),
        format!("{step}/adapter_model.safetensors"),
        format!("{step}/optimizer.safetensors"),
        format!("{step}/checkpoint.json"),
        "export/adapter/adapter_model.safetensors".into(),
        "export/adapter/adapter_config.json".into(),
        "export/merged/model.safetensors".into(),
        format!("held-out/step-{STEPS:06}.json"),
    ];
    names.into_iter().map(|name| (name.clone(), fs::read(run.join(&name)).expect(&name))).collect()
}

fn assert_same(a: &Path, b: &Path) {
    for ((name, a), b) in contents(a).iter().zip(contents(b).values()) {
        assert!(a == b, "{name} differs");
    }
}

fn start(config: &Path, run: &Path) -> Child {
    let args = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    tunehost(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits until the run has written `lines` steps.
fn wait_for_steps(run: &Path, lines: usize) {
    let started = Instant::now();
    while fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count() < lines {
        assert!(started.elapsed() < Duration::from_secs(120), "no step came");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status().unwrap().success());
}

#[test]
fn stopped_or_killed_and_resumed_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let whole = dir.path().join("whole");
    ok(&["run", config.to_str().unwrap(), "--run-dir", whole.to_str().unwrap()]);

    // Asked to stop: it finishes its step, saves, exits 0 and says how to go on.
    let stopped = dir.path().join("stopped");
    let child = start(&config, &stopped);
    wait_for_steps(&stopped, 2);
    signal(&child, "INT");
    assert!(child.wait_with_output().unwrap().status.success());
    assert!(!stopped.join("export").exists(), "it was stopped before its end");
    let said = ok(&["resume", stopped.to_str().unwrap()]);
    assert!(said.contains("resuming"), "{said}");
    assert_same(&whole, &stopped);

    // Killed: at the start, before and after the first checkpoint, late.
    for (i, steps) in [0, 1, 5, 9].into_iter().enumerate() {
        let killed = dir.path().join(format!("killed-{i}"));
        let mut child = start(&config, &killed);
        wait_for_steps(&killed, steps);
        if steps == 0 {
            while !killed.join("provenance.json").exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        ok(&["resume", killed.to_str().unwrap()]);
        assert_same(&whole, &killed);
    }

    // A finished run resumes to itself.
    ok(&["resume", whole.to_str().unwrap()]);
    assert_same(&whole, &stopped);

    // Not into a folder that is in use by its own results, and not with another plan.
    let said = fails(&["run", config.to_str().unwrap(), "--run-dir", whole.to_str().unwrap()], 6);
    assert!(said.contains("run::folder_not_empty") && said.contains("tunehost resume"), "{said}");
    let resolved = whole.join("config.resolved.toml");
    let text = fs::read_to_string(&resolved).unwrap();
    fs::write(
        &resolved,
        text.replace("micro_batch = 2", "micro_batch = 1").replace("accumulation = 3", "accumulation = 6"),
    )
    .unwrap();
    let said = fails(&["resume", whole.to_str().unwrap()], 6);
    assert!(said.contains("run::changed") && said.contains("train.micro_batch: was 2, is 1"), "{said}");
}

#[test]
fn a_broken_checkpoint_is_passed_over_and_a_changed_base_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = dir.path().join("run");
    let child = start(&config, &run);
    wait_for_steps(&run, 10);
    signal(&child, "TERM");
    assert!(child.wait_with_output().unwrap().status.success());
    let mut saved: Vec<PathBuf> = fs::read_dir(run.join("checkpoints")).unwrap().map(|e| e.unwrap().path()).collect();
    saved.sort();
    let newest = saved.last().unwrap().join("adapter_model.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let out = common::output(&["resume", run.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    assert!(stderr.contains("passed over") && stderr.contains("adapter_model.safetensors"), "{stderr}");

    fs::write(dir.path().join("records.jsonl"), r#"{"id": "x", "text": "other"}"#).unwrap();
    let said = fails(&["resume", run.to_str().unwrap()], 6);
    assert!(said.contains("run::changed") && said.contains("corpus[0]"), "{said}");
}
