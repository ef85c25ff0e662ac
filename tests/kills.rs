//! A run killed at each of its file operations, and at any time, resumes to the bytes of one that was not.
#![cfg(target_os = "linux")] // the kills come by LD_PRELOAD

mod common;

use common::short::{assert_same, config, contents, fault_library};
use common::{ok, tunehost};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SIGKILL: i32 = 9;

/// `tunehost` that dies at its `at`-th point of file operations in the folder `run`, if it has so many.
fn killed_at(library: &Path, run: &Path, at: u64, args: &[&str]) -> ExitStatus {
    let mut command = tunehost(args);
    command.env("LD_PRELOAD", library).env("FAULTS_UNDER", run).env("KILL_AT", at.to_string());
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
    let config = config(&dir, "");
    let config = config.to_str().unwrap();
    let library = fault_library(&dir);
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
