//! `order-manifest.jsonl`: which records each optimiser step trains on, one line per step.
//!
//! An epoch's order is written before its first step. When a run is resumed, the sampler plans the epoch again and must
//! give the order that is written here; the position alone would not tell.

use super::atomic::{self, Existing};
use super::lines;
use crate::error::{Error, Result};
use crate::hash::sha256;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Records of one optimiser step: micro-batches of rows of record ids. Several ids in a row are packed.
pub type MicroBatches = Vec<Vec<Vec<String>>>;

/// One line of the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepOrder {
    /// Optimiser step, from 1, counted over the whole run.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u32,
    /// The records.
    pub micro_batches: MicroBatches,
}

/// The manifest of a run.
#[derive(Debug)]
pub struct OrderManifest {
    path: PathBuf,
    text: String,
    steps: Vec<StepOrder>,
}

impl OrderManifest {
    /// Reads the manifest at `path`; none there is an empty one.
    ///
    /// # Errors
    /// `run::order_broken`, naming the line that cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let text = read(path)?.unwrap_or_default();
        let parse =
            |(i, line)| serde_json::from_str(line).map_err(|e| broken(format!("{}:{}: {e}", path.display(), i + 1)));
        let steps = text.lines().enumerate().map(parse).collect::<Result<_>>()?;
        Ok(Self { path: path.into(), text, steps })
    }

    /// The steps of an epoch; none where it was not planned yet.
    pub fn epoch(&self, epoch: u32) -> impl Iterator<Item = &StepOrder> {
        self.steps.iter().filter(move |step| step.epoch == epoch)
    }

    /// Writes down the plan of an epoch, one element per optimiser step, or, where the manifest has the epoch already,
    /// checks that it is the same plan.
    ///
    /// # Errors
    /// `run::order_changed`, naming the first step that differs.
    pub fn commit_epoch(&mut self, epoch: u32, plan: Vec<MicroBatches>) -> Result<()> {
        if self.epoch(epoch).next().is_some() {
            return self.check_epoch(epoch, &plan);
        }
        self.lay_out(epoch, plan);
        // The file only ever grows; written as a whole, an epoch is in it completely or not at all.
        atomic::write(&self.path, self.text.as_bytes(), Existing::Replace)
    }

    fn lay_out(&mut self, epoch: u32, plan: Vec<MicroBatches>) {
        let first = self.steps.last().map_or(1, |last| last.step + 1);
        for (step, micro_batches) in (first..).zip(plan) {
            let order = StepOrder { step, epoch, micro_batches };
            self.text += &serde_json::to_string(&order).expect("a plan is made of strings and numbers");
            self.text += "\n";
            self.steps.push(order);
        }
    }

    /// Checks that `plan` is what is written of an epoch.
    ///
    /// # Errors
    /// `run::order_changed`, naming the first step that differs.
    pub fn check_epoch(&self, epoch: u32, plan: &[MicroBatches]) -> Result<()> {
        let written: Vec<&StepOrder> = self.epoch(epoch).collect();
        let message = if let Some((was, is)) =
            written.iter().zip(plan).find(|(written, planned)| written.micro_batches != **planned)
        {
            let written = first_difference(&was.micro_batches, is);
            format!("step {} trained on {written} instead", was.step)
        } else if written.len() != plan.len() {
            format!("it had {} steps and now has {}", written.len(), plan.len())
        } else {
            return Ok(());
        };
        let path = self.path.display();
        Err(Error::new("run::order_changed", format!("the plan of epoch {epoch} is not the one in {path}: {message}"))
            .help("a run is resumed with the sampler, the corpus and the configuration it was started with"))
    }
}

/// Refuses a manifest at `path` that is not the text of which the run recorded the `sha256`; `plan` has the steps of every epoch, as
/// they are planned now. One that is gone and would be written again as it was is no error.
///
/// # Errors
/// `run::order_broken`, naming the first line that is not what was written, where the plan tells.
pub fn refuse_written_over(
    path: &Path,
    recorded_sha256: &str,
    plan: impl Iterator<Item = (u32, Vec<MicroBatches>)>,
) -> Result<()> {
    let found = read(path)?;
    if found.as_ref().is_some_and(|found| sha256(found.as_bytes()) == recorded_sha256) {
        return Ok(());
    }
    let mut planned = OrderManifest { path: path.into(), text: String::new(), steps: Vec::new() };
    plan.for_each(|(epoch, plan)| planned.lay_out(epoch, plan));
    let same_plan = sha256(planned.text.as_bytes()) == recorded_sha256;
    let Some(found) = found else {
        return if same_plan { Ok(()) } else { Err(broken(format!("{} is gone", path.display()))) };
    };
    let line = lines::first_difference(found.as_bytes(), planned.text.as_bytes()).filter(|_| same_plan);
    let place = line.map(|line| format!(":{line}")).unwrap_or_default();
    let error = broken(format!("{}{place}: this is not what the run wrote", path.display()));
    Err(if same_plan { error.help("or move it away: a resume writes it again as it was") } else { error })
}

/// The text of the manifest, where there is one.
fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

fn broken(message: String) -> Error {
    Error::new("run::order_broken", message)
        .expected("the records of every step, as the run wrote them down before it began")
        .help("restore the file from a copy")
}

/// The first record that differs, as "`a`, and now `b`" for the sentence in [`OrderManifest::check_epoch`].
fn first_difference(was: &MicroBatches, is: &MicroBatches) -> String {
    let ids = |batches: &MicroBatches| batches.iter().flatten().flatten().cloned().collect::<Vec<_>>();
    let (was, is) = (ids(was), ids(is));
    let name = |id: Option<&String>| id.map_or("nothing".into(), |id| format!("record {id}"));
    let at = (0..was.len().max(is.len())).find(|i| was.get(*i) != is.get(*i));
    match at {
        Some(i) => format!("{}, and would now train on {}", name(was.get(i)), name(is.get(i))),
        None => "the same records in other rows or micro-batches, and would now train on them as planned".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(steps: &[&[&[&[&str]]]]) -> Vec<MicroBatches> {
        let row = |row: &&[&str]| row.iter().map(|id| id.to_string()).collect();
        let batch = |batch: &&[&[&str]]| batch.iter().map(row).collect();
        steps.iter().map(|step| step.iter().map(batch).collect()).collect()
    }

    fn committed(folder: &Path) -> PathBuf {
        let path = folder.join("order-manifest.jsonl");
        let mut manifest = OrderManifest::open(&path).unwrap();
        manifest.commit_epoch(0, plan(&[&[&[&["a", "b"], &["c"]]], &[&[&["d"]]]])).unwrap();
        manifest.commit_epoch(1, plan(&[&[&[&["d"], &["c"]]], &[&[&["b", "a"]]]])).unwrap();
        path
    }

    #[test]
    fn steps_are_numbered_through_and_written_one_per_line() {
        let folder = tempfile::tempdir().unwrap();
        let text = fs::read_to_string(committed(folder.path())).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], r#"{"step":1,"epoch":0,"micro_batches":[[["a","b"],["c"]]]}"#);
        assert_eq!(lines[3], r#"{"step":4,"epoch":1,"micro_batches":[[["b","a"]]]}"#);
        assert_eq!(lines.len(), 4);
    }

    #[test]
    fn the_same_plan_is_accepted_on_resume_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = committed(folder.path());
        let before = fs::read(&path).unwrap();
        let mut manifest = OrderManifest::open(&path).unwrap();
        manifest.commit_epoch(1, plan(&[&[&[&["d"], &["c"]]], &[&[&["b", "a"]]]])).unwrap();
        assert_eq!(manifest.epoch(1).map(|step| step.step).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn another_plan_is_refused_by_its_first_difference() {
        let folder = tempfile::tempdir().unwrap();
        let path = committed(folder.path());
        let mut manifest = OrderManifest::open(&path).unwrap();
        for (changed, message) in [
            (
                plan(&[&[&[&["d"], &["c"]]], &[&[&["b", "e"]]]]),
                "step 4 trained on record a, and would now train on record e",
            ),
            (plan(&[&[&[&["d"], &["c"]]], &[&[&["b"], &["a"]]]]), "step 4 trained on the same records in other rows"),
            (plan(&[&[&[&["d"], &["c"]]]]), "it had 2 steps and now has 1"),
        ] {
            let error = manifest.commit_epoch(1, changed).unwrap_err();
            assert_eq!(error.code(), "run::order_changed");
            assert!(error.message().contains(message), "{error}");
        }
    }

    #[test]
    fn a_manifest_that_was_written_over_is_told_from_another_plan() {
        let folder = tempfile::tempdir().unwrap();
        let path = committed(folder.path());
        let whole = fs::read_to_string(&path).unwrap();
        let recorded = sha256(whole.as_bytes());
        let same = || {
            let epochs =
                [plan(&[&[&[&["a", "b"], &["c"]]], &[&[&["d"]]]]), plan(&[&[&[&["d"], &["c"]]], &[&[&["b", "a"]]]])];
            (0..).zip(epochs)
        };
        let other = || (0..).zip([plan(&[&[&[&["a"]]]])]);
        refuse_written_over(&path, &recorded, same()).unwrap();
        // Another plan is for `check_epoch` to tell, as long as the file is what was written.
        refuse_written_over(&path, &recorded, other()).unwrap();
        let cut = whole.lines().take(3).map(|line| format!("{line}\n")).collect::<String>();
        for (text, place) in [(whole.replacen("\"c\"", "\"x\"", 1), ":1: "), (cut, ":4: "), ("x".into(), ":1: ")] {
            fs::write(&path, text).unwrap();
            let error = refuse_written_over(&path, &recorded, same()).unwrap_err();
            assert!(error.code() == "run::order_broken" && error.message().contains(place), "{error}");
            assert!(error.to_string().contains("or move it away"), "{error}");
            let error = refuse_written_over(&path, &recorded, other()).unwrap_err();
            assert!(!error.message().contains(place) && !error.to_string().contains("move it away"), "{error}");
        }
        fs::remove_file(&path).unwrap();
        refuse_written_over(&path, &recorded, same()).unwrap();
        assert!(refuse_written_over(&path, &recorded, other()).unwrap_err().message().ends_with("is gone"));
    }

    #[test]
    fn a_broken_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = committed(folder.path());
        let text = fs::read_to_string(&path).unwrap().replace("\"step\":3", "\"step\":x");
        fs::write(&path, text).unwrap();
        let error = OrderManifest::open(&path).unwrap_err();
        assert_eq!(error.code(), "run::order_broken");
        assert!(error.message().contains("order-manifest.jsonl:3: "), "{error}");
    }
}
