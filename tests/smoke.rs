//! `tunehost smoke` as a person meets it: shapes that fit and one that does not, and what `plan` and `run` make of it.
#![cfg(target_os = "linux")] // memory is measured and limited there

mod common;
#[path = "../host/src/documented.rs"]
mod documented;

use common::short::provenance;
use common::{fails, ok, root, tunehost};
use documented::assert_documented;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Tokens of the longest record, and of the longest that the configuration allows.
const LONGEST: usize = 16_384;
/// Enough for the program and short records; less than a fifth of what the longest record's step takes.
const LIMIT_KIB: usize = 400 << 10;

/// The bundled base on 30 short records and a long one.
fn config(dir: &Path) -> String {
    let record = |tokens: usize| {
        let ids: Vec<usize> = (0..tokens).map(|t| 3 + t * 7 % 700).collect();
        json!({"input_ids": ids}).to_string()
    };
    let records: Vec<String> = (0..30).map(|i| record(20 + 4 * i)).chain([record(LONGEST)]).collect();
    fs::write(dir.join("records.jsonl"), records.join("\n")).unwrap();
    let path = dir.join("small.toml");
    let text = format!(
        "name = \"small\"\nmodel.base = \"{}\"\nrun.root = \"runs\"\nplugins.sampler = \"shuffled\"\n\
         train = {{ micro_batch = 1, accumulation = 2, recompute = \"none\" }}\n\
         gates = {{ tokens_per_step = \"off\" }}\nexport = {{ adapter = false, merged = false }}\n\
         [data]\ntemplate = \"base\"\nmax_seq_len = {LONGEST}\nheld_out = 0.0\n\
         sources = [{{ path = \"records.jsonl\", root = \"records\" }}]\n",
        root().join("tests/fixtures/tiny-base").display()
    );
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn memory_that_runs_out_is_a_result_that_run_and_plan_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    // Memory that a process itself asks for, of the one that measures and of each that it starts.
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -d {LIMIT_KIB}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_tunehost")]);
    limited.args(["smoke", &config, "--steps", "5"]).env("TUNEHOST_RUNTIME_DIR", dir.path().join("runtime"));
    let out = limited.current_dir(root()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("will not fit: 1 x 16,384 (out of memory)"), "{stdout}");

    // A place that cannot be written is told before anything is measured.
    let folder = dir.path().display().to_string();
    let said = fails(&["smoke", &config, "--out", &folder], 8);
    assert!(said.contains(&folder) && !said.contains("shape "), "{said}");
    let path = dir.path().join("runs/small.smoke.json");
    let smoke = read(&path);
    let shapes = smoke["shapes"].as_array().unwrap();
    let names = |shape: &Value| shape["names"].as_array().unwrap().len();
    assert_eq!(shapes.iter().map(names).collect::<Vec<_>>(), [1, 1, 2], "p50, p90, max and worst");
    for shape in &shapes[..2] {
        assert_eq!((&shape["outcome"], &shape["steps"]), (&json!("fits"), &json!(5)), "{shape}");
        let time = &shape["micro_batch_s"];
        let of = |name: &str| time[name].as_f64().unwrap();
        assert!(time["n"] == 3 && 0.0 < of("min") && of("min") <= of("median") && of("median") <= of("max"), "{shape}");
        let [loaded, peak, computed] =
            ["loaded_bytes", "peak_bytes", "computed_peak_bytes"].map(|name| shape[name].as_f64().unwrap());
        assert!(loaded <= peak && (computed / peak - 1.0).abs() < 0.25, "{shape}");
    }
    assert_eq!(shapes[2]["outcome"], "out_of_memory");
    assert!(shapes[2]["why"].as_str().unwrap().contains("memory allocation of"), "{}", shapes[2]);
    let residuals = smoke["fit"]["residuals"].as_array().unwrap();
    assert_eq!(residuals.len(), 2);
    assert!(stdout.contains("not to be trusted: two coefficients through n = 2 widths"), "{stdout}");
    let [fastest, median, slowest] = [0, 1, 2].map(|at| smoke["prediction"]["run_s"][at].as_f64().unwrap());
    assert!(0.0 < fastest && fastest <= median && median <= slowest, "{}", smoke["prediction"]);

    // What failed is refused, before the base is read, and said to be what can be let through.
    let said = fails(&["run", &config], 7);
    assert!(said.contains("gate::smoke") && said.contains("1 x 16384 ran out of memory"), "{said}");
    assert!(said.contains("small.smoke.json") && said.contains("--set gates.smoke=warn"), "{said}");
    assert!(!dir.path().join("runs/small-001").exists());
    // `bench` says whether it measures with the kernels that smoke measured with.
    let bench = |more: &[&str]| -> Value {
        let args = ["bench", &config, "--times", "1", "--json", "--set", "data.max_seq_len=100"];
        serde_json::from_str(&ok(&[&args[..], more].concat())).unwrap()
    };
    let (same, other) = (bench(&[]), bench(&["--set", "model.weights=bf16"]));
    assert!(same["smoke"]["same"] == true && same["smoke"]["kernels_sha256"] == same["kernels_sha256"], "{same}");
    assert_eq!(smoke["fingerprint"]["kernels_sha256"], same["kernels_sha256"]);
    assert!(other["smoke"]["same"] == false && other["smoke"]["kernels_sha256"] != other["kernels_sha256"], "{other}");
    // Shorter records are none of that shape, and were seen to fit.
    let short = ["--set", "data.max_seq_len=100", "--set", "train.max_steps=1"];
    ok(&[&["run", &config], &short[..]].concat());
    let gate = &provenance(&dir.path().join("runs/small-001"))["gates"]["smoke"];
    assert!(gate["verdict"] == "passed" && gate["found"].as_str().unwrap().contains("100 tokens"), "{gate}");

    // A gate that only warns lets through what it would have stopped.
    let mut failed = smoke.clone();
    failed["shapes"][0]["outcome"] = json!("crashed");
    fs::write(&path, failed.to_string()).unwrap();
    assert!(fails(&[&["run", &config], &short[..]].concat(), 7).contains("gate::smoke"));
    let warned = tunehost(&[&["run", &config, "--set", "gates.smoke=warn"], &short[..]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&warned.stderr);
    assert!(warned.status.success() && said.contains("gate smoke") && said.contains("crashed"), "{said}");
    assert_eq!(provenance(&dir.path().join("runs/small-002"))["gates"]["smoke"]["verdict"], "warned");
    fs::write(&path, smoke.to_string()).unwrap();

    // `plan` tells what a run would be refused for, takes its time from it, and says which checkpoints that makes.
    assert!(fails(&["plan", &config], 7).contains("gate::smoke"));
    let plan = |more: &[&str]| -> Value {
        let args = ["plan", &config, "--json", "--set", "gates.smoke=warn"];
        serde_json::from_str(&ok(&[&args[..], more].concat())).unwrap()
    };
    let planned = plan(&[]);
    let seconds = |at: usize| planned["schedules"][at]["training_s"].as_f64().unwrap();
    assert_eq!(planned["schedules"][1]["source"], "measured");
    assert!((seconds(1) / median - 1.0).abs() < 1e-9 && seconds(0) >= seconds(1) && seconds(1) >= seconds(2));
    assert_eq!(planned["measured"]["shapes"][2]["outcome"], "out of memory");

    // Measurements of another model, or of nothing, are said and not used.
    let stale = plan(&["--set", "lora.rank=8"]);
    let why = stale["measured"]["unused"].as_str().unwrap();
    assert!(planned["schedules"][1]["at"].as_str().unwrap().ends_with("whose fit is not to be trusted"));
    assert!(why.contains("lora.rank was 16, is 8") && stale["schedules"] == json!([]), "{stale:#}");
    let other = tunehost(&[&["run", &config, "--set", "lora.rank=8"], &short[..]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.success() && said.contains("is not used") && said.contains("lora.rank was 16"), "{said}");
    // All that can be told: with a limit, at an assumed speed, and with measurements that are used or not.
    let more = ["--device-memory", "4GiB", "--peak-tflops", "1", "--utilisation", "0.1"];
    let table = include_str!("../host/src/plan/plan.md");
    let merged = ["--set", "data.held_out=0.3", "--set", "export.merged=true"];
    let samples = [&[][..], &["--set", "lora.rank=8"], &merged].map(|sets| plan(&[&more[..], sets].concat()));
    assert_documented(table, &samples);
    fs::write(&path, "{").unwrap();
    assert!(ok(&["plan", &config]).contains("it cannot be read"));
    let said = fails(&["plan", &config, "--smoke", path.to_str().unwrap()], 2);
    assert!(said.contains("usage::smoke") && said.contains("cannot be read"), "{said}");
    fs::remove_file(&path).unwrap();
    assert!(ok(&["plan", &config]).contains("nothing was measured"));
    let said = fails(&["plan", &config, "--smoke", path.to_str().unwrap()], 2);
    assert!(said.contains("usage::smoke"), "{said}");
}

#[test]
fn a_process_that_measures_takes_those_that_it_started_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let run = tunehost(&["smoke", &config, "--steps", "1000000", "--set", "data.max_seq_len=100"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut run = run.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let wait = |what: &str, until: &dyn Fn() -> bool| {
        while !until() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let children = format!("/proc/{0}/task/{0}/children", run.id());
    let started = || fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse::<u32>().ok();
    wait("no process was started", &|| started().is_some());
    let child = started().unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    let alive = || {
        let status = fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
    };
    wait("the process of the shape is still there", &|| !alive());
    assert!(!dir.path().join("runs/small.smoke.json").exists());
}
