//! A run killed at each of its file operations, and at any time, resumes to the bytes of one that was not.
#![cfg(target_os = "linux")] // the kills come by LD_PRELOAD

mod common;

use common::{ok, tunehost};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SIGKILL: i32 = 9;

/// Three steps with a checkpoint before the last, dropout on: every kind of file of a run, in a third of a second.
fn config(dir: &Path) -> PathBuf {
    let base = common::root().join("tests/fixtures/tiny-base");
    let base = base.display();
    let lines: Vec<String> =
        (0..24).map(|i| format!(r#"{{"id": "r{i}", "text": "{}"}}"#, format!("word {i} ").repeat(1 + i % 5))).collect();
    fs::write(dir.join("records.jsonl"), lines.join("\n")).unwrap();
    let path = dir.join("short.toml");
    let text = format!(
        r#"
name = "short"
model.base = "{base}"
data = {{ template = "{base}/chat_template.jinja", max_seq_len = 128, held_out = 0.2, sources = [{{ path = "records.jsonl", root = "records" }}] }}
lora.dropout = 0.1
train = {{ max_steps = 3, micro_batch = 2, accumulation = 1, lr = 1e-3 }}
plugins.checkpoint_scheduler = "every-n-steps"
plugins.config.checkpoint_scheduler.n = 2
"#
    );
    fs::write(&path, text).unwrap();
    path
}

/// Every file that a resume must reproduce, by its path in the run folder. Clocks, the pid and the history of the run are in
/// the others; what a killed process left beside its place is nobody's.
fn contents(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with('.') || ["provenance.json", "timing.jsonl", "run.lock"].contains(&name) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(run).unwrap().into(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

fn assert_same(whole: &BTreeMap<PathBuf, Vec<u8>>, run: &Path, how: &str) {
    let other = contents(run);
    assert!(whole.keys().eq(other.keys()), "{how}: {:?}", other.keys());
    for (path, bytes) in whole {
        assert!(*bytes == other[path], "{how}: {} differs", path.display());
    }
}

/// `tunehost` that dies at its `at`-th point of file operations in the folder `run`, if it has so many.
fn killed_at(library: &Path, run: &Path, at: u64, args: &[&str]) -> ExitStatus {
    let mut command = tunehost(args);
    command.env("LD_PRELOAD", library).env("KILL_UNDER", run).env("KILL_AT", at.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}

/// Goes on with a run that was killed, and says whether there was one: before its provenance is there, nothing is trained.
fn resumed(run: &Path) -> bool {
    let recorded = run.join("provenance.json").exists();
    if recorded {
        ok(&["resume", run.to_str().unwrap()]);
    } else {
        assert!(!run.join("metrics.jsonl").exists() && !run.join("checkpoints").exists());
    }
    recorded
}

#[test]
fn killed_at_every_file_operation_and_at_any_time() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let config = config(&dir);
    let config = config.to_str().unwrap();
    let library = dir.join("kill_at.so");
    let source = common::root().join("tests/faults/kill_at.c");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl").status();
    assert!(built.unwrap().success());
    let whole = dir.join("whole");
    ok(&["run", config, "--run-dir", whole.to_str().unwrap()]);
    let whole = contents(&whole);
    assert!(whole.keys().any(|path| path.ends_with("export/merged/model.safetensors")), "{:?}", whole.keys());

    let (next, kills, resumes) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0));
    let sweep = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let run = dir.join(format!("at-{at}"));
            let args = ["run", config, "--run-dir", run.to_str().unwrap()];
            let status = killed_at(&library, &run, at, &args);
            if status.success() {
                break;
            }
            assert_eq!(status.signal(), Some(SIGKILL), "point {at}: {status}");
            kills.fetch_add(1, Ordering::Relaxed);
            // One in three is killed once more while it resumes.
            if at % 3 == 0 && run.join("provenance.json").exists() {
                let status = killed_at(&library, &run, 1 + at * 7 % 40, &["resume", run.to_str().unwrap()]);
                kills.fetch_add(u64::from(status.signal() == Some(SIGKILL)), Ordering::Relaxed);
            }
            if resumed(&run) {
                assert_same(&whole, &run, &format!("killed at point {at}"));
                resumes.fetch_add(1, Ordering::Relaxed);
            }
            fs::remove_dir_all(&run).unwrap_or_default();
        }
    };
    std::thread::scope(|scope| [(); 2].map(|()| scope.spawn(sweep)).map(|thread| thread.join().unwrap()));
    assert!(resumes.load(Ordering::Relaxed) > 100, "{resumes:?} of {kills:?}");

    for i in 0..24_u64 {
        let run = dir.join(format!("time-{i}"));
        let mut child = tunehost(&["run", config, "--run-dir", run.to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Spread over the life of a run, in no order.
        std::thread::sleep(Duration::from_millis(20 + i * 61 % 300));
        child.kill().unwrap();
        kills.fetch_add(u64::from(child.wait().unwrap().signal() == Some(SIGKILL)), Ordering::Relaxed);
        if resumed(&run) {
            assert_same(&whole, &run, &format!("killed at a time, {i}"));
        }
        fs::remove_dir_all(&run).unwrap_or_default();
    }
    let kills = kills.into_inner();
    assert!(kills >= 200, "{kills} kills");
}
