//! Running the `tunehost` binary on the bundled base and corpus.
#![allow(dead_code)] // each test binary uses its own part of it

pub mod accounted;
pub mod large;
pub mod short;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// A copy of the bundled base, as the new folder `copy`.
pub fn copy_base(copy: &Path) -> PathBuf {
    fs::create_dir(copy).unwrap();
    for file in fs::read_dir(root().join("tests/fixtures/tiny-base")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    copy.to_path_buf()
}

/// `tunehost`, run in the repository.
pub fn tunehost(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tunehost"));
    command.args(args).current_dir(root());
    // Tests run side by side, and so do the runs of each: a device is one's alone within a thread.
    let own = format!("runtime/{}-{:?}", std::process::id(), std::thread::current().id());
    command.env("TUNEHOST_RUNTIME_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join(own));
    command
}

/// Runs it to the end.
pub fn output(args: &[&str]) -> Output {
    tunehost(args).output().unwrap()
}

/// Runs it and wants success; standard output.
pub fn ok(args: &[&str]) -> String {
    let out = output(args);
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "tunehost {args:?}: {}\n{stdout}\n{stderr}", out.status);
    stdout.into_owned()
}

/// Runs it and wants this exit code; standard error.
pub fn fails(args: &[&str], code: i32) -> String {
    let out = output(args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "tunehost {args:?}\n{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// Asks each command that computes on a device to do it on `device`, which it has to refuse; standard error of each.
pub fn refusals_of_device(device: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out").display().to_string();
    let (quickstart, base) = ("configs/quickstart.toml", "tests/fixtures/tiny-base");
    let mut commands = vec![
        vec!["run", quickstart, "--run-dir", &out, "--device", device],
        vec!["generate", base, "--prompt", "Good morning", "--device", device],
        vec!["score", base, "--data", "tests/fixtures/corpus/stage.jsonl", "--device", device],
        vec!["export", "tests/fixtures/tune", "--out", &out, "--device", device],
    ];
    for command in ["probe mask", "probe adapters", "probe determinism", "profile", "bench", "smoke"] {
        commands.push(command.split(' ').chain([quickstart, "--device", device]).collect());
    }
    let refusals = commands.iter().map(|command| fails(command, 9)).collect();
    assert!(!Path::new(&out).exists(), "a refused command left {out}");
    refusals
}

/// Sends a signal, such as `INT`.
pub fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status().unwrap().success());
}

/// Starts `command`, sends it `signal` after `seconds`, and waits; what became of it.
pub fn signalled(signal: &str, seconds: f64, mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_secs_f64(seconds));
    send(signal, &child);
    child.wait_with_output().unwrap()
}

/// Runs `command` and wants success; the most memory that it had, MiB, as Linux counted it shortly before its end.
pub fn peak_mib(command: Command) -> f64 {
    with_peak_mib(command).1
}

/// The same, and its standard output; no peak where the system is not Linux.
pub fn with_peak_mib(mut command: Command) -> (String, f64) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let said = std::thread::spawn(move || {
        let mut said = String::new();
        stdout.read_to_string(&mut said).unwrap();
        said
    });
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0.0;
    loop {
        if let Some(now) = std::fs::read_to_string(&status).ok().and_then(|status| {
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok())
        }) {
            peak = now / 1024.0;
        }
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            return (said.join().unwrap(), peak);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
