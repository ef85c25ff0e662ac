//! The commands as a person uses them, and what they say when something is wrong.

mod common;

use common::{fails, ok, root, tunehost};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const BASE: &str = "tests/fixtures/tiny-base";
const QUICKSTART: &str = "configs/quickstart.toml";

fn small_records(dir: &Path) -> String {
    let path = dir.join("data.jsonl");
    let text = r#"{"id": "chat", "messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a king."}]}
{"id": "text", "text": "To be, or not to be, that is the question."}
{"id": "ids", "input_ids": [2, 300, 301, 302], "labels": [-100, -100, 301, 302]}
"#;
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn every_shipped_configuration_loads() {
    for path in [
        "quickstart.toml",
        "reference.toml",
        "variants/quickstart-shuffled.toml",
        "variants/quickstart-attention-only.toml",
    ] {
        ok(&["config", "show", &format!("configs/{path}")]);
    }
    let shown = ok(&["config", "show", "configs/gemma4-26b-a4b.toml"]);
    for line in [
        "data.max_seq_len = 16384",
        "train.micro_batch = 2",
        "train.accumulation = 8",
        "lora.rank = 64",
        "plugins.sampler = \"bucket-to-pair\"",
        "plugins.checkpoint_scheduler = \"wall-clock\"",
    ] {
        assert!(shown.lines().any(|l| l.starts_with(line)), "{line} is not in\n{shown}");
    }
}

#[test]
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn a_device_that_a_build_has_not_is_refused_by_every_command_that_computes() {
    let mut refusals: Vec<_> = common::refusals_of_device("cuda:0").into_iter().map(|said| ("cuda:0", said)).collect();
    // A configuration may name one of its own.
    refusals.push(("cuda:0", fails(&["run", "configs/gemma4-26b-a4b.toml"], 9)));
    for device in ["wgpu", "cuda", "abacus"] {
        refusals.push((device, fails(&["run", QUICKSTART, "--device", device], 9)));
    }
    for (device, said) in refusals {
        for part in ["device::unavailable", device, "expected: cpu", "--features cuda", "--device cpu"] {
            assert!(said.contains(part), "{part} is not in\n{said}");
        }
    }
}

#[test]
fn activations_that_a_cpu_does_not_pass_on_are_refused_by_the_kernel_that_lacks_them() {
    for activations in ["bf16", "f16"] {
        let set = format!("train.activations={activations}");
        let said = fails(&["run", QUICKSTART, "--set", &set], 9);
        for part in
            ["device::unsupported", "`rms_norm` cannot run on `cpu`", activations, "--set train.activations=f32"]
        {
            assert!(said.contains(part), "{part} is not in\n{said}");
        }
    }
}

#[test]
fn config_show_says_where_each_value_came_from() {
    let shown = ok(&["config", "show", "configs/variants/quickstart-shuffled.toml", "--set", "train.lr=1e-4"]);
    let line = |key: &str| shown.lines().find(|l| l.starts_with(&format!("{key} ="))).expect(key).to_string();
    assert!(line("train.lr").contains("1e-4") || line("train.lr").contains("0.0001"));
    assert!(line("train.lr").contains("--set"));
    assert!(line("plugins.sampler").contains("quickstart-shuffled.toml:"));
    assert!(line("lora.rank").contains("quickstart.toml:"));
    assert!(line("train.eps").contains("default"));
    let by_flag = ok(&["config", "show", QUICKSTART, "--plugins", "sampler=shuffled"]);
    assert!(by_flag.contains("plugins.sampler = \"shuffled\""), "{by_flag}");
}

#[test]
fn a_wrong_configuration_is_refused_with_file_line_and_a_suggestion() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join(QUICKSTART)).unwrap();
    let quickstart = root().join(QUICKSTART);
    let path = dir.path().join("wrong.toml");
    for (body, code, says) in [
        ("[train]\nlrr = 1e-4\n", "config::unknown_key", ["wrong.toml:3", "train.lr"]),
        ("[train]\nlr = \"fast\"\n", "config::wrong_type", ["wrong.toml:3", "lr"]),
        ("[train]\nmicro_batch = 0\n", "config::invalid_value", ["wrong.toml:3", "micro_batch"]),
        ("[lora]\ntargets = [\"qproj\"]\n", "config::lora_target", ["qproj", "q_proj"]),
        ("[plugins]\nsampler = \"bucket-to-pear\"\n", "plugin::not_found", ["bucket-to-pear", "bucket-to-pair"]),
    ] {
        fs::write(&path, format!("extends = \"{}\"\n{body}", quickstart.display())).unwrap();
        let exit = if code.starts_with("plugin") { 5 } else { 2 };
        let said = fails(&["run", path.to_str().unwrap(), "--run-dir", dir.path().join("run").to_str().unwrap()], exit);
        assert!(said.contains(code), "{said}");
        for word in says {
            assert!(said.contains(word), "{word}: {said}");
        }
    }
    assert!(!dir.path().join("run").exists(), "nothing is made before the configuration is right");
    assert!(text.contains("split_by"));
}

#[test]
fn plugins_list_shows_the_bundled_ones() {
    let listed: Value = serde_json::from_str(&ok(&["plugins", "list", "--json"])).unwrap();
    let names: Vec<&str> = listed.as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    for name in ["bucket-to-pair", "shuffled", "in-order", "wall-clock", "every-n-steps"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    for plugin in listed.as_array().unwrap() {
        assert_eq!(plugin["sha256"].as_str().unwrap().len(), 64);
        assert!(plugin["size_bytes"].as_u64().unwrap() > 0);
    }
    let table = ok(&["plugins", "list"]);
    assert!(table.contains("bucket-to-pair") && table.contains("sampler") && table.contains("0.1.0"), "{table}");
}

#[test]
fn a_plugin_by_name_by_path_and_by_key_is_the_same_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let orders: Vec<String> = [
        ["--plugins", "sampler=shuffled"],
        ["--plugins", "sampler=plugins/dist/shuffled.wasm"],
        ["--set", "plugins.sampler=\"shuffled\""],
        ["--plugins", "sampler=in-order"],
    ]
    .iter()
    .enumerate()
    .map(|(i, flags)| {
        let run = dir.path().join(i.to_string());
        let short = [
            "--set",
            "train.max_steps=1",
            "--set",
            "eval.max_records_per_root=0",
            "--set",
            "export.merged=false",
            "--quiet",
        ];
        ok(&[&["run", QUICKSTART, "--run-dir", run.to_str().unwrap()], &flags[..], &short[..]].concat());
        fs::read_to_string(run.join("order-manifest.jsonl")).unwrap()
    })
    .collect();
    assert!(orders[0] == orders[1] && orders[1] == orders[2]);
    assert!(orders[3] != orders[0]);
}

#[test]
fn score_reads_every_format_and_writes_logits() {
    let dir = tempfile::tempdir().unwrap();
    let data = small_records(dir.path());
    let logits = dir.path().join("logits.safetensors");
    let template = format!("{BASE}/chat_template.jinja");
    let args = ["score", BASE, "--data", &data, "--template", &template, "--json"];
    let events = ok(&[&args[..], &["--logits", logits.to_str().unwrap()]].concat());
    let events: Vec<Value> = events.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let number = |e: &Value, key: &str| e[key].as_f64().unwrap();
    let records: Vec<&Value> = events.iter().filter(|e| e["event"] == "record").collect();
    assert_eq!(records.iter().map(|e| e["id"].as_str().unwrap()).collect::<Vec<_>>(), ["chat", "text", "ids"]);
    let tokens: f64 = records.iter().map(|e| number(e, "tokens")).sum();
    let mean = records.iter().map(|e| number(e, "loss") * number(e, "tokens")).sum::<f64>() / tokens;
    let total = events.iter().find(|e| e["event"] == "total").unwrap();
    assert!((number(total, "loss") - mean).abs() < 1e-9);
    assert!((number(total, "perplexity") - mean.exp()).abs() < 1e-6);

    // The losses are those of the written logits.
    let file = fs::read(&logits).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let view = tensors.tensor("ids").unwrap();
    assert_eq!(view.shape(), [4, 2048]);
    let values: Vec<f32> = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let loss_of = |row: usize, target: usize| {
        let row = &values[row * 2048..(row + 1) * 2048];
        let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
        sum.ln() - f64::from(row[target])
    };
    let expected = (loss_of(1, 301) + loss_of(2, 302)) / 2.0;
    assert!((number(records[2], "loss") - expected).abs() < 1e-5, "{expected}");
    let said = fails(&[&args[..], &["--logits", logits.to_str().unwrap()]].concat(), 10);
    assert!(said.contains("exists"), "{said}");

    let said = fails(&["score", BASE, "--data", &data], 3);
    assert!(said.contains("template"), "messages need a template: {said}");
}

#[test]
fn generate_is_greedy_or_seeded() {
    let ask = |extra: &[&str]| {
        ok(&[&["generate", BASE, "--prompt", "Good morrow, my lord.", "--max-new-tokens", "12"], extra].concat())
    };
    assert_eq!(ask(&[]), ask(&[]));
    let hot = |seed: &str| ask(&["--temperature", "1.5", "--top-p", "0.95", "--seed", seed]);
    assert_eq!(hot("1"), hot("1"));
    assert!((2..8).any(|seed| hot(&seed.to_string()) != hot("1")), "no seed changes the answer");
    let said = fails(&["generate", BASE, "--prompt", "x", "--top-p", "0"], 2);
    assert!(said.contains("--top-p"), "{said}");
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("broken.jsonl");
    fs::write(&data, "{\"text\": \"fine\"}\n{\"text\": \"broken\n").unwrap();
    let said = fails(&["score", BASE, "--data", data.to_str().unwrap()], 3);
    assert!(said.contains("broken.jsonl:2"), "{said}");
    // the decoder asserts; nothing of that is printed
    let said = fails(&["score", BASE, "--data", "fuzz/seeds/file/broken-delta.parquet"], 3);
    assert!(said.starts_with("error[corpus::bad_parquet]: fuzz/seeds/file/broken-delta.parquet:1: "), "{said}");
    let said = fails(&["score", "tests/fixtures/no-such-model", "--data", data.to_str().unwrap()], 4);
    assert!(said.contains("no-such-model"), "{said}");
    let other = "tests/fixtures/golden/adapter_final";
    let said = fails(&["generate", BASE, "--adapter", other, "--prompt", "x"], 4);
    assert!(said.contains("model::adapter_config") && said.contains("another base"), "{said}");
    let said = fails(&["resume", dir.path().to_str().unwrap()], 6);
    assert!(said.contains("run::not_a_run"), "{said}");
    let said = fails(&["run", dir.path().join("none.toml").to_str().unwrap()], 2);
    assert!(said.contains("none.toml"), "{said}");
}

#[test]
fn another_plugin_does_not_get_the_settings_of_the_one_it_replaces() {
    for config in [QUICKSTART, "configs/gemma4-26b-a4b.toml"] {
        for flag in ["sampler=shuffled", "sampler=in-order", "checkpoint-scheduler=every-n-steps"] {
            let kind = if flag.starts_with("sampler") { "sampler" } else { "checkpoint_scheduler" };
            let shown = ok(&["config", "show", config, "--plugins", flag]);
            assert!(!shown.contains(&format!("plugins.config.{kind}")), "{config} {flag}\n{shown}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let short = [
        "--set",
        "train.max_steps=2",
        "--set",
        "train.accumulation=1",
        "--set",
        "eval.max_records_per_root=1",
        "--quiet",
    ];
    let flags =
        ["--plugins", "checkpoint-scheduler=every-n-steps", "--set", "plugins.config.checkpoint_scheduler={n=1}"];
    ok(&[&["run", QUICKSTART, "--run-dir", run.to_str().unwrap()], &flags[..], &short[..]].concat());
    assert!(run.join("checkpoints/step-000001").is_dir());
    // One evaluated record has no spread, and the run can still be read again.
    ok(&["resume", run.to_str().unwrap()]);
}

#[test]
fn files_of_one_name_in_two_folders_are_two_sources() {
    let dir = tempfile::tempdir().unwrap();
    let mut sources = Vec::new();
    for root in ["a", "b"] {
        fs::create_dir(dir.path().join(root)).unwrap();
        let path = dir.path().join(root).join("train.jsonl");
        fs::write(&path, (0..20).map(|i| format!("{{\"text\": \"{root} {i} of many\"}}\n")).collect::<String>())
            .unwrap();
        sources.push(format!("{{path = {path:?}, root = \"{root}\"}}"));
    }
    let run = dir.path().join("run");
    let sources = format!("data.sources=[{}]", sources.join(", "));
    let short = [
        "--set",
        "train.max_steps=1",
        "--set",
        "eval.max_records_per_root=0",
        "--set",
        "export.merged=false",
        "--quiet",
    ];
    ok(&[&["run", QUICKSTART, "--run-dir", run.to_str().unwrap(), "--set", &sources], &short[..]].concat());
    let order = fs::read_to_string(run.join("order-manifest.jsonl")).unwrap();
    assert!(order.contains("\"train:") && order.contains("\"b/train:"), "{order}");
}

#[test]
fn logits_need_names_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let data = small_records(dir.path());
    let out = dir.path().join("logits.safetensors");
    let template = format!("{BASE}/chat_template.jinja");
    let args =
        ["score", BASE, "--data", &data, "--data", &data, "--template", &template, "--logits", out.to_str().unwrap()];
    let said = fails(&args, 3);
    assert!(said.contains("corpus::duplicate_id"), "{said}");
    assert!(!out.exists());
}

#[test]
fn limits_by_flag_and_by_configuration_are_the_ones_in_force() {
    let shown: Value = serde_json::from_str(&ok(&[
        "plugins",
        "show",
        "in-order",
        "--limit",
        "memory_mib=3",
        "--limit",
        "call_deadline_ms=1500",
        "--wasi",
        "--json",
    ]))
    .unwrap();
    assert_eq!((&shown["limits"]["memory_mib"], &shown["limits"]["wasi"]), (&Value::from(3), &Value::from(true)));
    let text = ok(&["plugins", "show", "in-order", "--limit", "call_deadline_ms=1500"]);
    assert!(text.contains("1.5 s a call (20 s to start)") && text.contains("wasi      off"), "{text}");

    // A million records need more memory than this; what is asked for is what the check runs under.
    let said = fails(&["plugins", "check", "shuffled", "--limit", "memory_mib=3"], 5);
    assert!(said.contains("fails 1 of"), "{said}");
    let said = fails(&["corpus", "batches", QUICKSTART, "--set", "plugins.limits.sampler.memory_mib=1"], 5);
    assert!(said.contains("plugin::memory") && said.contains("at most 1 MiB"), "{said}");
    assert!(fails(&["plugins", "check", "shuffled", "--limit", "memory=3"], 2).contains("usage::limit"));
}

/// A new project, in a folder of its own.
fn new_project(parent: &Path, kind: &str, language: &str) -> String {
    let name = format!("my-{kind}-{language}");
    let out = tunehost(&["plugins", "new", &name, "--kind", kind, "--lang", language]).current_dir(parent).output();
    let out = out.unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains(&format!("tunehost plugins build {name}")), "{said}");
    parent.join(name).to_str().unwrap().into()
}

/// What `plugins build` says when only the programs in `path` are there; it must end with exit code 5.
fn fails_to_build(project: &str, path: &Path) -> String {
    let out = tunehost(&["plugins", "build", project]).env("PATH", path).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// A program of this name in `folder` that runs a line of shell.
fn fake(folder: &Path, name: &str, line: &str) {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_build_without_its_tool_names_it_and_how_to_install_it() {
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    for (language, tool, install) in [
        ("rust", "wasm32-unknown-unknown", "rustup target add wasm32-unknown-unknown"),
        ("python", "componentize-py", "pip install componentize-py=="),
        ("javascript", "node", "install Node.js"),
        ("c", "zig", "pip install ziglang=="),
    ] {
        let said = fails_to_build(&new_project(dir.path(), "sampler", language), &bin);
        assert!(said.contains("plugin::no_tool") && said.contains(tool) && said.contains(install), "{said}");
    }
    fake(&bin, "node", "exit 0");
    let said = fails_to_build(&new_project(dir.path(), "corpus-filter", "javascript"), &bin);
    assert!(said.contains("componentize-js") && said.contains("npm install"), "{said}");
}

#[test]
fn a_build_that_fails_shows_why_and_leaves_the_last_component() {
    let dir = tempfile::tempdir().unwrap();
    let project = new_project(dir.path(), "sampler", "python");
    let built = Path::new(&project).join("target/my-sampler-python.wasm");
    fs::create_dir(built.parent().unwrap()).unwrap();
    fs::write(&built, "the last one").unwrap();
    fake(dir.path(), "componentize-py", "echo 'SyntaxError: line 3' >&2; exit 1");
    let said = fails_to_build(&project, dir.path());
    assert!(said.contains("plugin::build_failed") && said.contains("SyntaxError: line 3"), "{said}");
    fake(dir.path(), "componentize-py", "echo 'no component' > target/component.wasm");
    let said = fails_to_build(&project, dir.path());
    assert!(said.contains("plugin::not_a_component"), "{said}");
    assert_eq!(fs::read_to_string(&built).unwrap(), "the last one");
}

#[test]
fn a_build_says_what_it_made() {
    let dir = tempfile::tempdir().unwrap();
    let project = new_project(dir.path(), "sampler", "python");
    // Any component of the world stands in for what the tool makes; its own section is read where it is the last.
    let shuffled = root().join("plugins/dist/shuffled.wasm");
    fake(dir.path(), "componentize-py", &format!("/bin/cp {} target/component.wasm", shuffled.display()));
    let build = |args: &[&str]| {
        let out = tunehost(&[&["plugins", "build", &project], args].concat()).env("PATH", dir.path()).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let built: Value = serde_json::from_str(&build(&["--json"])).unwrap();
    assert_eq!((&built["name"], &built["version"]), (&"my-sampler-python".into(), &"0.1.0".into()));
    assert_eq!(built["kind"], "sampler");
    let path = built["path"].as_str().unwrap();
    assert_eq!(built["size_bytes"], fs::metadata(path).unwrap().len());
    let said = build(&[]);
    for word in ["my-sampler-python 0.1.0", "sampler", path, built["sha256"].as_str().unwrap(), "plugins check"] {
        assert!(said.contains(word), "{word} is not in\n{said}");
    }
    // The bytes are those of another plugin, which `describe` gives away.
    let said = fails(&["plugins", "check", path], 5);
    assert!(said.contains("plugin::misdescribed") && said.contains("shuffled"), "{said}");
}

#[test]
fn a_project_that_cannot_be_is_refused() {
    let said = fails(&["plugins", "new", "mine", "--kind", "samplers", "--lang", "c"], 2);
    assert!(said.contains("usage::unknown_plugin_kind"), "{said}");
    let said = fails(&["plugins", "new", "mine", "--kind", "exporter", "--lang", "c"], 2);
    assert!(said.contains("usage::no_template") && said.contains("rust: sampler"), "{said}");
    let said = fails(&["plugins", "new", "Mine", "--kind", "sampler", "--lang", "c"], 2);
    assert!(said.contains("usage::invalid_value"), "{said}");
    let said = fails(&["plugins", "build", "configs"], 2);
    assert!(said.contains("usage::no_project") && said.contains("plugins new"), "{said}");
}

#[test]
fn what_is_trained_and_what_a_limit_costs_can_be_looked_at() {
    let shown = ok(&["corpus", "inspect", "tests/fixtures/corpus/smalltalk.jsonl", "-n", "2", "--model", BASE]);
    assert_eq!(shown.matches(" trained\n").count(), 2, "{shown}");
    assert!(shown.contains("<|turn>model\n⟦") && shown.contains("<turn|>⟧"), "{shown}");
    assert!(shown.contains("no filter, cap, weight or length limit is applied"), "{shown}");
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html").display().to_string();
    ok(&["corpus", "inspect", QUICKSTART, "-n", "1", "--html", &page]);
    assert!(fs::read_to_string(&page).unwrap().contains("&lt;turn|&gt;</b>"));
    assert!(fails(&["corpus", "inspect", QUICKSTART, "--html", &page], 10).contains("exists already"));
    let said = fails(&["corpus", "inspect", "tests/fixtures/corpus/smalltalk.jsonl"], 2);
    assert!(said.contains("usage::no_model") && said.contains("--model DIR"), "{said}");

    let reports = ok(&["corpus", "stats", QUICKSTART, "--lengths", "64,512", "--json"]);
    let reports: Value = serde_json::from_str(&reports).unwrap();
    let lost = |report: usize| reports[report]["roots"][0]["trained_tokens_lost"].as_u64().unwrap();
    assert!(lost(0) > lost(1), "{reports}");
    let dropped = ok(&["corpus", "stats", QUICKSTART, "--lengths", "96", "--json", "--set", "data.overlong=\"drop\""]);
    let dropped: Value = serde_json::from_str(&dropped).unwrap();
    let root = &dropped[0]["roots"][0];
    assert_eq!((&root["records_cut"], &dropped[0]["overlong"]), (&json!(0), &json!("drop")), "{dropped}");
    assert!(root["records_dropped"].as_u64().unwrap() > 0 && root["trained_tokens_lost"].as_u64().unwrap() > lost(0));
}
