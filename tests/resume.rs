//! A run that is stopped or killed and resumed ends with the bytes of one that was not.

mod common;

use common::short::provenance;
use common::{fails, ok, tunehost};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tunehost::run::checkpoint;

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

/// `--until` long ahead with a margin that reaches beyond it: the window closes after one step.
const CLOSES_AT_ONCE: [&str; 4] =
    ["--until", "2099-01-01T00:00:00+02:00", "--set", "plugins.config.checkpoint_scheduler.margin_seconds=4294967295"];

/// A run of one step, stopped by its window and ready to be resumed.
fn one_step(config: &Path, run: &Path) -> String {
    let args = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    ok(&[&args[..], &CLOSES_AT_ONCE].concat())
}

#[test]
fn a_run_over_several_windows_is_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let (whole, run) = (dir.path().join("whole"), dir.path().join("windows"));
    ok(&["run", config.to_str().unwrap(), "--run-dir", whole.to_str().unwrap()]);

    // Started with the scheduler of the configuration, then resumed for one window after the other.
    let child = start(&config, &run);
    wait_for_steps(&run, 2);
    signal(&child, "TERM");
    assert!(child.wait_with_output().unwrap().status.success());
    let steps = || fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count();
    let resume = ["resume", run.to_str().unwrap()];
    for window in 0..2 {
        let before = steps();
        let said = ok(&[&resume[..], &CLOSES_AT_ONCE].concat());
        assert_eq!(steps(), before + 1, "window {window}");
        assert!(said.contains("until       20") && said.contains("the checkpoint scheduler stopped it: "), "{said}");
        assert!(said.contains(&format!("saved; to go on: tunehost resume {} --until ", run.display())), "{said}");
        assert!(!run.join("export").exists());
    }
    ok(&[&resume[..], &CLOSES_AT_ONCE[..2]].concat());
    // Only what a scheduler remembers is in one of the last checkpoints and not in the other.
    let but_memory = |run: &Path| {
        let mut contents = contents(run);
        contents.retain(|name, _| !name.ends_with("checkpoint.json"));
        contents
    };
    assert!(but_memory(&whole) == but_memory(&run));
    // Every resume says where it took up, and that another scheduler decided.
    let provenance = provenance(&run);
    let resumes = provenance["resumes"].as_array().unwrap();
    assert_eq!(resumes.len(), 3);
    for (resume, next) in resumes.iter().zip(&resumes[1..]) {
        assert_eq!(resume["from_step"].as_u64().unwrap() + 1, next["from_step"].as_u64().unwrap());
        let allowed = resume["allowed"].as_array().unwrap();
        assert_eq!(allowed[0]["key"], "plugin/checkpoint_scheduler");
        assert!(allowed[0]["is"].as_str().unwrap().starts_with("window "), "{allowed:?}");
        assert_eq!(allowed.len(), 1);
    }
}

#[test]
fn whatever_changed_is_refused_with_both_values_and_can_be_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let bundled = common::root();
    let base = dir.path().join("base");
    fs::create_dir(&base).unwrap();
    for file in fs::read_dir(bundled.join("tests/fixtures/tiny-base")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), base.join(file.file_name())).unwrap();
    }
    let dist = bundled.join("plugins/dist");
    fs::copy(dist.join("shuffled.wasm"), dir.path().join("own.wasm")).unwrap();
    let text = fs::read_to_string(&config).unwrap();
    let text = text.replace(&format!("{}/tests/fixtures/tiny-base", bundled.display()), &base.display().to_string());
    let text = text.replace("[plugins]", "[template]\naccept_mismatch = true\n[plugins]\nsampler = \"./own.wasm\"");
    fs::write(&config, text).unwrap();
    let run = dir.path().join("run");
    one_step(&config, &run);
    let resume = ["resume", run.to_str().unwrap()];

    // A byte more or another at the end of each file; the last of the weights is a weight.
    let files = [
        ("base/config.json", "base/config.json"),
        ("base/model.safetensors", "base/model.safetensors"),
        ("base/tokenizer.json", "tokenizer"),
        ("base/chat_template.jinja", "template"),
        ("records.jsonl", "corpus[0]"),
    ];
    for (file, key) in files {
        let path = dir.path().join(file);
        let whole = fs::read(&path).unwrap();
        let mut changed = whole.clone();
        if file.ends_with("safetensors") {
            *changed.last_mut().unwrap() ^= 1
        } else {
            changed.push(b'\n')
        }
        fs::write(&path, &changed).unwrap();
        assert_changed(&fails(&resume, 6), key);
        fs::write(&path, whole).unwrap();
    }
    let own = dir.path().join("own.wasm");
    fs::copy(dist.join("in-order.wasm"), &own).unwrap();
    assert_changed(&fails(&resume, 6), "plugin/sampler");
    // Allowed, it would still have to plan what is written down.
    let said = fails(&[&resume[..], &["--allow", "plugin"]].concat(), 6);
    assert!(said.contains("run::order_changed"), "{said}");
    assert_eq!(provenance(&run)["resumes"], Value::Array(Vec::new()), "a refused resume is none");
    fs::copy(dist.join("shuffled.wasm"), &own).unwrap();
    let said = fails(&[&resume[..], &["--set", "lora.rank=8", "--allow", "lora.rank"]].concat(), 6);
    assert!(said.contains("lora.rank: was 16, is 8 (--allow cannot help: "), "{said}");

    // Another instruction set, and another learning rate beside it, each allowed by its own key.
    let resumed = |extra: &[&str]| {
        let out = tunehost(&[&resume[..], extra].concat()).env("TUNEHOST_ISA", "portable").output().unwrap();
        (out.status.code().unwrap(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, said) = resumed(&[]);
    assert_eq!(code, 6, "{said}");
    assert_changed(&said, "kernel/lora_linear");
    let lr = ["--set", "train.lr=2e-3", "--allow", "kernel"];
    let (code, said) = resumed(&lr);
    assert!(code == 6 && said.contains("train.lr: was 0.001, is 0.002") && !said.contains("kernel/"), "{said}");
    let (code, said) = resumed(&[&lr[..], &["--allow", "train.lr"]].concat());
    assert!(code == 0 && said.contains("allowed and noted in provenance: train.lr: was 0.001, is 0.002"), "{said}");
    let allowed = provenance(&run)["resumes"][0]["allowed"].clone();
    let keys: Vec<&str> = allowed.as_array().unwrap().iter().map(|change| change["key"].as_str().unwrap()).collect();
    assert!(keys.contains(&"kernel/rope") && keys.contains(&"train.lr"), "{keys:?}");
    // What was allowed once stays allowed.
    assert_eq!(resumed(&lr[..2]).0, 0);
}

/// A finished run of three steps whose checkpoints of steps 2 and 3 are kept.
fn short_run(dir: &Path) -> PathBuf {
    let config = common::short::config(dir, "");
    let run = dir.join("run");
    let args = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    ok(&[&args[..], &["--set", "checkpoint.keep_last=2"]].concat());
    run
}

#[test]
fn what_was_computed_otherwise_is_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let run = short_run(dir.path());
    let names = ["held-out/step-000003.json", "held-out/step-000002.json", "export/adapter/adapter_model.safetensors"];
    let read = |name: &str| fs::read(run.join(name)).expect(name);
    let [losses, losses_before, exported] = names.map(read);
    fs::remove_dir_all(run.join("checkpoints/step-000003")).unwrap();
    let resume = ["resume", run.to_str().unwrap()];
    ok(&[&resume[..], &["--set", "train.lr=5e-2", "--allow", "train.lr"]].concat());
    assert!(read(names[0]) != losses && read(names[2]) != exported);
    assert!(read("held-out.earlier/step-000003.json") == losses, "nothing is deleted");
    assert!(read("held-out.earlier/step-000002.json") == losses_before);
    assert!(read("export.earlier/adapter/adapter_model.safetensors") == exported);
    ok(&["runs", "verify", run.to_str().unwrap(), "--hashes-only"]);

    // Without it, a later one is told that it goes on with the value that the run was started with.
    let out = common::output(&resume);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("given too: train.lr: was 0.001, is 0.05"), "{said}");
}

#[test]
fn a_finished_run_stays_what_it_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let run = short_run(dir.path());
    let resume = ["resume", run.to_str().unwrap()];
    let verify = ["runs", "verify", run.to_str().unwrap(), "--hashes-only"];
    let outcome = provenance(&run)["outcome"].clone();
    ok(&[&resume[..], &["--set", "window.open=[[\"true\"]]"]].concat());
    ok(&verify);
    let changed = ["export/adapter/adapter_config.json", "truncation-report.json"].map(|name| run.join(name));
    let whole = changed.each_ref().map(|path| fs::read(path).unwrap());
    changed.iter().for_each(|path| fs::write(path, "{}").unwrap());
    ok(&resume);
    let said = fails(&verify, 6);
    assert!(
        said.contains("2 of ") && said.contains("truncation-report.json, export/adapter/adapter_config.json"),
        "{said}"
    );
    changed.iter().zip(&whole).for_each(|(path, bytes)| fs::write(path, bytes).unwrap());

    fails(&[&resume[..], &["--set", "window.open=[[\"false\"]]"]].concat(), 6);
    ok(&verify);
    let metrics = run.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, text.replacen('{', "x", 1)).unwrap();
    fails(&resume, 6);
    fs::write(&metrics, text).unwrap();
    ok(&verify);
    let kept = provenance(&run)["outcome"].clone();
    assert_eq!((&kept["exports"], &kept["held_out"]), (&outcome["exports"], &outcome["held_out"]));
    assert_eq!((&kept["status"], &kept["best"]), (&Value::from("finished"), &outcome["best"]));

    // A checkpoint of another configuration is no place to go on from.
    let path = run.join("checkpoints/step-000003");
    let mut other = checkpoint::read(&path).unwrap();
    other.config_sha256 = "0".repeat(64);
    fs::remove_dir_all(&path).unwrap();
    checkpoint::write(&run.join("checkpoints"), &other).unwrap();
    let said = fails(&resume, 6);
    assert!(said.contains("run::checkpoint_foreign") && said.contains("step-000003"), "{said}");
}

/// That a resume was refused for a change of `key`, naming two values.
fn assert_changed(said: &str, key: &str) {
    let line = said.lines().find(|line| line.trim_start().starts_with(&format!("{key}: was "))).expect(said);
    let (was, is) = line.split_once(": was ").unwrap().1.split_once(", is ").unwrap();
    assert!(said.contains("run::changed") && was != is && was != "absent" && is != "absent", "{said}");
}
