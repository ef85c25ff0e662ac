//! `tunehost plan` as a person meets it.

mod common;

use common::large::write_bench_base;
use common::{fails, ok, output, peak_mib, root, tunehost};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A base of the published 26B-A4B headers whose weights are holes in a file, with the bundled tokenizer.
fn large_base(dir: &Path) -> PathBuf {
    let fixtures = root().join("tests/fixtures");
    let base = dir.join("large");
    fs::create_dir(&base).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        fs::copy(fixtures.join("tiny-base").join(file), base.join(file)).unwrap();
    }
    fs::copy(fixtures.join("gemma4-26b-a4b-config.json"), base.join("config.json")).unwrap();
    let tensors = fs::read(fixtures.join("gemma4-26b-a4b-tensors.json")).unwrap();
    let tensors: Vec<(String, Vec<u64>)> = serde_json::from_slice(&tensors).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<u64>();
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(base.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    base
}

/// A configuration of `base` on 40 records, without held-out ones.
fn config(dir: &Path, base: &Path) -> String {
    let records: Vec<String> =
        (0..40).map(|i| json!({"text": format!("line {i} {}", "word ".repeat(5 + i % 9))}).to_string()).collect();
    fs::write(dir.join("records.jsonl"), records.join("\n")).unwrap();
    let path = dir.join("sized.toml");
    let text = format!(
        "name = \"sized\"\nmodel.base = \"{}\"\nmodel.weights = \"bf16\"\nlora.rank = 64\nexport.merged = false\n\
         train = {{ micro_batch = 2, accumulation = 3, loss_chunk_rows = 1024, recompute_granularity = \"full\" }}\n\
         [data]\ntemplate = \"base\"\nmax_seq_len = 16384\ncache = \"off\"\nheld_out = 0.0\n\
         sources = [{{ path = \"records.jsonl\", root = \"records\" }}]\n",
        base.display()
    );
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn planned(config: &str, more: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["plan", config, "--json"], more].concat())).unwrap()
}

#[test]
fn a_model_that_no_memory_here_holds_is_sized_from_its_headers() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &large_base(dir.path()));
    let report = planned(&config, &["--device-memory", "95.6GiB"]);
    assert_eq!(report["base"]["parameters"], 25_805_936_206u64);
    assert_eq!((&report["adapters"]["modules"], &report["adapters"]["parameters"]), (&json!(205), &json!(74_342_400)));
    let memory = &report["memory"];
    assert_eq!(
        (&memory["limit"]["bytes"], &memory["limit"]["source"]),
        (&json!(102_649_718_374u64), &json!("assumed"))
    );
    // Two full rows fit, as they were measured to on such a card, and so does no shape of eight rows of 32,768.
    assert_eq!(memory["configured"]["fits"], true, "{}", memory["configured"]);
    let shapes = memory["shapes"].as_array().unwrap();
    assert_eq!(shapes.len(), 40);
    let fits = |rows: u64, tokens: u64| {
        let shape = shapes.iter().find(|s| s["micro_batch"] == rows && s["seq_len_tokens"] == tokens);
        shape.unwrap()["fits"].as_bool().unwrap()
    };
    assert!(fits(1, 2048) && !fits(8, 32_768));
    let most = memory["most_rows"]["micro_batch"].as_u64().unwrap();
    assert!(fits(most, 16_384) && (most == 8 || !fits(most + 1, 16_384)), "{most}");
    let longest = memory["longest"]["seq_len_tokens"].as_u64().unwrap();
    assert!(memory["longest"]["micro_batch"] == 2 && fits(2, longest), "{longest}");
    assert!(longest == 32_768 || !fits(2, 2 * longest), "{longest}");
    // 20 micro-batches of two rows, in steps of three
    let steps = &report["steps"];
    assert_eq!((&steps["optimiser_steps"], &steps["micro_batches"]), (&json!(7), &json!(20)));
    assert_eq!(steps["last_step_micro_batches"], 2);

    let small = output(&["plan", &config, "--device-memory", "20GiB"]);
    let (text, said) = (String::from_utf8_lossy(&small.stdout), String::from_utf8_lossy(&small.stderr));
    assert!(small.status.code() == Some(7) && said.contains("gate::free_memory"), "{said}");
    assert!(text.contains("experts") && text.contains("42.5 GiB") && text.contains("no shape fits"), "{text}");
    assert!(text.contains("205") && text.contains("the 5 full layers have no v_proj"), "{text}");
}

#[test]
fn checkpoints_and_times_are_those_of_the_scheduler_on_a_clock_of_the_stated_speed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &root().join("tests/fixtures/tiny-base"));
    let every = ["--plugins", "checkpoint-scheduler=every-n-steps"];
    let every = [&every[..], &["--set", "plugins.config.checkpoint_scheduler={n = 3}"]].concat();
    let speed = |peak: &'static str| ["--peak-tflops", peak, "--utilisation", "0.5,0.1"];
    let report = planned(&config, &[&every[..], &speed("1")].concat());
    let schedules = report["schedules"].as_array().unwrap();
    assert_eq!(schedules.len(), 2);
    assert!(schedules.iter().all(|at| at["checkpoints"] == json!([3, 6, 7])), "{schedules:?}");
    assert_eq!(report["disk"]["checkpoints_bytes"], 3 * report["disk"]["checkpoint_bytes"].as_u64().unwrap());
    let seconds = |at: usize| schedules[at]["training_s"].as_f64().unwrap();
    assert!((seconds(0) / seconds(1) - 5.0).abs() < 1e-9, "the slow end first: {schedules:?}");
    let performed = report["steps"]["work"]["performed_flop"].as_f64().unwrap();
    assert!((seconds(1) - performed / 0.5e12).abs() < 1e-9 * seconds(1));

    // A minute by the clock is many steps of a fast device and less than one of a slow one.
    let minute = ["--plugins", "checkpoint-scheduler=wall-clock"];
    let minute = [&minute[..], &["--set", "plugins.config.checkpoint_scheduler={minutes = 1}"]].concat();
    let saved = |peak: &'static str| {
        let report = planned(&config, &[&minute[..], &speed(peak)].concat());
        report["schedules"][0]["checkpoints"].as_array().unwrap().len()
    };
    assert_eq!((saved("1"), saved("1e-9")), (1, 7));
    assert!(ok(&["plan", &config]).contains("not told without a speed"));
    let never =
        ["--plugins", "checkpoint-scheduler=every-n-steps", "--set", "plugins.config.checkpoint_scheduler={n = 99}"];
    let said = ok(&[&["plan", &config], &never[..], &speed("1")].concat());
    assert!(said.contains("1 checkpoints, the first after step 7: none before the end"), "{said}");
}

#[test]
fn a_large_corpus_is_estimated_from_a_sample_until_the_cache_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &root().join("tests/fixtures/tiny-base"));
    // 70 MiB of which little is trained
    let note = "x".repeat(64 << 10);
    let record =
        |i: usize| json!({"text": format!("{i} {}", "word ".repeat(3 + i * 7 % 53)), "note": note}).to_string();
    let mut file = std::io::BufWriter::new(File::create(dir.path().join("records.jsonl")).unwrap());
    (0..1120).for_each(|i| writeln!(file, "{}", record(i)).unwrap());
    drop(file);
    let cache = format!("data.cache=\"{}\"", dir.path().join("cache").display());
    let plan = |more: &[&str]| planned(&config, &[&["--set", "data.cache=off"], more].concat());
    let (estimated, exact) = (plan(&[]), plan(&["--exact"]));
    assert_eq!(estimated["corpus"]["sample"], json!({"rows": 224, "of_rows": 1120}));
    assert_eq!(
        (&estimated["corpus"]["source"], &estimated["steps"]["source"]),
        (&json!("estimated"), &json!("estimated"))
    );
    assert_eq!((&exact["corpus"]["sample"], &exact["corpus"]["source"]), (&json!(null), &json!("measured")));
    for name in ["optimiser_steps", "tokens", "trained_tokens"] {
        let of = |plan: &Value| plan["steps"][name].as_f64().unwrap();
        assert!((of(&estimated) / of(&exact) - 1.0).abs() < 0.05, "{name}: {} {}", estimated["steps"], exact["steps"]);
    }
    let said = ok(&["plan", &config]);
    assert!(said.contains("estimated from 224 of 1,120 rows") && said.contains("steps (estimated)"), "{said}");
    planned(&config, &["--exact", "--set", &cache]);
    assert_eq!(planned(&config, &["--set", &cache])["steps"], exact["steps"]);
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let large = large_base(dir.path());
    let config = config(dir.path(), &large);
    let published = fs::read_to_string(large.join("config.json")).unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_str(&published).unwrap();
        change(&mut value["text_config"]);
        fs::write(large.join("config.json"), value.to_string()).unwrap();
    };
    with(&|text| drop(text.as_object_mut().unwrap().remove("moe_intermediate_size")));
    let said = fails(&["plan", &config], 4);
    assert!(said.contains("model::bad_config") && said.contains("lacks `moe_intermediate_size`"), "{said}");
    with(&|text| drop(text.as_object_mut().unwrap().remove("model_type")));
    let said = fails(&["plan", &config], 4);
    assert!(said.contains("model::bad_config") && said.contains("lacks `model_type`"), "{said}");
    with(&|text| text["model_type"] = json!("llama"));
    let said = fails(&["plan", &config], 4);
    assert!(said.contains("model::unsupported") && said.contains("`llama`"), "{said}");
    with(&|_| {});
    let said = fails(&["plan", &config, "--device-memory", "96"], 2);
    assert!(said.contains("usage::size") && said.contains("such as 95.6GiB"), "{said}");
    let said = fails(&["plan", &config, "--set", "model.quantize=nf4"], 7);
    assert!(said.contains("gate::unquantised") && said.contains("experts.gate_up_proj"), "{said}");
    let said = fails(&["plan", &config, "--peak-tflops", "300"], 2);
    assert!(said.contains("--utilisation"), "{said}");

    fs::remove_file(large.join("model.safetensors")).unwrap();
    let index = json!({"weight_map": {"model.language_model.norm.weight": "model-00001-of-00002.safetensors"}});
    fs::write(large.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let said = fails(&["plan", &config], 4);
    assert!(
        said.contains("model::bad_index") && said.contains("model-00001-of-00002.safetensors for 1 tensors"),
        "{said}"
    );
    fs::write(large.join("model.safetensors.index.json"), "{\"weight_map\": {}}").unwrap();
    let said = fails(&["plan", &config], 4);
    assert!(said.contains("model::bad_index") && said.contains("index.json names no tensor"), "{said}");
}

#[cfg(target_os = "linux")] // peak memory as /proc tells it
#[test]
fn the_peak_of_a_step_is_within_a_tenth_of_what_a_run_takes() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &root().join("tests/fixtures/tiny-base"));
    let text = fs::read_to_string(root().join("tests/fixtures/corpus/verse.jsonl")).unwrap();
    let words: Vec<&str> =
        text.split_ascii_whitespace().filter(|w| w.bytes().all(|c| c.is_ascii_alphabetic())).collect();
    // longer than any row, so that every row is full
    let record = |i: usize| {
        let text: Vec<&str> = (0..9000).map(|k| words[(k * 7 + i * 31) % words.len()]).collect();
        json!({"text": format!("{i} {}", text.join(" "))}).to_string()
    };
    fs::write(dir.path().join("records.jsonl"), [record(0), record(1)].join("\n")).unwrap();
    for (rows, tokens, granularity) in
        [(1, 2048, "selective"), (1, 8192, "selective"), (2, 2048, "full"), (2, 8192, "full")]
    {
        assert_peak(&config, (rows, tokens), "f32", &format!("recompute_granularity=\"{granularity}\""));
    }
}

/// Runs a step of `rows` full rows of `tokens` tokens, with these settings of `train`, and compares.
#[cfg(target_os = "linux")]
fn assert_peak(config: &str, (rows, tokens): (usize, usize), weights: &str, train: &str) {
    let sets = [
        format!("model.weights={weights}"),
        "lora.rank=16".into(),
        format!("data.max_seq_len={tokens}"),
        format!("train={{micro_batch={rows}, accumulation=1, max_steps=1, {train}}}"),
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set.as_str()]).collect();
    let planned = planned(config, &sets)["memory"]["configured"]["peak_bytes"].as_f64().unwrap() / 1048576.0;
    let run = tempfile::tempdir().unwrap();
    let run = run.path().join("run").display().to_string();
    let bare = ["--set", "export={adapter=false, merged=false}", "--set", "eval.max_records_per_root=0"];
    let measured = peak_mib(tunehost(&[&["run", config, "--run-dir", &run], &sets[..], &bare].concat()));
    let what = format!("{rows} x {tokens} {weights} {train}: {planned:.1} MiB planned, {measured:.1} MiB measured");
    println!("{what}");
    assert!((planned / measured - 1.0).abs() < 0.1, "{what}");
}

#[cfg(target_os = "linux")]
#[test]
fn the_peak_of_a_model_shaped_like_the_large_one_is_within_a_tenth_in_fourteen_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("bench");
    fs::create_dir(&base).unwrap();
    write_bench_base(&base);
    let config = config(dir.path(), &base);
    let text = fs::read_to_string(&config).unwrap().replace("template = \"base\"\n", "");
    fs::write(&config, text).unwrap();
    let record = |i: usize| json!({"input_ids": (0..2048).map(|t| 3 + (t * 31 + i * 7) % 32_000).collect::<Vec<_>>()});
    fs::write(dir.path().join("records.jsonl"), [0, 1].map(|i| record(i).to_string()).join("\n")).unwrap();
    const SELECTIVE: &str = "recompute_granularity=\"selective\"";
    const FULL: &str = "recompute_granularity=\"full\"";
    const NONE: &str = "recompute=\"none\"";
    for (shape, weights, train) in [
        ((1, 256), "f32", SELECTIVE),
        ((1, 1024), "f32", SELECTIVE),
        ((2, 1024), "f32", SELECTIVE),
        ((1, 2048), "bf16", SELECTIVE),
        ((1, 512), "f32", FULL),
        ((2, 512), "bf16", FULL),
        ((1, 2048), "bf16", FULL),
        ((1, 512), "f32", NONE),
        ((1, 1024), "bf16", NONE),
        ((2, 1024), "bf16", NONE),
        ((2, 256), "f32", "recompute=3"),
        ((1, 1024), "bf16", "recompute=3, recompute_granularity=\"full\""),
        ((1, 2048), "bf16", "loss_chunk_rows=2048"),
        ((1, 2048), "bf16", "residuals=\"bf16\", recompute_granularity=\"full\""),
    ] {
        assert_peak(&config, shape, weights, train);
    }
}
