//! A disk that is full, a folder that cannot be written and a base that is gone: one clear error, and what is saved stays good.
#![cfg(target_os = "linux")] // the faults come by LD_PRELOAD

mod common;

use common::short::{assert_same, config, contents, fault_library};
use common::{fails, ok, output, tunehost};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const ENOSPC: &str = "28";
const EROFS: &str = "30";

/// `tunehost` whose writes in the folder `run` fail with `errno`, from the `from`-th on.
fn failing(library: &Path, run: &Path, from: u64, errno: &str, args: &[&str]) -> Output {
    let mut command = tunehost(args);
    command.env("LD_PRELOAD", library).env("FAULTS_UNDER", run);
    command.env("FAIL_FROM", from.to_string()).env("FAIL_ERRNO", errno).output().unwrap()
}

/// Standard error of a command that ended with one error of the class `io`.
fn one_error(out: &Output) -> String {
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(8), "{said}");
    assert_eq!(said.matches("error[").count(), 1, "{said}");
    assert!(said.contains("error[io::failed]: cannot ") && !said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_full_disk_is_one_error_and_the_run_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let config = config(&dir, "");
    let library = fault_library(&dir);
    let whole = dir.join("whole");
    ok(&["run", config.to_str().unwrap(), "--run-dir", whole.to_str().unwrap()]);
    let whole = contents(&whole);

    let (mut at, mut full, mut saved) = (1, 0, 0);
    loop {
        let run = dir.join(format!("full-{at}"));
        let args = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
        let out = failing(&library, &run, at, ENOSPC, &args);
        if out.status.success() {
            break;
        }
        let said = one_error(&out);
        assert!(said.contains("No space left on device") && said.contains("help: make room"), "{said}");
        if run.join("provenance.json").exists() {
            // What the error says is saved is where the resume goes on.
            let promised =
                ["2", "3"].iter().find(|step| said.contains(&format!("step {step} is saved"))).unwrap_or(&"0");
            let resumed = ok(&["resume", run.to_str().unwrap()]);
            assert!(resumed.contains(&format!(" after step {promised} of 3")), "write {at}: {said}\n{resumed}");
            assert_same(&whole, &run, &format!("full at write {at}"));
            saved += u64::from(*promised != "0");
        }
        full += 1;
        at += 4;
    }
    assert!(full >= 8 && saved >= 3, "{full} full disks, {saved} of them after a checkpoint");
}

#[test]
fn a_file_beyond_the_limit_is_one_error_and_the_run_goes_on_without_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    ok(&["run", config.to_str().unwrap(), "--run-dir", whole.to_str().unwrap()]);
    // A mebibyte: the optimiser's state is larger.
    let start = tunehost(&["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()]);
    let mut limited = Command::new("bash");
    limited.args(["-c", "ulimit -f 1024; exec \"$0\" \"$@\""]).arg(start.get_program()).args(start.get_args());
    limited.envs(start.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = one_error(&limited.current_dir(common::root()).output().unwrap());
    assert!(said.contains("optimizer.safetensors: File too large") && said.contains("ulimit -f"), "{said}");
    ok(&["resume", run.to_str().unwrap()]);
    assert_same(&contents(&whole), &run, "a file was too large");
}

#[test]
fn a_folder_that_cannot_be_written_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let config = config(&dir, "");
    let library = fault_library(&dir);
    let run = dir.join("run");
    let start = ["run", config.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    let said = one_error(&failing(&library, &run, 1, EROFS, &start));
    assert!(said.contains("Read-only file system") && said.contains("help: make it writable"), "{said}");
    assert!(!run.exists());

    ok(&start);
    let whole = contents(&run);
    let said = one_error(&failing(&library, &run, 1, EROFS, &["resume", run.to_str().unwrap()]));
    assert!(said.contains(&format!("cannot lock {}/run.lock: Read-only file system", run.display())), "{said}");
    assert_same(&whole, &run, "after a refused resume");
}

#[test]
fn a_base_that_is_gone_is_one_error_and_the_run_goes_on_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let base = common::copy_base(&dir.path().join("base"));
    let config = config(dir.path(), "");
    let set = format!("model.base={}", base.display());
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    ok(&["run", config.to_str().unwrap(), "--set", &set, "--run-dir", whole.to_str().unwrap()]);
    let but_config = |run: &Path| {
        let mut contents = contents(run);
        contents.remove(Path::new("config.resolved.toml"));
        contents
    };

    // Gone as soon as the run has opened it: it trains to its end, and lacks the files that are copied to the export.
    let away = format!("window.open=[[\"mv\", \"{0}\", \"{0}-away\"]]", base.display());
    let start = ["run", config.to_str().unwrap(), "--set", &set, "--set", &away, "--run-dir", run.to_str().unwrap()];
    let said = one_error(&output(&start));
    assert!(said.contains(&base.display().to_string()) && said.contains("step 3 is saved"), "{said}");
    let resume = ["resume", run.to_str().unwrap(), "--set", "window.open=[]"];
    let said = fails(&resume, 4);
    assert!(said.contains(&base.display().to_string()), "{said}");
    fs::rename(format!("{}-away", base.display()), &base).unwrap();
    ok(&resume);
    // But for the command that took the base away, the two are one.
    assert!(but_config(&whole) == but_config(&run));
}
