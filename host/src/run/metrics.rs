//! `metrics.jsonl` and `timing.jsonl`: one line per optimiser step, and one for each evaluation, in `metrics.jsonl` where the count
//! of steps asked for it and in `timing.jsonl` where the clock did; there also when a process was to end.
//!
//! What a step computed and how long it took are two files, since a resumed run must end with the same bytes in the
//! first and no two runs agree on the second. A number that is not finite is written as null.

use super::atomic::{self, Existing};
use super::folder::shell_word;
use super::lines::first_difference;
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// A line of `metrics.jsonl`. It holds no reading of a clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Metric {
    /// An optimiser step.
    Step(StepMetrics),
    /// An evaluation of the held-out records.
    HeldOut(HeldOutMetrics),
}

/// What one optimiser step computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Optimiser step, from 1.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u32,
    /// Mean loss per trained token over the accumulation window, in nats.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "nan_from_null")]
    pub grad_norm: f64,
    /// Tokens computed, padding not counted.
    pub tokens: u64,
    /// Tokens that the loss is a mean of.
    pub trained_tokens: u64,
    /// Share of the rows' rectangles that a padding engine would have computed for nothing, 0 to 1; this one computes no
    /// padding.
    pub padding: f64,
}

/// Held-out loss after `step` optimiser steps; 0 is before training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldOutMetrics {
    /// Optimiser steps done.
    pub step: u64,
    /// Mean loss per trained token of all records, in nats.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
    /// Its standard error over bootstrap resamples of the records; none where there is one record only.
    pub standard_error: Option<f64>,
    /// The same, root by root.
    pub roots: Vec<RootMetrics>,
}

/// Held-out loss of one root.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RootMetrics {
    /// The root.
    pub root: String,
    /// Records evaluated.
    pub records: u64,
    /// Tokens that the loss is a mean of.
    pub trained_tokens: u64,
    /// Mean loss per trained token, in nats.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
    /// As [`HeldOutMetrics::standard_error`].
    pub standard_error: Option<f64>,
}

/// A line of `timing.jsonl`: how long one optimiser step took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTiming {
    /// Optimiser step, from 1.
    pub step: u64,
    /// Wall-clock time of the step.
    pub wall_ms: f64,
    /// Tokens, padding not counted, per second of it.
    pub tokens_per_s: f64,
    /// Time in plugins after it.
    pub plugins_ms: f64,
}

/// A line of `timing.jsonl`: the process that went on after `step` was to end before a time (`--until`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "until")]
pub struct UntilTiming {
    /// Optimiser steps done when the process began to train.
    pub step: u64,
    /// The time, UTC, RFC 3339.
    pub until: String,
    /// The scheduler that ends it: name, version and SHA-256.
    pub plugin: String,
}

/// A file of JSON lines that each name their `step`, in rising order.
#[derive(Debug)]
pub struct StepLog {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl StepLog {
    /// Starts a new file.
    ///
    /// # Errors
    /// Class `io`, also where the file exists.
    pub fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).open(path);
        Ok(Self { path: path.into(), file: file.map_err(|e| Error::io("create", path, e))?, bytes: 0 })
    }

    /// Opens the file of a run that goes on after `step` (0: from the start, with nothing kept), and cuts off every
    /// later line, and the half-written last one of a killed process. With the file's `copy` in the checkpoint of the step, and the
    /// path of that, the lines that are kept must be those.
    ///
    /// # Errors
    /// `run::log_broken`, naming the line, where one that is kept is not what was written or cannot be read, or where the file ends
    /// before `step`.
    pub fn resume(path: &Path, step: u64, copy: Option<(&Path, &[u8])>) -> Result<Self> {
        let Some((text, kept)) = kept(path, step, copy)? else { return Self::create(path) };
        if kept < text.len() {
            atomic::write(path, &text[..kept], Existing::Replace)?;
        }
        let file = OpenOptions::new().append(true).open(path).map_err(|e| Error::io("open", path, e))?;
        Ok(Self { path: path.into(), file, bytes: kept as u64 })
    }

    /// Appends one line, in a single write.
    pub fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(line).expect("a log line has string keys") + "\n";
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io("write", &self.path, e))?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first `bytes` bytes of the file.
    ///
    /// # Errors
    /// Class `io`.
    pub fn first(&self, bytes: u64) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let read = File::open(&self.path).and_then(|file| file.take(bytes).read_to_end(&mut text));
        read.map_err(|e| Error::io("read", &self.path, e))?;
        Ok(text)
    }

    /// The same file for another thread, to sync it there.
    pub fn handle(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|e| Error::io("open", &self.path, e))?;
        Ok(Self { path: self.path.clone(), file, bytes: self.bytes })
    }

    /// Makes what was appended durable. Call it before a checkpoint is written: a checkpoint whose log is shorter
    /// cannot be resumed.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("sync", &self.path, e))
    }
}

/// Refuses a file that [`StepLog::resume`] would refuse, and changes nothing.
///
/// # Errors
/// Those of [`StepLog::resume`].
pub fn check(path: &Path, step: u64, copy: Option<(&Path, &[u8])>) -> Result<()> {
    kept(path, step, copy).map(drop)
}

/// The text of a log, and how much of it is kept by a run that goes on after `step`; nothing where there is none and none is needed.
fn kept(path: &Path, step: u64, copy: Option<(&Path, &[u8])>) -> Result<Option<(Vec<u8>, usize)>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound && step == 0 => return Ok(None),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let gone = Error::new("run::log_broken", format!("{} is gone", path.display()))
                .expected(format!("the lines up to step {step}, from which the run goes on"));
            return Err(gone.help(copy.map_or("restore it from a copy".into(), |(saved, _)| restore(saved, path))));
        }
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let kept = match copy {
        _ if step == 0 => 0,
        Some((saved, written)) => same_bytes(path, &text, saved, written)?,
        None => kept_bytes(path, &text, step)?,
    };
    Ok(Some((text, kept)))
}

/// The lines of a `metrics.jsonl`; none where there is no such file.
///
/// # Errors
/// `run::log_broken`, naming the line that cannot be read.
pub fn read(path: &Path) -> Result<Vec<Metric>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let parse = |(i, line)| serde_json::from_str(line).map_err(|e| broken(path, i + 1, &format!("{e}")));
    text.lines().enumerate().map(parse).collect()
}

/// The last step of which a `metrics.jsonl` has a whole line, whatever else is in it; 0 where there is none.
///
/// # Errors
/// Class `io`.
pub fn steps_logged(path: &Path) -> Result<u64> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let step = |line| match serde_json::from_str(line) {
        Ok(Metric::Step(step)) => Some(step.step),
        _ => None,
    };
    Ok(text.lines().rev().find_map(step).unwrap_or(0))
}

/// JSON has no number that is not finite: one is written as null.
pub(crate) fn nan_from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn broken(path: &Path, line: usize, what: &str) -> Error {
    Error::new("run::log_broken", format!("{}:{line}: {what}", path.display()))
        .expected("the lines as the run wrote them")
        .help("the file was changed or cut since: restore it from a copy")
}

/// Length of the lines that were `written` when the checkpoint with their copy, `saved`, was.
fn same_bytes(path: &Path, text: &[u8], saved: &Path, written: &[u8]) -> Result<usize> {
    let found = &text[..written.len().min(text.len())];
    let Some(line) = first_difference(found, written) else { return Ok(written.len()) };
    let what = if found.len() < written.len() && written.starts_with(found) {
        "the file ends before the checkpoint that the run goes on from"
    } else {
        "this is not the line that stood here when the checkpoint was saved that the run goes on from"
    };
    Err(broken(path, line, what).help(restore(saved, path)))
}

fn restore(saved: &Path, path: &Path) -> String {
    format!("the checkpoint holds those lines: cp {} {}", shell_word(saved), shell_word(path))
}

/// Length of the lines up to and including `step`.
fn kept_bytes(path: &Path, text: &[u8], step: u64) -> Result<usize> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let (mut kept, mut last) = (0, 0);
    for (i, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        if !line.ends_with(b"\n") {
            break;
        }
        let Line { step: at } = serde_json::from_slice(line).map_err(|e| broken(path, i + 1, &e.to_string()))?;
        if at > step {
            break;
        }
        kept += line.len();
        last = at;
    }
    if last < step {
        let message = format!("{} ends at step {last}, the checkpoint is of step {step}", path.display());
        return Err(Error::new("run::log_broken", message)
            .expected("a line for each step")
            .help("the file was changed or cut since: restore it from a copy"));
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Metric {
        Metric::Step(StepMetrics {
            step,
            epoch: 0,
            loss: 2.5 / step as f64,
            lr: 1e-4,
            grad_norm: 0.1,
            tokens: 100,
            trained_tokens: 40,
            padding: 0.125,
        })
    }

    fn held_out(step: u64) -> Metric {
        Metric::HeldOut(HeldOutMetrics {
            step,
            loss: 1.5,
            standard_error: Some(0.25),
            roots: vec![RootMetrics {
                root: "a".into(),
                records: 3,
                trained_tokens: 9,
                loss: 1.5,
                standard_error: None,
            }],
        })
    }

    fn fill(log: &mut StepLog, steps: std::ops::RangeInclusive<u64>) {
        for i in steps {
            log.append(&step(i)).unwrap();
        }
    }

    #[test]
    fn a_line_is_json_with_its_kind() {
        let text = serde_json::to_string(&step(2)).unwrap();
        let expected = r#"{"kind":"step","step":2,"epoch":0,"loss":1.25,"lr":0.0001,"grad_norm":0.1,"tokens":100,"#;
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(serde_json::from_str::<Metric>(&text).unwrap(), step(2));
        let text = serde_json::to_string(&held_out(2)).unwrap();
        assert!(
            text.starts_with(r#"{"kind":"held-out","step":2,"loss":1.5,"standard_error":0.25,"roots":[{"root":"a""#),
            "{text}"
        );
    }

    #[test]
    fn what_was_written_is_read_back_and_no_number_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(read(&path).unwrap(), []);
        let mut log = StepLog::create(&path).unwrap();
        fill(&mut log, 1..=2);
        log.append(&held_out(2)).unwrap();
        let Metric::Step(broken) = step(3) else { unreachable!() };
        log.append(&Metric::Step(StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, ..broken })).unwrap();
        let lines = read(&path).unwrap();
        assert_eq!(lines[..3], [step(1), step(2), held_out(2)]);
        assert_eq!(steps_logged(&path).unwrap(), 3);
        let Metric::Step(broken) = &lines[3] else { panic!("{lines:?}") };
        assert!(broken.loss.is_nan() && broken.grad_norm.is_nan() && broken.step == 3);
        fs::write(&path, "{\"kind\":\"step\"}\n").unwrap();
        assert!(read(&path).unwrap_err().message().contains("metrics.jsonl:1: "));
    }

    #[test]
    fn a_resumed_log_ends_with_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let whole = folder.path().join("whole.jsonl");
        let mut log = StepLog::create(&whole).unwrap();
        log.append(&held_out(0)).unwrap();
        fill(&mut log, 1..=4);
        log.append(&held_out(4)).unwrap();
        fill(&mut log, 5..=9);

        let killed = folder.path().join("killed.jsonl");
        let mut log = StepLog::create(&killed).unwrap();
        log.append(&held_out(0)).unwrap();
        fill(&mut log, 1..=4);
        log.append(&held_out(4)).unwrap();
        fill(&mut log, 5..=6);
        log.file.write_all(b"{\"kind\":\"step\",\"st").unwrap();
        drop(log);

        let mut log = StepLog::resume(&killed, 4, None).unwrap();
        fill(&mut log, 5..=9);
        log.sync().unwrap();
        assert_eq!(fs::read(&killed).unwrap(), fs::read(&whole).unwrap());
    }

    #[test]
    fn a_log_must_be_what_the_checkpoint_holds() {
        let folder = tempfile::tempdir().unwrap();
        let (path, saved) = (folder.path().join("metrics.jsonl"), folder.path().join("a step/metrics.jsonl"));
        let mut log = StepLog::create(&path).unwrap();
        fill(&mut log, 1..=3);
        let copy = log.first(log.bytes()).unwrap();
        // Saved before the evaluation of its step, which is then made again.
        log.append(&held_out(3)).unwrap();
        fill(&mut log, 4..=5);
        let whole = fs::read_to_string(&path).unwrap();
        let resume = || StepLog::resume(&path, 3, Some((&saved, &copy)));
        let log = resume().unwrap();
        assert_eq!((fs::read(&path).unwrap(), log.bytes()), (copy.clone(), copy.len() as u64));
        for (changed, says) in [
            (whole.replacen("\"loss\":1.25", "\"loss\":1.5", 1), "metrics.jsonl:2: this is not the line"),
            (whole.lines().take(2).collect::<Vec<_>>().join("\n"), "metrics.jsonl:2: the file ends"),
            (whole.lines().take(2).map(|line| format!("{line}\n")).collect(), "metrics.jsonl:3: the file ends"),
            (String::new(), "metrics.jsonl:1: the file ends"),
        ] {
            fs::write(&path, &changed).unwrap();
            let error = resume().unwrap_err();
            assert!(error.code() == "run::log_broken" && error.message().contains(says), "{error}");
            assert!(error.to_string().contains("/a step/metrics.jsonl' "), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), changed, "it is left as it is");
        }
        fs::remove_file(&path).unwrap();
        let error = resume().unwrap_err();
        assert!(error.message().ends_with("metrics.jsonl is gone") && error.to_string().contains("cp "), "{error}");
    }

    #[test]
    fn resuming_from_the_start_keeps_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = StepLog::resume(&path, 0, None).unwrap();
        log.append(&held_out(0)).unwrap();
        StepLog::resume(&path, 0, None).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
        assert_eq!(StepLog::create(&path).unwrap_err().code(), "io::failed");
    }

    #[test]
    fn a_log_that_lost_lines_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fill(&mut StepLog::create(&path).unwrap(), 1..=3);
        let error = StepLog::resume(&path, 5, None).unwrap_err();
        assert_eq!(error.code(), "run::log_broken");
        assert!(error.message().ends_with("ends at step 3, the checkpoint is of step 5"), "{error}");

        fs::write(&path, "{\"step\":1}\n{\"stop\":2}\n{\"step\":3}\n").unwrap();
        let error = StepLog::resume(&path, 3, None).unwrap_err();
        assert!(error.message().contains("metrics.jsonl:2: "), "{error}");
    }
}
