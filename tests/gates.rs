//! Gates as a person meets them: what stops a run, what lets it through, and what provenance says.

mod common;

use common::short::provenance;
use common::{fails, ok, root, tunehost};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The bundled base on records of two roots, the one after the other.
fn config(dir: &Path) -> PathBuf {
    let base = root().join("tests/fixtures/tiny-base");
    let record = |i: usize| format!(r#"{{"id": "r{i}", "text": "{}"}}"#, format!("word {i} ").repeat(3 + i % 5));
    for (name, from) in [("one", 0), ("two", 100)] {
        let lines: Vec<String> = (from..from + 12).map(record).collect();
        fs::write(dir.join(format!("{name}.jsonl")), lines.join("\n")).unwrap();
    }
    let path = dir.join("short.toml");
    let text = format!(
        r#"
name = "short"
model.base = "{}"
data = {{ template = "base", max_seq_len = 128, held_out = 0.0, sources = [{{ path = "one.jsonl", root = "one" }}, {{ path = "two.jsonl", root = "two" }}] }}
train = {{ micro_batch = 1, accumulation = 4, lr = 1e-3 }}
export.merged = false
"#,
        base.display()
    );
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn each_gate_says_what_it_found_and_which_key_lets_it_through() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run_dir = dir.path().join("run");
    let run = ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    let with = |more: &[&'static str]| [&run[..], more].concat();
    for (more, code, exit, says) in [
        (&["--plugins", "sampler=in-order"][..], "gate::single_root", 7, "6 of 6 accumulation windows (100%)"),
        (&["--set", "gates.tokens_per_step_planned=9000"], "gate::tokens_per_step", 7, "9,000 planned"),
        (&["--set", "model.quantize=nf4"], "gate::unquantised", 7, "experts.gate_up_proj: "),
        (&["--set", "model.quantize=int8"], "config::invalid_value", 2, "int4, nf4, nvfp4"),
        (&["--set", "gates.not_finite=off"], "config::invalid_value", 2, "stop or warn"),
    ] {
        let said = fails(&with(more), exit);
        assert!(said.contains(code) && said.contains(says), "{said}");
        assert!(!run_dir.exists(), "nothing is made before the plan can be trusted: {more:?}");
        assert_eq!(exit == 7 && !said.contains("quantize"), said.contains("=warn"), "{said}");
    }

    // Three gates warn, one is off, and provenance has it all.
    let more =
        ["--plugins", "sampler=in-order", "--set", "gates.single_root=warn", "--set", "gates.tokens_per_step=off"];
    let more = [&more[..], &["--set", "gates.loss_spike_steps=1", "--set", "gates.loss_spike_nats=1e-9"]].concat();
    let out = tunehost(&with(&more)).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success() && said.contains("warning: gate single_root: 6 of 6"), "{said}");
    assert!(said.contains("warning: gate loss_spike: step "), "{said}");
    let provenance = provenance(&run_dir);
    let verdict = |name: &str| provenance["gates"][name]["verdict"].as_str().unwrap().to_string();
    assert_eq!(["single_root", "loss_spike", "tokens_per_step"].map(verdict), ["warned", "warned", "off"]);
    for name in [
        "device",
        "quantize",
        "kernels",
        "template",
        "nothing_trained",
        "free_disk",
        "free_memory",
        "not_finite",
        "zero_gradient",
        "inert_adapter",
    ] {
        assert_eq!(verdict(name), "passed", "{name}");
    }
}

#[test]
fn an_adapter_that_does_not_move_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run_dir = dir.path().join("run");
    // An update that is nothing in f32.
    let rate = ["--set", "train.lr=1e-60", "--set", "train.warmup_steps=0"];
    let run = ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    let said = fails(&[&run[..], &rate].concat(), 7);
    assert!(said.contains("gate::inert_adapter") && said.contains("gates.inert_adapter=warn"), "{said}");
    assert_eq!(provenance(&run_dir)["gates"]["inert_adapter"]["verdict"], "stopped");
    assert!(!run_dir.join("checkpoints").exists() && !run_dir.join("export").exists());
    ok(&["resume", run_dir.to_str().unwrap(), "--set", "gates.inert_adapter=warn"]);
    assert_eq!(provenance(&run_dir)["gates"]["inert_adapter"]["verdict"], "warned");
}

#[test]
fn what_is_not_as_asked_stops_or_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = |name: &str, more: &[&str]| {
        let run_dir = dir.path().join(name);
        let args =
            ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap(), "--set", "train.max_steps=1"];
        let out = tunehost(&[&args[..], more].concat()).env("TUNEHOST_ISA", "portable").output().unwrap();
        let gates = run_dir.exists().then(|| provenance(&run_dir)["gates"].clone());
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned(), gates)
    };
    // No kernel of this instruction set multiplies bf16.
    let bf16 = ["--set", "model.weights=bf16"];
    let (code, said, gates) = run("kernel", &[&bf16[..], &["--set", "gates.kernels=stop"]].concat());
    assert!(code == Some(7) && gates.is_none(), "{said}");
    assert!(said.contains("gate::kernels") && said.contains("lora_linear: asked for cpu bf16, resolved to "), "{said}");
    let (code, said, gates) = run("kernel", &bf16);
    assert!(code == Some(0) && said.contains("warning: gate kernels: "), "{said}");
    assert_eq!(gates.unwrap()["kernels"]["verdict"], "warned");

    let template = dir.path().join("other.jinja");
    let shipped = fs::read_to_string(root().join("tests/fixtures/tiny-base/chat_template.jinja")).unwrap();
    fs::write(&template, shipped + "{# another #}").unwrap();
    let other = format!("data.template={}", template.display());
    let (code, said, gates) = run("template", &["--set", &other]);
    assert!(code == Some(3) && said.contains("corpus::template_mismatch") && gates.is_none(), "{said}");
    let (code, said, gates) = run("template", &["--set", &other, "--set", "template.accept_mismatch=true"]);
    assert_eq!((code, &gates.unwrap()["template"]["verdict"]), (Some(0), &"warned".into()), "{said}");
}

#[test]
fn a_warning_that_nobody_can_read_stops_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run_dir = dir.path().join("run");
    let more = ["--plugins", "sampler=in-order", "--set", "gates.single_root=warn"];
    let run = ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    let mut child =
        tunehost(&[&run[..], &more].concat()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // As where a terminal is gone, or a pager was left.
    drop((child.stdout.take(), child.stderr.take()));
    assert!(child.wait().unwrap().success());
    let provenance = provenance(&run_dir);
    assert_eq!(provenance["gates"]["single_root"]["verdict"], "warned");
    assert_eq!(provenance["outcome"]["status"], "finished");
}

#[test]
fn a_run_whose_loss_is_no_number_ends_and_provenance_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run_dir = dir.path().join("run");
    let run = ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    // So large a rate that the second step's numbers overflow; it is saved before.
    let rate =
        ["--set", "train.lr=1e30", "--set", "train.warmup_steps=0", "--plugins", "checkpoint-scheduler=every-n-steps"];
    let said = fails(&[&run[..], &rate, &["--set", "plugins.config.checkpoint_scheduler.n=1"]].concat(), 7);
    assert!(said.contains("gate::not_finite") && said.contains("step 2 has loss"), "{said}");
    assert!(said.contains("gates.not_finite=warn") && said.contains("tunehost resume"), "{said}");
    let provenance = || provenance(&run_dir);
    assert_eq!(provenance()["gates"]["not_finite"]["verdict"], "stopped");
    assert_eq!(provenance()["outcome"]["status"], "failed");
    // What lets a run go on may change on a resume: it decides nothing of what is computed.
    ok(&["resume", run_dir.to_str().unwrap(), "--set", "gates.not_finite=warn"]);
    let gate = &provenance()["gates"]["not_finite"];
    assert!(gate["verdict"] == "warned" && gate["found"].as_str().unwrap().starts_with("5 of 6 steps"), "{gate}");
}

#[test]
fn a_held_out_loss_that_is_no_number_stops_or_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run_dir = dir.path().join("run");
    let run = ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    // The first step's update is so large that nothing can be evaluated after it.
    let sets =
        ["train.lr=1e30", "train.warmup_steps=0", "data.held_out=0.2", "eval.every_steps=1", "train.max_steps=3"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let said = fails(&[&run[..], &sets].concat(), 4);
    assert!(said.contains("model::not_finite") && said.contains("gates.not_finite=warn"), "{said}");
    assert_eq!(provenance(&run_dir)["gates"]["not_finite_held_out"]["verdict"], "stopped");

    let out = tunehost(&["resume", run_dir.to_str().unwrap(), "--set", "gates.not_finite=warn"]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("gate not_finite: the loss of record "), "{said}");
    let record = provenance(&run_dir);
    let gate = &record["gates"]["not_finite_held_out"];
    assert!(gate["verdict"] == "warned" && gate["found"].as_str().unwrap().contains("is not finite"), "{gate}");
    assert_eq!((&record["outcome"]["status"], &record["outcome"]["best"]), (&"finished".into(), &Value::Null));
    // What is no number is null, and can be read.
    ok(&["runs", "show", run_dir.to_str().unwrap()]);
    ok(&["runs", "verify", run_dir.to_str().unwrap(), "--hashes-only"]);
}

#[test]
fn the_disk_must_hold_the_checkpoints_that_are_there_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let every = ["--plugins", "checkpoint-scheduler=every-n-steps", "--set", "plugins.config.checkpoint_scheduler.n=1"];
    let mib = |name: &str, more: &[&str]| {
        let run_dir = dir.path().join(name);
        let run =
            ["run", config.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap(), "--set", "train.max_steps=4"];
        ok(&[&run[..], &every, more].concat());
        let found = provenance(&run_dir)["gates"]["free_disk"]["found"].as_str().unwrap().to_string();
        let size =
            found.split_once("(checkpoints ").and_then(|(_, rest)| rest.split_once(" MiB, logs ")).expect(&found).0;
        size.parse::<f64>().unwrap()
    };
    // All four, or the last one while the next is written.
    let (all, last) = (mib("all", &[]), mib("last", &["--set", "checkpoint.keep_last=1"]));
    assert!((all / last - 2.0).abs() < 0.1, "{all} MiB, {last} MiB");
}

#[test]
fn a_device_that_another_run_has_is_refused_unless_it_may_be_shared() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = ["run", config.to_str().unwrap()];
    // Held as a run holds it: an advisory lock of the file.
    let locks = dir.path().join("locks");
    fs::create_dir(&locks).unwrap();
    let held = fs::File::create(locks.join("device-cpu.lock")).unwrap();
    held.lock().unwrap();
    let beside = |more: &[&str]| {
        let out = tunehost(&[&run[..], more].concat()).env("TUNEHOST_RUNTIME_DIR", &locks).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, said) = beside(&[]);
    assert_eq!(code, Some(9));
    assert!(said.contains("device::in_use") && said.contains("model.allow_shared=true"), "{said}");
    let shared = dir.path().join("shared");
    let more =
        ["--run-dir", shared.to_str().unwrap(), "--set", "model.allow_shared=true", "--set", "train.max_steps=1"];
    let (code, said) = beside(&more);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("gate device: cpu is shared with another run"), "{said}");
}
