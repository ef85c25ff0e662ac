//! `tunehost runs` on short runs.

mod common;

use common::short::{assert_same, contents, provenance};
use common::{fails, ok, output, root, tunehost};
use regex::Regex;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tunehost::hash::sha256;

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
    let seed = run("seed", &["--set", "train.seed=1"]);
    let setting = run("setting", &["--set", "plugins.config.sampler.bucket=4"]);
    let records = fs::read_to_string(dir.join("records.jsonl")).unwrap();
    fs::write(dir.join("records.jsonl"), records.replacen("word 7", "word seven", 1)).unwrap();
    let corpus = run("corpus", &[]);
    fs::write(dir.join("records.jsonl"), &records).unwrap();
    assert_eq!(ok(&["runs", "diff", &a, &again]).trim(), "no difference");
    for (b, line) in [
        (&lr, "train.lr: 0.001 | 0.002"),
        (&seed, "train.seed: 0 | 1"),
        (&setting, "plugins.config.sampler.bucket: absent | 4"),
        (&corpus, "corpus[0] records.jsonl: "),
        (&sampler, "plugin/sampler: "),
        (&bf16, "model.weights: \"f32\" | "),
    ] {
        let lines = ok(&["runs", "diff", &a, b]);
        assert!(lines.starts_with(line) && lines.lines().count() == 1, "{lines}");
    }

    let list = ok(&["runs", "list", dir.join("runs").to_str().unwrap()]);
    assert_eq!(list.lines().count(), 9, "{list}");
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
    assert!(whole["jit"]["how"].as_str().unwrap().starts_with("nothing: the kernels are in the program"), "{whole}");
    assert!(whole["machine"]["driver"].as_str().unwrap().starts_with("none: a CPU"), "{whole}");
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
        "metrics.jsonl",
        "config.resolved.toml",
        "held-out/step-000003.json",
        "recomputed: order",
        "recomputed: steps 3 to 3",
        "recomputed: held-out losses after step 3",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let hashes = ok(&["runs", "verify", &a, "--hashes-only"]);
    assert!(hashes.lines().all(|line| line.starts_with("ok ")) && !hashes.contains("recomputed"), "{hashes}");
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
    assert!(said.contains("run::verify_failed") && said.contains("6 of "), "{said}");
    for name in [
        "corpus[0], ",
        "metrics, ",
        "metrics.jsonl, ",
        "checkpoint/step-000003, ",
        "export/adapter/adapter_model.safetensors, ",
        "recomputed: nothing",
    ] {
        assert!(said.contains(name), "{name} is not in {said}");
    }
    let said = fails(&["runs", "show", dir.to_str().unwrap()], 8);
    assert!(said.contains("provenance.json"), "{said}");
}

#[test]
fn what_was_written_over_with_its_hash_is_found_by_computing_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let folder = dir.path().join("run");
    let run = folder.to_str().unwrap();
    ok(&["run", config.to_str().unwrap(), "--run-dir", run]);
    let whole = ["metrics.jsonl", "held-out/step-000003.json", "provenance.json"]
        .map(|name| (name, fs::read_to_string(folder.join(name)).unwrap()));
    for (i, number, check) in [
        (0, r#"("step":3,[^\n]*?"loss":)[0-9.e-]+"#, "recomputed: steps 1 to 3"),
        (0, r#"("step":2,[^\n]*?"grad_norm":)[0-9.e-]+"#, "recomputed: steps 1 to 3"),
        (1, r#"("loss_sum":)[0-9.e-]+"#, "recomputed: held-out losses after step 3"),
    ] {
        let (name, text) = &whole[i];
        let changed = Regex::new(number).unwrap().replace(text, "${1}0.125");
        assert_ne!(*text, changed);
        fs::write(folder.join(name), changed.as_bytes()).unwrap();
        // Somebody who covers up also writes the hash.
        let recorded = provenance(&folder)["outcome"]["files"][*name]["sha256"].as_str().unwrap().to_string();
        let covered = whole[2].1.replace(&recorded, &sha256(changed.as_bytes()));
        fs::write(folder.join("provenance.json"), covered).unwrap();
        ok(&["runs", "verify", run, "--hashes-only"]);
        let out = output(&["runs", "verify", run, "--steps", "3"]);
        let said = String::from_utf8_lossy(&out.stdout);
        assert_eq!(out.status.code(), Some(6), "{said}");
        assert!(said.contains(&format!("CHANGED  {check} (")), "{said}");
        whole.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }
    ok(&["runs", "verify", run, "--steps", "3"]);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let [one, five] = ["1", "5"].map(|threads| {
        let folder = dir.path().join(threads);
        let args = ["run", config.to_str().unwrap(), "--run-dir", folder.to_str().unwrap()];
        assert!(tunehost(&args).env("RAYON_NUM_THREADS", threads).output().unwrap().status.success());
        assert_eq!(provenance(&folder)["machine"]["threads"].to_string(), threads);
        folder
    });
    assert!(contents(&one) == contents(&five));
    let lines = ok(&["runs", "diff", one.to_str().unwrap(), five.to_str().unwrap()]);
    assert_eq!(lines.trim(), "environment RAYON_NUM_THREADS: 1 | 5; with it threads (1 | 5)");
    // Another instruction set means other kernels.
    let portable = dir.path().join("portable");
    let args = ["run", config.to_str().unwrap(), "--run-dir", portable.to_str().unwrap()];
    let run = tunehost(&args).env("RAYON_NUM_THREADS", "1").env("TUNEHOST_ISA", "portable").output().unwrap();
    assert!(run.status.success());
    let lines = ok(&["runs", "diff", one.to_str().unwrap(), portable.to_str().unwrap()]);
    assert!(lines.starts_with("environment TUNEHOST_ISA: absent | portable; with it 9 resolved kernels ("), "{lines}");
    assert_eq!(lines.lines().count(), 1);
}

#[test]
fn a_run_starts_from_the_adapter_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let folder = |name: &str| dir.path().join(name);
    let args = |name: &str, more: &[&str]| -> Vec<String> {
        let run = ["run", config.to_str().unwrap(), "--run-dir", folder(name).to_str().unwrap()].map(String::from);
        run.into_iter().chain(more.iter().map(|word| word.to_string())).collect()
    };
    let words = |args: &[String]| -> Vec<&'static str> { args.iter().map(|word| &*word.clone().leak()).collect() };
    ok(&words(&args("parent", &[])));
    let parent = folder("parent");
    let init = format!("lora.init={}", parent.display());
    let said = ok(&words(&args("child", &["--set", &init])));
    let child = folder("child");
    let (of_parent, of_child) = (provenance(&parent), provenance(&child));
    assert!(of_parent["run_id"].is_string() && of_child["parent_run"] == of_parent["run_id"], "{said}");
    assert!(said.contains(&format!("of run {}", of_parent["run_id"].as_str().unwrap())), "{said}");
    let exported = "export/adapter/adapter_model.safetensors";
    assert_eq!(of_child["inputs"]["adapter"]["sha256"], of_parent["outcome"]["exports"][exported]["sha256"]);
    // It begins where the other ended, and moves on.
    let losses = |run: &Path, step: u64| fs::read(run.join(format!("held-out/step-{step:06}.json"))).unwrap();
    assert!(losses(&child, 0) == losses(&parent, 3) && losses(&child, 3) != losses(&parent, 3));
    let gate = &of_child["gates"]["inert_adapter"];
    assert!(gate["verdict"] == "passed" && gate["found"].as_str().unwrap().starts_with("all "), "{gate}");
    ok(&["runs", "verify", child.to_str().unwrap(), "--steps", "3"]);
    let lines = ok(&["runs", "diff", parent.to_str().unwrap(), child.to_str().unwrap()]);
    assert!(lines.starts_with("adapter: absent | ") && lines.lines().count() == 1, "{lines}");
    // Killed and resumed, it is the same: what moved is still told by what it started from.
    let killed = folder("killed");
    let start = args("killed", &["--set", &init]);
    let mut process = tunehost(&words(&start)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !killed.join("metrics.jsonl").exists() && process.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    ok(&["resume", killed.to_str().unwrap()]);
    assert_same(&contents(&child), &killed, "killed");
    assert_eq!(provenance(&killed)["gates"]["inert_adapter"], *gate);
    // A PEFT folder does as well, without a run to name.
    let peft = format!("lora.init={}", parent.join("export/adapter").display());
    ok(&words(&args("peft", &["--set", &peft])));
    assert!(contents(&folder("peft")).get(Path::new(exported)) == contents(&child).get(Path::new(exported)));
    assert_eq!(provenance(&folder("peft"))["parent_run"], Value::Null);

    let said = fails(&words(&args("other", &["--set", &init, "--set", "lora.rank=8"])), 2);
    assert!(said.contains("config::lora_init") && said.contains("rank 16, ") && said.contains("rank 8, "), "{said}");
    let mut bytes = fs::read(parent.join(exported)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(parent.join(exported), bytes).unwrap();
    let said = fails(&words(&args("other", &["--set", &init])), 6);
    assert!(said.contains("run::adapter_changed") && said.contains(exported), "{said}");
    fails(&["resume", child.to_str().unwrap()], 6);
    fs::remove_file(parent.join(exported)).unwrap();
    let said = fails(&words(&args("other", &["--set", &init])), 6);
    assert!(said.contains("run::no_adapter") && said.contains("tunehost resume"), "{said}");
    assert!(!folder("other").exists());
}
