//! Plugins in a run: what they decide is done and written down, and one that fails costs nothing that was computed.

mod common;

use common::{fails, ok, root, tunehost};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A short run of the bundled base, with `plugins` as its `[plugins]` tables.
fn config(dir: &Path, plugins: &str) -> PathBuf {
    let fixtures = root().join("tests/fixtures");
    let fixtures = fixtures.display();
    let line = |i: usize| {
        let answer = "word ".repeat(1 + i % 7);
        format!(
            r#"{{"id": "r{i}", "messages": [{{"role": "user", "content": "Say {}."}}, {{"role": "assistant", "content": "{answer}"}}]}}"#,
            i % 42
        )
    };
    fs::write(dir.join("records.jsonl"), (0..48).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let text = format!(
        r#"
name = "short"
model.base = "{fixtures}/tiny-base"
run.root = "runs"
eval.max_records_per_root = 0
export.merged = false
[data]
template = "{fixtures}/tiny-base/chat_template.jinja"
max_seq_len = 128
held_out = 0
sources = [{{ path = "records.jsonl", root = "records" }}]
[train]
epochs = 20
max_steps = 60
micro_batch = 2
accumulation = 3
lr = 1e-3
warmup_steps = 3
{plugins}
"#
    );
    let path = dir.join("short.toml");
    fs::write(&path, text).unwrap();
    path
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

/// Tables that name a component that breaks the contract, and how it is to break it.
fn hostile(kind: &str, name: &str, act: &str) -> String {
    let path = root().join(format!("plugins/dist/hostile/{name}.wasm"));
    format!("[plugins]\n{kind} = \"{}\"\n[plugins.config.{kind}]\nact = \"{act}\"", path.display())
}

#[test]
fn a_filter_decides_what_is_trained_and_the_run_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let run = dir.path().join("run");
    let args = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap(), "--set", "train.max_steps=1"];
    let stdout = ok(&[&args[..], &["--plugins", "corpus-filter=length-and-dedup"]].concat());
    // The last six records ask and answer what the first six did.
    let report = json(&run.join("filter-report.json"));
    let of_root = &report["roots"][0];
    assert_eq!(report["filter"], "length-and-dedup 0.1.0");
    assert_eq!((&of_root["records"], &of_root["dropped"]), (&48.into(), &6.into()));
    assert_eq!(of_root["reasons"]["copy of an earlier record"], 6);
    let ids: Vec<&str> = report["records"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["r42", "r43", "r44", "r45", "r46", "r47"]);
    assert!(stdout.contains("6  copy of an earlier record"), "{stdout}");
    let provenance = json(&run.join("provenance.json"));
    let plugins = provenance["inputs"]["plugins"].as_object().unwrap();
    let names: Vec<&str> = plugins.values().map(|plugin| plugin["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["wall-clock", "length-and-dedup", "strict", "peft-adapter", "bucket-to-pair"]);
}

#[test]
fn a_replaced_record_is_trained_as_it_is_now() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let tokens = |extra: &[&str]| {
        let config = config.to_str().unwrap();
        let out = ok(&[&["corpus", "batches", config, "--json"], extra].concat());
        serde_json::from_str::<Value>(&out).unwrap()["tokens"].as_u64().unwrap()
    };
    let replace =
        r#"plugins.config.corpus_filter={replace = [{pattern = "word", with = "word word"}], roles = ["assistant"]}"#;
    let (plain, longer) = (tokens(&[]), tokens(&["--plugins", "corpus-filter=regex-filter", "--set", replace]));
    assert!(longer > plain, "{plain} -> {longer}");
}

#[test]
fn a_replacement_that_is_no_record_stops_the_run_by_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &hostile("corpus_filter", "hostile-filter", "unknown-shape"));
    let stderr = fails(&["run", config.to_str().unwrap()], 5);
    for part in
        ["error[plugin::invalid_verdicts]", "hostile-filter 0.1.0", "filter: what is to replace record \"r0\"", "prose"]
    {
        assert!(stderr.contains(part), "{part} is not in\n{stderr}");
    }
}

/// A scheduler that never answers, one that remembers too much: the run ends with its error, and
/// what was computed is there.
#[test]
fn a_scheduler_that_fails_costs_no_step() {
    for (act, code, step) in [("loop", "plugin::deadline", 1), ("save-too-much", "plugin::memory_too_large", 3)] {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), &hostile("checkpoint_scheduler", "hostile-scheduler", act));
        let run = dir.path().join("run");
        let stderr = fails(&["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()], 5);
        assert!(stderr.contains(code) && stderr.contains("hostile-scheduler 0.1.0"), "{stderr}");
        assert!(stderr.contains(&format!("step {step} is saved")), "{stderr}");
        assert!(run.join(format!("checkpoints/step-{step:06}/checkpoint.json")).is_file());
        assert_eq!(json(&run.join("provenance.json"))["outcome"]["status"], "failed");
    }
}

/// A run that a window stopped goes on in the next one.
#[test]
fn a_window_can_be_moved_on_resume() {
    let settings = "[plugins]\ncheckpoint_scheduler = \"window\"\n[plugins.config.checkpoint_scheduler]\nuntil = \
                    \"2020-01-01T06:00:00Z\"";
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), settings);
    let run = dir.path().join("run");
    let run = run.to_str().unwrap();
    let stdout = ok(&["run", config.to_str().unwrap(), "--run-dir", run, "--set", "train.max_steps=12"]);
    assert!(stdout.contains("stopped after step 1:"), "{stdout}");
    let until = "plugins.config.checkpoint_scheduler.until=\"2099-01-01T06:00:00Z\"";
    let stderr = fails(&["resume", run, "--set", until, "--set", "train.lr=0.5"], 6);
    assert!(
        stderr.contains("run::changed") && stderr.contains("train.lr: was") && !stderr.contains("until: was"),
        "{stderr}"
    );
    let stdout = ok(&["resume", run, "--set", until]);
    assert!(stdout.contains("12 steps, "), "{stdout}");
}

/// What a scheduler remembers goes with the checkpoint: killed and resumed, it stops the run at the step at which it would
/// have stopped it anyway.
#[test]
fn a_scheduler_remembers_over_a_kill() {
    let settings = "[plugins]\ncheckpoint_scheduler = \"plateau\"\n[plugins.config.checkpoint_scheduler]\nminutes = 1e-4\n\
                    window = 4\npatience = 16\nmin_delta = 50";
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), settings);
    let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
    let run = |to: &Path| ["run", config.to_str().unwrap(), "--run-dir", to.to_str().unwrap()].map(String::from);
    let stdout = ok(&run(&whole).each_ref().map(String::as_str));
    assert!(stdout.contains("not below"), "{stdout}");

    let args = run(&killed);
    let mut child = tunehost(&args.each_ref().map(String::as_str)).stdout(Stdio::null()).spawn().unwrap();
    let (started, saved) = (Instant::now(), killed.join("checkpoints/step-000006"));
    while !saved.exists() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    ok(&["resume", killed.to_str().unwrap()]);

    let stopped = |run: &Path| json(&run.join("provenance.json"))["outcome"]["step"].as_u64().unwrap();
    assert_eq!(
        (stopped(&whole), stopped(&killed)),
        (20, 20),
        "4 steps to the first mean, then 16 without a better one"
    );
    for file in ["checkpoint_scheduler.memory", "adapter_model.safetensors", "optimizer.safetensors"] {
        let of = |run: &Path| fs::read(run.join("checkpoints/step-000020").join(file)).unwrap();
        assert_eq!(of(&whole), of(&killed), "{file}");
    }
}
