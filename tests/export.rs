//! `tunehost export`: each exporter on a real tune, judged by its files, and what is refused.

mod common;

use common::{fails, ok, output, root, send, tunehost};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A short run whose tune can be measured.
fn tuned(dir: &Path) -> PathBuf {
    let run = dir.join("run");
    let sets = ["train.max_steps=24", "export.merged=false", "eval.max_records_per_root=16"];
    let mut args = vec!["run", "configs/quickstart.toml", "--quiet", "--run-dir", run.to_str().unwrap()];
    sets.iter().for_each(|set| args.extend(["--set", set]));
    ok(&args);
    run
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn export<'a>(tune: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["export", tune.to_str().unwrap(), "--out", out.to_str().unwrap(), "--quiet"], more].concat()
}

/// Runs an export that holds what was tuned; its report.
fn exports(tune: &Path, out: &Path, more: &[&str]) -> Value {
    ok(&export(tune, out, more));
    let report = json(&out.join("export.json"));
    assert_eq!(report["proof"]["verdict"], "passed", "{report:#}");
    report
}

/// Dtype, shape and bytes of every tensor of a checkpoint, which its index lists in their shards and counts.
fn shards(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let index = json(&folder.join("model.safetensors.index.json"));
    let listed = index["weight_map"].as_object().unwrap();
    let files: BTreeSet<&str> = listed.values().map(|file| file.as_str().unwrap()).collect();
    let mut tensors = BTreeMap::new();
    for file in &files {
        let bytes = fs::read(folder.join(file)).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            assert_eq!(listed[name], *file, "{name}");
            tensors.insert(name.to_string(), (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()));
        }
    }
    assert!(files.len() > 1 && tensors.len() == listed.len());
    let bytes: usize = tensors.values().map(|(.., bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
    tensors
}

#[test]
fn what_is_written_holds_what_was_tuned() {
    let dir = tempfile::tempdir().unwrap();
    let run = tuned(dir.path());
    let base = root().join("tests/fixtures/tiny-base");
    let at = |name: &str| dir.path().join(name);

    let merged = exports(&run, &at("merged"), &["--set", "max_shard_size=2000000"]);
    assert!(merged["proof"]["retained_gain"].as_f64().unwrap() > 0.99, "{merged:#}");
    assert!(merged["proof"]["kl"].as_f64().unwrap() < 1e-2, "{merged:#}");
    // Every tensor that is not adapted is the same byte for byte.
    let stored = fs::read(base.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&stored).unwrap();
    let tensors = shards(&at("merged"));
    let changed = tensors.iter().filter(|(name, (dtype, shape, bytes))| {
        let theirs = stored.tensor(name).unwrap();
        assert_eq!((*dtype, &shape[..]), (theirs.dtype(), theirs.shape()), "{name}");
        bytes != theirs.data()
    });
    let changed: Vec<&String> = changed.map(|(name, _)| name).collect();
    let adapted = |name: &String| name.contains("_proj.weight") && !name.contains("experts");
    assert!(changed.iter().all(|name| adapted(name)), "{changed:?}");
    assert_eq!((tensors.len(), changed.len()), (stored.len(), 41));
    let template = |folder: &Path| fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
    assert_eq!(template(&at("merged")), template(&base));

    let adapter = exports(&run, &at("adapter"), &["--exporter", "peft-adapter"]);
    assert_eq!(adapter["proof"]["tuned"], adapter["proof"]["export"]);

    let quantize = ["--exporter", "merge-then-quantize", "--set", "max_shard_size=1000000", "--set"];
    for (scheme, group) in [("fp8", None), ("w4a16", Some("group_size=16")), ("nvfp4a16", None)] {
        let scheme_flag = format!("scheme={scheme}");
        let mut flags = [&quantize[..], &[&scheme_flag]].concat();
        group.iter().for_each(|group| flags.extend(["--set", group]));
        let report = exports(&run, &at(scheme), &flags);
        let (chosen, plain) = (&report["scales"]["error"], &report["scales"]["plain_error"]);
        assert!(chosen.as_f64().unwrap() < plain.as_f64().unwrap(), "{report:#}");
        assert_eq!(report["scales"]["modules"], 185);
        let tensors = shards(&at(scheme));
        assert!(tensors.contains_key("model.layers.3.experts.7.down_proj.weight_scale"));
        let kept = ["router.proj.weight_", "embed_tokens.weight_"];
        assert!(!tensors.keys().any(|name| kept.iter().any(|kept| name.contains(kept))));
        // The files answer, and differ from the exact merge.
        let generate = ["--prompt", "Good morning, how are you?", "--max-new-tokens", "8"];
        let answer = ok(&[&["generate", at(scheme).to_str().unwrap()], &generate[..]].concat());
        assert!(!answer.trim().is_empty());
        assert!(report["proof"]["kl"].as_f64() > merged["proof"]["kl"].as_f64(), "{report:#}");
    }
    // The same bytes again.
    exports(&run, &at("again"), &[&quantize[..], &["scheme=nvfp4a16"]].concat());
    assert!(shards(&at("again")) == shards(&at("nvfp4a16")));

    // What retains too little is written, marked, and an error.
    let lost = [&quantize[..], &["scheme=nvfp4a16", "--min-retained-gain", "1.0"]].concat();
    let error = fails(&export(&run, &at("lost"), &lost), 10);
    assert!(error.contains("export::gain_lost") && error.contains("--min-retained-gain"), "{error}");
    assert_eq!(json(&at("lost").join("export.json"))["proof"]["verdict"], "failed");

    // A base that is not the one that was tuned.
    let other = common::copy_base(&at("other"));
    let mut bytes = fs::read(other.join("model.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(other.join("model.safetensors"), bytes).unwrap();
    let error = fails(&export(&run, &at("wrong"), &["--base", other.to_str().unwrap()]), 10);
    assert!(error.contains("export::other_base") && error.contains("sha256"), "{error}");
    let adapter = run.join("export/adapter");
    let records = root().join("tests/fixtures/tune/held-out.jsonl");
    let of_adapter = ["--base", other.to_str().unwrap(), "--template", "base", "--data", records.to_str().unwrap()];
    assert!(fails(&export(&adapter, &at("wrong"), &of_adapter), 10).contains("export::other_base"));
    let provenance = fs::read_to_string(run.join("provenance.json")).unwrap();
    let recorded = json(&run.join("provenance.json"));
    let inputs = &recorded["inputs"];
    for (input, code) in [
        (&inputs["tokenizer"], "export::other_base"),
        (&inputs["template"], "export::other_input"),
        (&inputs["corpus"][1], "export::other_input"),
        (&recorded["outcome"]["exports"]["export/adapter/adapter_model.safetensors"], "export::other_input"),
    ] {
        let sha256 = input["sha256"].as_str().unwrap();
        fs::write(run.join("provenance.json"), provenance.replace(sha256, &"0".repeat(64))).unwrap();
        let error = fails(&export(&run, &at("wrong"), &[]), 10);
        assert!(error.contains(code) && error.contains(sha256) && error.contains("help: "), "{error}");
    }
    fs::write(run.join("provenance.json"), provenance).unwrap();
    without_its_corpus(&run, dir.path(), records.to_str().unwrap());
    let error = fails(&export(&run, &at("merged"), &[]), 10);
    assert!(error.contains("export::exists"), "{error}");
    let error = fails(&export(&run, &at("wide"), &[&quantize[..], &["scheme=w4a16"]].concat()), 5);
    assert!(error.contains("80 columns wide, which groups of 64 do not divide"), "{error}");
    refuses_what_an_adapter_lacks(&run.join("export/adapter"), dir.path());
    // Nothing of what failed stays.
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with('.')), "{left:?}");
}

/// A run whose corpus lies elsewhere now is judged on other records; its scales are plain, or searched on records that are named.
fn without_its_corpus(run: &Path, dir: &Path, records: &str) {
    let config = fs::read_to_string(run.join("config.resolved.toml")).unwrap();
    fs::write(run.join("config.resolved.toml"), config.replace("smalltalk.jsonl", "gone.jsonl")).unwrap();
    let error = fails(&export(run, &dir.join("gone"), &[]), 8);
    assert!(error.contains("gone.jsonl") && error.contains("--data FILE"), "{error}");
    let fp8 = ["--exporter", "merge-then-quantize", "--data", records];
    let said =
        output(&[&["export", run.to_str().unwrap(), "--out", dir.join("plain").to_str().unwrap()], &fp8[..]].concat());
    let (stdout, stderr) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success() && stderr.contains("gone.jsonl") && stderr.contains("is not compared"), "{stderr}");
    assert!(stdout.contains("scales      plain for all 185 modules: there are no training records"), "{stdout}");
    let scales = json(&dir.join("plain/export.json"))["scales"].clone();
    assert_eq!(scales, serde_json::json!({"records": 0, "modules": 0, "of": 185, "error": null, "plain_error": null}));
    let searched = [&fp8[..], &["--training-data", records]].concat();
    let said = output(&export(run, &dir.join("searched"), &searched));
    assert!(
        String::from_utf8_lossy(&said.stderr).contains("16 of the 16 records to judge by were trained"),
        "{said:?}"
    );
    let report = json(&dir.join("searched/export.json"));
    assert!(report["notes"][0].as_str().unwrap().contains("16 of the 16"), "{report:#}");
    assert_eq!(report["scales"]["records"], 16);
    assert!(report["run"].as_str().unwrap().starts_with("run-"), "{report:#}");
    fs::write(run.join("config.resolved.toml"), config).unwrap();
}

fn refuses_what_an_adapter_lacks(adapter: &Path, dir: &Path) {
    let data = dir.join("judge.jsonl");
    let says = |i: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "Hello {i}"}}, {{"role": "assistant", "content": "Good day to you."}}]}}"#
        )
    };
    fs::write(&data, (0..8).map(says).collect::<Vec<_>>().join("\n")).unwrap();
    let judged = ["--data", data.to_str().unwrap(), "--template", "base"];
    let refused = |tune: &Path, more: &[&str], exit: i32, parts: &[&str]| {
        let out = dir.join("refused");
        let error = fails(&export(tune, &out, more), exit);
        assert!(parts.iter().all(|part| error.contains(part)) && error.contains("help: "), "{parts:?} in\n{error}");
        assert!(!out.exists() || parts == ["export::equal_to_base"]);
    };
    refused(adapter, &[], 10, &["export::no_records", "--data"]);
    let base = root().join("tests/fixtures/tiny-base");
    let other = root().join("tests/fixtures/golden/adapter_final");
    let on_base = [&judged[..], &["--base", base.to_str().unwrap()]].concat();
    refused(&other, &on_base, 4, &["model::adapter_config", "another base"]);
    refused(dir, &judged, 10, &["export::not_a_tune", "name a run folder"]);
    refused(adapter, &["--base", "nowhere", "--data", "x"], 8, &["nowhere/config.json", "--base DIR"]);
    let changed = |name: &str, edit: &dyn Fn(&mut Value), spoil: &dyn Fn(&mut Vec<u8>)| {
        let copy = dir.join(name);
        fs::create_dir(&copy).unwrap();
        let mut config = json(&adapter.join("adapter_config.json"));
        edit(&mut config);
        fs::write(copy.join("adapter_config.json"), config.to_string()).unwrap();
        let mut bytes = fs::read(adapter.join("adapter_model.safetensors")).unwrap();
        spoil(&mut bytes);
        fs::write(copy.join("adapter_model.safetensors"), bytes).unwrap();
        copy
    };
    let settings = [
        ("use_dora", Value::from(true), ["not", "DoRA", "merge_and_unload"]),
        ("modules_to_save", serde_json::json!(["lm_head"]), ["modules_to_save", "nothing else", "merge_and_unload"]),
        ("r", Value::from(8), ["model::adapter_tensor", "has shape", "the rank of its settings"]),
        (
            "target_modules",
            serde_json::json!(["q_proj", "lm_head"]),
            ["target_modules", "lm_head", "tied to the embedding"],
        ),
        ("init_lora_weights", "pissa_niter_16".into(), ["init_lora_weights", "leave the base", "weight_conversion"]),
        ("base_model_name_or_path", Value::from(""), ["does not name the base", "model::adapter_config", "--base DIR"]),
    ];
    for (field, value, parts) in settings {
        let copy = changed(field, &|config| config[field] = value.clone(), &|_| {});
        refused(&copy, &judged, 4, &parts);
    }
    let cut = changed("cut", &|_| {}, &|bytes| bytes.truncate(1000));
    refused(&cut, &judged, 4, &["model::bad_safetensors", "cut short"]);
    fs::write(cut.join("adapter_config.json"), "{").unwrap();
    refused(
        &cut,
        &on_base,
        4,
        &["model::adapter_config", "adapter_config.json: EOF", "a JSON object", "copy it again"],
    );
    let alone = changed("alone", &|_| {}, &|_| {});
    fs::remove_file(alone.join("adapter_model.safetensors")).unwrap();
    refused(&alone, &judged, 8, &["adapter_model.safetensors", "safe_serialization"]);
    let after_header = |bytes: &[u8]| 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let nan = changed("nan", &|_| {}, &|bytes| {
        let start = after_header(bytes);
        bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    refused(&nan, &judged, 4, &["model::adapter_tensor", "holds NaN", "train again"]);
    let inert = changed("inert", &|_| {}, &|bytes| {
        let start = after_header(bytes);
        bytes[start..].fill(0);
    });
    refused(&inert, &judged, 10, &["export::equal_to_base"]);
}

#[test]
fn advice_is_of_the_flags_that_were_typed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let exports =
        |more: &[&str], code: i32| fails(&export(Path::new(TUNE), &out, &[&JUDGED[4..], more].concat()), code);
    let on_base = &JUDGED[..2];
    let quantize = [on_base, &["--template", "base", "--exporter", "merge-then-quantize"]].concat();
    for (more, code, parts) in [
        (&["--base", "nowhere"][..], 4, &["model::not_found", "--base DIR"][..]),
        (on_base, 3, &["corpus::no_template", "--template FILE"]),
        (&[&quantize[..], &["--set", "scheme=int3"]].concat(), 5, &["config_refused", "settings (--set KEY=VALUE)"]),
        (&[&quantize[..], &["--set", "scheme=w4a16"]].concat(), 5, &["plan refused", "its settings (--set KEY=VALUE)"]),
    ] {
        let error = exports(more, code);
        let configuration = ["model.base", "data.template", "plugins.config"].iter().any(|key| error.contains(key));
        assert!(parts.iter().all(|part| error.contains(part)) && !configuration, "{parts:?} in\n{error}");
    }
    let by_default = exports(&[on_base, &["--template", "base", "--set", "scheme=fp8"]].concat(), 5);
    assert!(by_default.contains("`scheme` is of --exporter merge-then-quantize"), "{by_default}");
    let said = fails(&["score", "nowhere", "--data", "x"], 4);
    assert!(said.contains("model::not_found") && said.contains("layout: MODEL"), "{said}");
    let said = fails(&["score", "tests/fixtures/tiny-base", JUDGED[4], JUDGED[5]], 3);
    assert!(said.contains("corpus::no_template") && said.contains("--template FILE"), "{said}");
}

#[test]
fn a_gain_that_one_record_cannot_show_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (out, data) = (dir.path().join("out"), dir.path().join("one.jsonl"));
    let records = fs::read_to_string(root().join(JUDGED[5])).unwrap();
    fs::write(&data, records.lines().next().unwrap()).unwrap();
    let args = [&JUDGED[..5], &[data.to_str().unwrap()]].concat();
    let error = fails(&export(Path::new(TUNE), &out, &args), 10);
    assert!(error.contains("export::no_measurable_gain") && error.contains("judge on more records"), "{error}");
    let proof = json(&out.join("export.json"))["proof"].clone();
    assert_eq!((&proof["verdict"], &proof["retained_gain"]), (&"no_measurable_gain".into(), &Value::Null));
}

#[test]
fn a_signal_ends_an_export_and_leaves_nothing() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let args = export(Path::new(TUNE), &out, &JUDGED);
        let child = tunehost(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let written = || {
            fs::read_dir(dir.path())
                .unwrap()
                .any(|folder| fs::read_dir(folder.unwrap().path()).unwrap().next().is_some())
        };
        while !written() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        send(signal, &child);
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(
            ended.status.code() == Some(code) && said.starts_with("stopped by a signal"),
            "{signal}: {:?} {said}",
            ended.status
        );
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none(), "{signal}");
    }
}

#[test]
fn a_run_refuses_an_exporter_that_lays_out_no_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let args = [
        "run",
        "configs/quickstart.toml",
        "--run-dir",
        run.to_str().unwrap(),
        "--plugins",
        "exporter=merge-then-quantize",
    ];
    let error = fails(&[&args[..], &["--set", "plugins.config.exporter.scheme=fp8"]].concat(), 2);
    assert!(error.contains("config::exporter") && error.contains("tunehost export RUN --exporter"), "{error}");
}

#[test]
fn the_help_names_every_exporter() {
    let help = output(&["export", "--help"]);
    let help = String::from_utf8(help.stdout).unwrap();
    for exporter in ["merge-bf16", "merge-then-quantize", "gguf", "peft-adapter"] {
        assert!(help.contains(exporter), "{help}");
    }
}

/// The tune that is kept, and records to judge it by.
const TUNE: &str = "tests/fixtures/tune";
const JUDGED: [&str; 6] =
    ["--base", "tests/fixtures/tiny-base", "--template", "base", "--data", "tests/fixtures/tune/held-out.jsonl"];

/// Name, and sha256 of each file but the report, in which the judge's numbers depend on the processor. An adapter names the
/// folder of its base, which is not the same everywhere.
fn hashes(name: &str, folder: &Path) -> Vec<String> {
    let base = root().join("tests/fixtures/tiny-base");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|path| !path.ends_with("export.json"));
    files.sort();
    let line = |path: PathBuf| {
        let mut bytes = fs::read(&path).unwrap();
        if path.ends_with("adapter_config.json") {
            bytes = String::from_utf8(bytes).unwrap().replace(base.to_str().unwrap(), "BASE").into_bytes();
        }
        format!("{}  {name}/{}", tunehost::hash::sha256(&bytes), path.file_name().unwrap().to_str().unwrap())
    };
    files.into_iter().map(line).collect()
}

/// The loss that `tunehost score` finds for the model in `folder` on the records of [`JUDGED`].
fn scored(folder: &Path) -> f64 {
    let said = ok(&[&["score", folder.to_str().unwrap(), "--json"], &JUDGED[2..]].concat());
    let events = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let total = events.into_iter().find(|event| event["event"] == "total").unwrap();
    total["loss"].as_f64().unwrap()
}

fn reference(file: &str) -> PathBuf {
    root().join("tests/reference").join(file)
}

/// Writes the fixed tune into `dir` in a format of `formats.json`, by the paths of a processor with `isa` alone; the [`hashes`].
fn written(format: &Value, dir: &Path, isa: Option<&str>) -> Vec<String> {
    let name = format["name"].as_str().unwrap();
    let mut flags = vec!["--exporter", format["exporter"].as_str().unwrap()];
    format["settings"].as_array().unwrap().iter().for_each(|set| flags.extend(["--set", set.as_str().unwrap()]));
    let folder = dir.join(name);
    let mut command = tunehost(&export(Path::new(TUNE), &folder, &[&flags[..], &JUDGED].concat()));
    if let Some(isa) = isa {
        command.env("TUNEHOST_ISA", isa);
    }
    let said = command.output().unwrap();
    assert!(said.status.success(), "{name}: {}", String::from_utf8_lossy(&said.stderr));
    hashes(name, &folder)
}

/// What other people's code has read.
fn passed() -> Vec<String> {
    fs::read_to_string(reference("passed.sha256")).unwrap().lines().map(String::from).collect()
}

#[test]
fn every_format_is_written_as_others_have_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for format in json(&reference("formats.json")).as_array().unwrap() {
        all.extend(written(format, dir.path(), None));
        let folder = dir.path().join(format["name"].as_str().unwrap());
        let proof = json(&folder.join("export.json"))["proof"].clone();
        assert_eq!(proof["verdict"], "passed", "{proof:#}");
        if format["exporter"] != "peft-adapter" {
            let (loss, judged) = (scored(&folder), proof["export"].as_f64().unwrap());
            assert!((loss - judged).abs() < 1e-4, "{format}: scored {loss}, judged {judged}");
        }
    }
    assert_eq!(all, passed(), "tests/reference/run has others read these files, and records them");
}

#[test]
fn the_bytes_of_an_export_do_not_depend_on_the_processor() {
    let formats = json(&reference("formats.json"));
    // With what this one has, every format is written above.
    for isa in ["portable", "avx2"] {
        for name in ["nvfp4a16", "q4_k_m"] {
            let dir = tempfile::tempdir().unwrap();
            let format = formats.as_array().unwrap().iter().find(|format| format["name"] == name).unwrap();
            let ours = written(format, dir.path(), Some(isa));
            let passed: Vec<String> =
                passed().into_iter().filter(|line| line.contains(&format!("  {name}/"))).collect();
            assert_eq!(ours, passed, "{isa}");
        }
    }
}

#[test]
fn an_adapter_of_rslora_is_exported_with_its_own_scale() {
    let dir = tempfile::tempdir().unwrap();
    let adapter = dir.path().join("rslora");
    fs::create_dir(&adapter).unwrap();
    fs::copy(root().join(TUNE).join("adapter_model.safetensors"), adapter.join("adapter_model.safetensors")).unwrap();
    let mut config = json(&root().join(TUNE).join("adapter_config.json"));
    // At rank 4, alpha / sqrt(r) is what alpha / r is with twice the alpha.
    assert_eq!((&config["r"], &config["lora_alpha"]), (&4.into(), &8.0.into()));
    (config["use_rslora"], config["lora_alpha"]) = (true.into(), 4.0.into());
    fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let at = |name: &str| dir.path().join(name);
    exports(&adapter, &at("merged"), &[&JUDGED[..], &["--set", "max_shard_size=3000000"]].concat());
    let merged: Vec<String> = passed().into_iter().filter(|line| line.contains("  merged/")).collect();
    assert_eq!(hashes("merged", &at("merged")), merged);
    exports(&adapter, &at("adapter"), &[&JUDGED[..], &["--exporter", "peft-adapter"]].concat());
    let written = json(&at("adapter").join("adapter_config.json"));
    assert_eq!((&written["use_rslora"], &written["lora_alpha"]), (&true.into(), &4.0.into()));
}

#[test]
#[cfg(target_os = "linux")] // the kills come by LD_PRELOAD
fn a_killed_export_never_looks_finished_and_the_next_one_starts_clean() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let library = common::short::fault_library(&dir);
    let (under, out) = (dir.join("exports"), dir.join("exports/out"));
    fs::create_dir(&under).unwrap();
    let hidden = || fs::read_dir(&under).unwrap().filter(|e| e.as_ref().unwrap().file_name() != "out").count();
    let args = export(Path::new(TUNE), &out, &JUDGED);
    let (mut at, mut kills) = (2, 0);
    loop {
        let mut command = tunehost(&args);
        command.env("LD_PRELOAD", &library).env("FAULTS_UNDER", &under).env("KILL_AT", at.to_string());
        if command.output().unwrap().status.success() {
            break;
        }
        assert!(!out.exists(), "killed at {at}");
        // Only what the last one left: the one before it is gone.
        assert!(hidden() <= 1, "killed at {at}");
        kills += 1;
        at = 2 * at + 1;
    }
    assert!(kills >= 3, "{kills}");
    assert_eq!((hidden(), json(&out.join("export.json"))["proof"]["verdict"].as_str()), (0, Some("passed")));
}
