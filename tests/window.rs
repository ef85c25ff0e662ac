//! The commands around a run: in order, kept, before anything is loaded, and closed however the run ends.

mod common;

use common::short::{assert_same, config, contents, provenance};
use common::{fails, ok, output, send, tunehost};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A run whose commands write down their names.
struct Case {
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Case {
    /// With the lines `open` and `close` of `[window]`; `NOTE` in them is the shell command that notes the word after it, and
    /// `RUN` the run folder.
    fn new(open: &str, close: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().display();
        let lines = format!("[window]\nopen = {open}\nclose = {close}\n");
        let lines = lines.replace("NOTE", &format!("echo >>{here}/notes")).replace("RUN", &format!("{here}/run"));
        let config = config(folder.path(), &lines);
        Self { folder, config }
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn start(&self) -> [String; 4] {
        ["run", self.config.to_str().unwrap(), "--run-dir", self.run().to_str().unwrap()].map(String::from)
    }

    /// What was noted, in order.
    fn notes(&self) -> Vec<String> {
        let notes = fs::read_to_string(self.folder.path().join("notes")).unwrap_or_default();
        notes.lines().map(|line| line.trim().to_string()).collect()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.run().join("window.log")).unwrap()
    }
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

fn wait_for(path: &Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < Duration::from_secs(60), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

const OPEN: &str = r#"[["sh", "-c", "NOTE open-0; echo the seat is free"], ["sh", "-c", "NOTE $0", "open 1"]]"#;
const CLOSE: &str = r#"[["sh", "-c", "NOTE close-0; echo the seat is back >&2"]]"#;

#[test]
fn commands_run_in_order_and_what_they_print_is_kept() {
    let case = Case::new(OPEN, CLOSE);
    let said = ok(&words(&case.start()));
    assert_eq!(provenance(&case.run())["gates"]["free_memory"]["verdict"], "passed");
    // An argument is an argument, blanks and all.
    assert_eq!(case.notes(), ["open-0", "open 1", "close-0"]);
    let (opened, loaded) = (said.find("window.open[1]").unwrap(), said.find("of weights loaded").unwrap());
    assert!(opened < loaded && loaded < said.find("window.close[0]").unwrap(), "{said}");
    let log = case.log();
    for line in ["\nthe seat is free\n", "\nthe seat is back\n", "Z window.open[0]: exit status: 0, 0 s\n"] {
        assert_eq!(log.matches(line).count(), 1, "{log}");
    }
}

#[test]
fn a_command_that_fails_stops_the_run_before_the_base_is_loaded() {
    let open =
        r#"[["sh", "-c", "NOTE open-0"], ["sh", "-c", "echo it will not go; exit 3"], ["sh", "-c", "NOTE never"]]"#;
    let close = r#"[["sh", "-c", "NOTE close-0; exit 1"], ["sh", "-c", "NOTE close-1"]]"#;
    let case = Case::new(open, close);
    let out = output(&words(&case.start()));
    let (said, lines) = (String::from_utf8_lossy(&out.stderr), String::from_utf8_lossy(&out.stdout));
    assert_eq!(out.status.code(), Some(6), "{said}");
    assert!(said.contains("error[run::window_open]: window.open[1] (sh -c "), "{said}");
    assert!(said.contains("exit status: 3") && said.contains("window.log"), "{said}");
    assert!(!lines.contains("loaded") && !case.run().join("metrics.jsonl").exists(), "{lines}");
    assert!(
        provenance(&case.run())["gates"].get("free_memory").is_none(),
        "it looks at the memory that the window frees"
    );
    // All of `close`, and the one that failed is told.
    assert_eq!(case.notes(), ["open-0", "close-0", "close-1"]);
    assert!(said.contains("warning: error[run::window_close]: window.close[0] "), "{said}");
    assert!(case.log().contains("it will not go\n"));
    let outcome = &provenance(&case.run())["outcome"];
    assert!(
        outcome["status"] == "failed" && outcome["reason"].as_str().unwrap().contains("window.open[1]"),
        "{outcome}"
    );

    // A run that is done and whose window did not close is done, and says so by its exit code.
    let said = fails(&["resume", case.run().to_str().unwrap(), "--set", "window.open=[[\"true\"]]"], 6);
    assert!(said.contains("error[run::window_close]") && said.contains("what the run computed is saved"), "{said}");
    assert_eq!(provenance(&case.run())["outcome"]["status"], "finished");
    assert!(case.run().join("export/adapter").exists());
}

#[test]
fn too_little_memory_after_it_stops_the_run_before_the_base_is_loaded() {
    let case = Case::new(OPEN, CLOSE);
    // Half a terabyte, for adapters of such a rank on such a record.
    let text = fs::read_to_string(&case.config).unwrap().replace("max_seq_len = 128", "max_seq_len = 32768");
    fs::write(&case.config, text).unwrap();
    let long = |i: usize| format!("{{\"text\": \"{}\"}}\n", format!("word {i} ").repeat(12_000));
    fs::write(case.folder.path().join("records.jsonl"), (0..9).map(long).collect::<String>()).unwrap();
    let out =
        output(&[&words(&case.start())[..], &["--set", "lora.rank=65536", "--set", "gates.free_disk=off"]].concat());
    let (said, lines) = (String::from_utf8_lossy(&out.stderr), String::from_utf8_lossy(&out.stdout));
    assert_eq!(out.status.code(), Some(7), "{said}");
    assert!(said.contains("error[gate::free_memory]: ") && said.contains("gates.free_memory=warn"), "{said}");
    assert!(lines.contains("window.open[1]") && !lines.contains("of weights loaded"), "{lines}");
    assert_eq!(case.notes(), ["open-0", "open 1", "close-0"]);
    assert_eq!(provenance(&case.run())["gates"]["free_memory"]["verdict"], "stopped");
}

#[test]
fn a_command_that_does_not_end_or_start_is_an_error() {
    let case = Case::new(r#"[["sh", "-c", "(sleep 2; NOTE late) & wait"]]"#, "[]\ndeadline_s = 1");
    let started = Instant::now();
    let said = fails(&words(&case.start()), 6);
    assert!(said.contains("window.open[0] (sh -c ") && said.contains("killed: it did not end within 1 s"), "{said}");
    let said = fails(&["resume", case.run().to_str().unwrap(), "--set", "window.open=[[\"/no/such/program\"]]"], 6);
    assert!(said.contains("window.open[0] (/no/such/program): No such file or directory"), "{said}");
    // What the killed one had started is gone with it.
    std::thread::sleep(Duration::from_secs(4).saturating_sub(started.elapsed()));
    assert_eq!(case.notes(), [""; 0]);
}

#[test]
fn a_window_whose_log_cannot_be_written_is_closed() {
    let case = Case::new(r#"[["sh", "-c", "rm RUN/window.log; mkdir RUN/window.log"]]"#, CLOSE);
    let out = output(&words(&case.start()));
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(case.notes(), ["close-0"]);
    assert!(said.contains("the seat is back\n") && said.contains("window.log: Is a directory"), "{said}");
}

#[test]
fn a_signal_and_an_error_close_the_window_too() {
    let case = Case::new(r#"[["sh", "-c", "NOTE open-0; sleep 2"]]"#, CLOSE);
    let child = tunehost(&words(&case.start())).stdout(Stdio::piped()).spawn().unwrap();
    wait_for(&case.folder.path().join("notes"));
    // Meanwhile the run is that process's alone.
    let said = fails(&["resume", case.run().to_str().unwrap()], 6);
    assert!(said.contains("run::locked") && said.contains(&format!("with pid {}", child.id())), "{said}");
    send("TERM", &child);
    let out = child.wait_with_output().unwrap();
    let lines = String::from_utf8_lossy(&out.stdout);
    let go_on = format!("saved; to go on: tunehost resume {}\n", case.run().display());
    assert!(out.status.success() && lines.contains(&go_on), "{lines}");
    assert_eq!(case.notes(), ["open-0", "close-0"]);
    assert_eq!(provenance(&case.run())["outcome"]["status"], "stopped");
    assert!(!case.run().join("metrics.jsonl").exists(), "nothing was loaded for a run that was asked to stop");

    // Where the checkpoints should be is a file.
    let block = format!("window.open=[[\"touch\", \"{}/checkpoints\"]]", case.run().display());
    let said = fails(&["resume", case.run().to_str().unwrap(), "--set", &block], 8);
    assert!(said.contains("io::failed") && said.contains("checkpoints"), "{said}");
    assert_eq!(case.notes(), ["open-0", "close-0", "close-0"]);
}

#[test]
fn a_second_interrupt_closes_the_window_before_it_ends_the_process() {
    // In a command of `open`, and in a step: neither is waited for.
    let opening = Case::new(r#"[["sh", "-c", "NOTE open-0; exec sleep 60"], ["sh", "-c", "NOTE never"]]"#, CLOSE);
    let training = Case::new(OPEN, CLOSE);
    let text = fs::read_to_string(&training.config).unwrap();
    let text = text.replace("root = \"records\" }", "root = \"records\", weight = 900.0 }");
    fs::write(&training.config, text.replace("accumulation = 1", "accumulation = 9000")).unwrap();
    for (case, begun, opened) in [
        (&opening, opening.folder.path().join("notes"), &["open-0"][..]),
        (&training, training.run().join("held-out/step-000000.json"), &["open-0", "open 1"]),
    ] {
        let child = tunehost(&words(&case.start())).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&begun);
        // The step, which takes far longer, begins a moment after the evaluation before it is written.
        std::thread::sleep(Duration::from_secs(1));
        let interrupted = Instant::now();
        send("INT", &child);
        // Two that are pending together are one.
        std::thread::sleep(Duration::from_millis(500));
        send("INT", &child);
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(130), "{said}");
        assert!(interrupted.elapsed() < Duration::from_secs(20), "it waits for nothing but window.close");
        assert!(said.contains("interrupted again: window.close, then the end"), "{said}");
        assert_eq!(case.notes(), [opened, &["close-0"]].concat());
        assert!(case.log().contains("\nthe seat is back\n") && !case.run().join("window.open").exists());
    }
}

#[test]
fn after_a_kill_a_resume_says_so_and_closes_however_it_ends() {
    let case = Case::new(OPEN, CLOSE);
    ok(&words(&case.start()));
    let whole = contents(&case.run());
    fs::rename(case.run(), case.folder.path().join("whole")).unwrap();

    let mut child = tunehost(&words(&case.start())).stdout(Stdio::null()).spawn().unwrap();
    wait_for(&case.run().join("metrics.jsonl"));
    child.kill().unwrap();
    child.wait().unwrap();
    let run = case.run();
    let resume = ["resume", run.to_str().unwrap()];
    let resumed = |more: &[&str], code: i32| {
        let out = output(&[&resume[..], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "{said}");
        said.contains("was killed in its window: window.close runs when this one ends")
    };
    // The one that is refused closes what the killed one left open, and the next one finds it closed.
    let (opened, closed) = (["open-0", "open 1"], ["close-0"]);
    let mut notes = [&["open-0", "open 1", "close-0"][..], &opened].concat();
    assert_eq!(case.notes(), notes);
    assert!(resumed(&["--set", "train.lr=5"], 6));
    notes.extend(closed);
    assert_eq!(case.notes(), notes);
    assert!(!resumed(&["--set", "train.lr=5"], 6));
    assert_eq!(case.notes(), notes);

    // One that goes on opens again, for what was left open may not have opened to its end.
    fs::write(case.run().join("window.open"), "").unwrap();
    assert!(resumed(&[], 0));
    notes.extend(opened.iter().chain(&closed));
    assert_eq!(case.notes(), notes);
    assert_same(&whole, &case.run(), "killed in its window");
}
