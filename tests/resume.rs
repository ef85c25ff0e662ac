//! A run that is stopped or killed and resumed ends with the bytes of one that was not.

mod common;

use common::short::provenance;
use common::{fails, ok, send, tunehost};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
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
    send("INT", &child);
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
    send("TERM", &child);
    assert!(child.wait_with_output().unwrap().status.success());
    let saved = checkpoint::folders(&run.join("checkpoints")).unwrap();
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

/// A time for `--until` that is nearer than the minute which its scheduler keeps free: the window closes after one step.
fn soon() -> String {
    (Timestamp::now() + SignedDuration::from_secs(50)).to_string()
}

/// A run of one step, stopped by its window and ready to be resumed.
fn one_step(config: &Path, run: &Path) -> String {
    ok(&["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap(), "--until", &soon()])
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
    send("TERM", &child);
    assert!(child.wait_with_output().unwrap().status.success());
    let steps = || fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count();
    let resume = ["resume", run.to_str().unwrap()];
    for window in 0..2 {
        let before = steps();
        let said = ok(&[&resume[..], &["--until", &soon()]].concat());
        assert_eq!(steps(), before + 1, "window {window}");
        assert!(said.contains("until       20") && said.contains("the checkpoint scheduler stopped it: "), "{said}");
        assert!(said.contains(&format!("saved; to go on: tunehost resume {} --until ", run.display())), "{said}");
        assert!(!run.join("export").exists());
    }
    // A window was one process's: the next one, of which none was asked, goes on to the end.
    ok(&resume);
    assert_same(&whole, &run);
    assert_eq!(ok(&["runs", "diff", whole.to_str().unwrap(), run.to_str().unwrap()]).trim(), "no difference");
    // Every resume says where it took up, and when each window was to close stands with the clocks.
    let resumes = provenance(&run)["resumes"].clone();
    let from: Vec<u64> = resumes.as_array().unwrap().iter().map(|r| r["from_step"].as_u64().unwrap()).collect();
    assert_eq!(from, [from[0], from[0] + 1, from[0] + 2]);
    let timing = fs::read_to_string(run.join("timing.jsonl")).unwrap();
    let lines = timing.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let windows: Vec<Value> = lines.filter(|line| line["kind"] == "until").collect();
    assert_eq!(windows.iter().map(|window| window["step"].as_u64().unwrap()).collect::<Vec<_>>(), from[..2]);
    assert!(windows.iter().all(|w| w["plugin"].as_str().unwrap().starts_with("window ")), "{windows:?}");
    assert!(windows.iter().all(|w| w["until"].as_str().unwrap().starts_with("20")), "{windows:?}");
}

#[test]
fn a_run_whose_own_scheduler_is_window_is_given_another_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let text = fs::read_to_string(&config).unwrap().replace("\"every-n-steps\"", "\"window\"");
    fs::write(&config, text.replace("n = 4", "until = \"2001-01-01T00:00:00Z\"")).unwrap();
    let run = dir.path().join("run");
    // Its own time is long over, so that each process would do one step.
    let said = ok(&["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()]);
    assert!(said.contains("saved; to go on: ") && said.contains(" --until TIME"), "{said}");
    ok(&["resume", run.to_str().unwrap(), "--until", "2099-01-01T00:00:00Z"]);
    assert_eq!(provenance(&run)["outcome"]["status"], "finished");
    let until = "plugins.config.checkpoint_scheduler.until";
    assert_eq!(provenance(&run)["config"][until]["value"], "\"2001-01-01T00:00:00Z\"");
}

#[test]
fn whatever_changed_is_refused_with_both_values_and_can_be_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let bundled = common::root();
    let base = common::copy_base(&dir.path().join("base"));
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
    let said = fails(&resume, 6);
    assert_changed(&said, "plugin/sampler");
    // Allowed, it would still have to plan what is written down, which is said at once.
    assert!(said.contains("--allow cannot help: the plan of epoch 0 is not the one in "), "{said}");
    let said = fails(&[&resume[..], &["--allow", "plugin"]].concat(), 6);
    assert!(said.contains("run::order_changed") && !said.contains("noted in provenance"), "{said}");
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
    let until = soon();
    let (code, said) = resumed(&[&lr[..], &["--allow", "train.lr", "--until", &until]].concat());
    assert!(code == 0 && said.contains("allowed and noted in provenance: train.lr: was 0.001, is 0.002"), "{said}");
    let allowed = provenance(&run)["resumes"][0]["allowed"].clone();
    let keys: Vec<&str> = allowed.as_array().unwrap().iter().map(|change| change["key"].as_str().unwrap()).collect();
    assert!(keys.contains(&"kernel/rope") && keys.contains(&"train.lr"), "{keys:?}");
    // What was allowed is what the run is from then on: another value is refused, also the one that it started with.
    for value in ["0.003", "0.001"] {
        let (code, said) = resumed(&["--set", &format!("train.lr={value}")]);
        let line = format!("train.lr: was 0.002, is {value} (0.001 when the run was started)");
        assert!(code == 6 && said.contains(&line), "{said}");
    }
    let (code, said) = resumed(&[]);
    assert_eq!(code, 0, "{said}");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rates: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["kind"] == "step")
        .map(|line| line["lr"].as_f64().unwrap())
        .collect();
    // Three steps of warm-up, of which the first was done with the other rate.
    assert!(rates.len() == STEPS && (rates[2] - 2e-3).abs() < 1e-9, "{rates:?}");
    assert_eq!(provenance(&run)["resumes"][1]["allowed"], Value::Array(Vec::new()));
    // What was computed since is as it was recorded, with what was accepted.
    let verify = ["runs", "verify", run.to_str().unwrap(), "--steps", "3"];
    let out = tunehost(&verify).env("TUNEHOST_ISA", "portable").output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("recomputed: steps "), "{said}");
}

/// The run as if it had been killed when all but its end was written down.
fn without_end(run: &Path) {
    let mut record = provenance(run);
    record["outcome"] = Value::Null;
    fs::write(run.join("provenance.json"), record.to_string()).unwrap();
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
    without_end(&run);
    let resume = ["resume", run.to_str().unwrap()];
    ok(&[&resume[..], &["--set", "train.lr=5e-2", "--allow", "train.lr"]].concat());
    assert!(read(names[0]) != losses && read(names[2]) != exported);
    assert!(read("held-out.earlier/step-000003.json") == losses, "nothing is deleted");
    assert!(read("held-out.earlier/step-000002.json") == losses_before);
    assert!(read("export.earlier/adapter/adapter_model.safetensors") == exported);
    ok(&["runs", "verify", run.to_str().unwrap(), "--hashes-only"]);

    // The next one goes on with the same value, and takes over what was computed with it.
    let losses = read(names[0]);
    without_end(&run);
    let said = ok(&resume);
    assert!(said.contains("train.lr=0.05: an earlier resume of this run let it change"), "{said}");
    assert!(read(names[0]) == losses && !run.join("held-out.earlier-2").exists());
}

#[test]
fn a_finished_run_stays_what_it_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let run = short_run(dir.path());
    let resume = ["resume", run.to_str().unwrap()];
    let verify = ["runs", "verify", run.to_str().unwrap(), "--hashes-only"];
    let recorded = fs::read(run.join("provenance.json")).unwrap();
    let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
    // No window is opened for it.
    let said = ok(&[&resume[..], &["--set", "window.open=[[\"false\"]]"]].concat());
    assert!(said.contains("is finished after step 3, since 20") && said.contains("nothing is left to do"), "{said}");
    ok(&verify);
    // What was changed since is for `verify` to find, and what is gone is named; nothing is computed again.
    let changed = run.join("truncation-report.json");
    let whole = fs::read(&changed).unwrap();
    fs::write(&changed, "{}").unwrap();
    ok(&resume);
    let said = fails(&verify, 6);
    assert!(said.contains("1 of ") && said.contains("truncation-report.json"), "{said}");
    fs::write(&changed, whole).unwrap();
    fs::remove_dir_all(run.join("checkpoints/step-000003")).unwrap();
    fs::remove_dir_all(run.join("export/merged")).unwrap();
    let said = fails(&resume, 6);
    assert!(said.contains("run::incomplete") && said.contains("is finished after step 3"), "{said}");
    assert!(said.contains("checkpoints/step-000003") && said.contains("export/merged/model.safetensors"), "{said}");
    assert!(said.contains("restore it from a copy"), "{said}");
    assert!(fs::read(run.join("metrics.jsonl")).unwrap() == metrics && !run.join("export/merged").exists());
    assert!(fs::read(run.join("provenance.json")).unwrap() == recorded);
}

#[test]
fn a_checkpoint_that_the_run_did_not_write_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let run = short_run(dir.path());
    // Of the same configuration, and whole: of another run all the same.
    let path = run.join("checkpoints/step-000009");
    let mut other = checkpoint::read(&run.join("checkpoints/step-000003")).unwrap();
    other.step = 9;
    let elsewhere = checkpoint::write(&dir.path().join("elsewhere"), &other).unwrap();
    fs::rename(elsewhere, &path).unwrap();
    without_end(&run);
    let out = common::output(&["resume", run.to_str().unwrap(), "--set", "checkpoint.keep_last=1"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("left alone: ") && said.contains("step-000009"), "{said}");
    assert!(checkpoint::read(&path).unwrap() == other && !run.join("checkpoints/step-000002").exists());
    let said = fails(&["runs", "verify", run.to_str().unwrap(), "--hashes-only"], 6);
    assert!(said.contains("1 of ") && said.contains("checkpoint/step-000009"), "{said}");

    fs::remove_file(run.join("checkpoints/written.jsonl")).unwrap();
    without_end(&run);
    let said = fails(&["resume", run.to_str().unwrap()], 6);
    assert!(said.contains("run::checkpoints_unknown") && said.contains("restore it from a copy"), "{said}");
}

#[test]
fn a_log_that_was_changed_is_named_by_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = dir.path().join("run");
    one_step(&config, &run);
    let resume = ["resume", run.to_str().unwrap()];
    for (name, was, is, code) in [
        ("metrics.jsonl", "\"tokens\":", "\"tokens\":1", "run::log_broken"),
        ("order-manifest.jsonl", "r1", "r1x", "run::order_broken"),
    ] {
        let path = run.join(name);
        let whole = fs::read_to_string(&path).unwrap();
        let changed = whole.replacen(was, is, 1);
        let cut = whole[..whole.len() - 9].to_string();
        for text in [changed, cut, String::new()] {
            fs::write(&path, &text).unwrap();
            let said = fails(&resume, 6);
            let line = 1 + whole.lines().zip(text.lines()).take_while(|(a, b)| a == b).count();
            assert!(said.contains(code) && said.contains(&format!("{name}:{line}: ")), "{said}");
            assert!(said.contains("restore "), "{said}");
            assert_eq!(provenance(&run)["outcome"]["status"], "stopped", "what is refused is no end of the run");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, whole).unwrap();
    }
    let metrics = run.join("metrics.jsonl");
    fs::remove_file(&metrics).unwrap();
    let said = fails(&resume, 6);
    assert!(said.contains("metrics.jsonl is gone") && said.contains("the checkpoint holds those lines: cp "), "{said}");
    // Which the checkpoint holds, and the plan; of clock readings nothing hangs.
    fs::write(run.join("timing.jsonl"), "{}\n").unwrap();
    let checkpoints = run.join("checkpoints/step-000001");
    fs::copy(checkpoints.join("metrics.jsonl"), run.join("metrics.jsonl")).unwrap();
    fs::remove_file(run.join("order-manifest.jsonl")).unwrap();
    let out = common::output(&resume);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("clock readings before step 2 are lost; what was there"), "{said}");
    ok(&["runs", "verify", run.to_str().unwrap(), "--hashes-only"]);
}

#[test]
fn steps_that_are_computed_again_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = dir.path().join("run");
    one_step(&config, &run);
    ok(&["resume", run.to_str().unwrap(), "--until", &soon()]);
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let out = common::output(&["resume", run.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.contains("no checkpoint is left: steps 1 to 2 were computed before, and are computed again"),
        "{said}"
    );
    assert!(out.status.success(), "{said}");
}

/// That a resume was refused for a change of `key`, naming two values.
fn assert_changed(said: &str, key: &str) {
    let line = said.lines().find(|line| line.trim_start().starts_with(&format!("{key}: was "))).expect(said);
    let (was, is) = line.split_once(": was ").unwrap().1.split_once(", is ").unwrap();
    assert_eq!(is.ends_with("records.jsonl)"), key == "corpus[0]", "a file of the corpus is named: {line}");
    assert!(said.contains("run::changed") && was != is && was != "absent" && is != "absent", "{said}");
}
