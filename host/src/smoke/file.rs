//! `smoke.json`: what was measured, and what follows from it. `smoke.md` has every key.

use super::fingerprint::Fingerprint;
use super::fit::{Fit, Pace};
use super::shapes::Asked;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plan::memory::Shape;
use crate::plan::report::{Measured, MeasuredShape};
use crate::plan::steps::{self, Steps};
use crate::plan::{Source, Spread};
use crate::report::bytes;
use crate::run::atomic::{self, Existing};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Version of the schema.
pub const SCHEMA: u32 = 1;
/// What to do where it cannot be used.
const AGAIN: &str = "tunehost smoke CONFIG measures again";

/// What became of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its steps were computed.
    Fits,
    /// Memory ran out.
    OutOfMemory,
    /// Its process ended otherwise.
    Crashed,
    /// Nothing was tried, since a smaller shape ran out of memory.
    NotTried,
}

impl Outcome {
    /// As texts call it.
    pub fn name(self) -> &'static str {
        ["fits", "out of memory", "crashed", "not tried"][self as usize]
    }

    /// Whether its process was seen to fail.
    pub fn failed(self) -> bool {
        matches!(self, Self::OutOfMemory | Self::Crashed)
    }
}

/// A shape, and what was measured of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShapeResult {
    /// The shape and what it stands for.
    #[serde(flatten)]
    pub asked: Asked,
    /// The peak as `plan` computes it.
    pub computed_peak_bytes: usize,
    /// What became of it.
    pub outcome: Outcome,
    /// How its process ended, where it failed.
    pub why: Option<String>,
    /// Steps that were done.
    pub steps: u64,
    /// The most memory of the device before the first step; null where that is not known.
    pub loaded_bytes: Option<usize>,
    /// The most memory of the device: on the CPU that of the process, on another what its allocator reserved; of one that failed, when
    /// it last told.
    pub peak_bytes: Option<usize>,
    /// What tensors took of that at most, seen at the ends of kernels; null on the CPU.
    #[serde(default)]
    pub peak_in_use_bytes: Option<usize>,
    /// The most memory of the process on the host of a device that is not the CPU.
    #[serde(default)]
    pub host_peak_bytes: Option<usize>,
    /// Tokens with a target in a timed micro-batch.
    pub trained_tokens: Option<usize>,
    /// A step's time.
    pub step_s: Option<Spread>,
    /// A micro-batch's time: the step's, less the optimiser's, over its micro-batches.
    pub micro_batch_s: Option<Spread>,
    /// The optimiser's update.
    pub optimizer_s: Option<Spread>,
}

/// Time of the run's own steps, as the fit has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Of all of it: by the fit.
    pub source: Source,
    /// Optimiser steps of the run.
    pub optimiser_steps: usize,
    /// One epoch at each pace, whole where the run ends before it does, fastest first; evaluation, checkpoints and export not counted.
    pub epoch_s: [f64; 3],
    /// All of it.
    pub run_s: [f64; 3],
    /// Its largest micro-batch.
    pub largest_micro_batch_tokens: usize,
    /// Its longest record: beyond the widest row that was measured, time is extrapolated.
    pub longest_record_tokens: usize,
}

impl Prediction {
    /// Of the steps of a run, and of those of one epoch.
    pub fn new(fit: &Fit, steps: &Steps, epoch: &Steps) -> Self {
        let seconds = |of: &Steps| Pace::ALL.map(|pace| fit.of_steps(pace, of).iter().sum());
        Self {
            source: Source::Computed,
            optimiser_steps: steps.optimiser_steps,
            epoch_s: seconds(epoch),
            run_s: seconds(steps),
            largest_micro_batch_tokens: steps.largest_micro_batch_tokens,
            longest_record_tokens: steps.longest_record_tokens,
        }
    }
}

/// Everything that `tunehost smoke` tells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Smoke {
    /// Version of this form, 1.
    pub schema: u32,
    /// Of everything but what is called computed, and sections that say otherwise.
    pub source: Source,
    /// When, UTC.
    pub measured: String,
    /// What it depends on.
    pub fingerprint: Fingerprint,
    /// Free memory of the device before the first shape; null where the device does not tell.
    pub free_bytes: Option<u64>,
    /// The shapes, by size.
    pub shapes: Vec<ShapeResult>,
    /// Time as a function of the width; null where no shape fits.
    pub fit: Option<Fit>,
    /// Time of the run; null without a fit.
    pub prediction: Option<Prediction>,
}

impl Smoke {
    /// The smallest shape that failed.
    pub fn failed(&self) -> Option<&ShapeResult> {
        self.shapes.iter().filter(|shape| shape.outcome.failed()).min_by_key(|shape| shape.asked.shape.tokens())
    }

    /// Tokens of the largest shape that fits, 0 where none does.
    pub fn fits_tokens(&self) -> usize {
        let fits = self.shapes.iter().filter(|shape| shape.outcome == Outcome::Fits);
        fits.map(|shape| shape.asked.shape.tokens()).max().unwrap_or(0)
    }

    /// Compares a run's largest micro-batch with the shapes that failed: a step's memory grows with its tokens.
    ///
    /// # Errors
    /// `gate::smoke`, where a shape of so many tokens or fewer failed.
    pub fn look(&self, path: &Path, largest_tokens: usize) -> Result<String> {
        let Some(failed) = self.failed().filter(|failed| failed.asked.shape.tokens() <= largest_tokens) else {
            let fits = self.fits_tokens();
            let seen = match largest_tokens <= fits {
                true => format!("{fits} fit"),
                false => format!("no more than {fits} were seen to fit"),
            };
            return Ok(format!("the largest micro-batch has {largest_tokens} tokens; on {}, {seen}", self.measured));
        };
        let Shape { micro_batch, seq_len_tokens } = failed.asked.shape;
        let why = failed.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        let free = self.free_bytes.map(|free| format!(", with {} free", bytes(free as usize))).unwrap_or_default();
        let message = format!(
            "the run's largest micro-batch has {largest_tokens} tokens, and {micro_batch} x {seq_len_tokens} {} on {}{free}{why}: {}",
            if failed.outcome == Outcome::OutOfMemory { "ran out of memory" } else { "crashed" },
            self.measured,
            path.display()
        );
        Err(Error::new("gate::smoke", message)
            .expected(format!("micro-batches of fewer than {} tokens", failed.asked.shape.tokens()))
            .help(
                "fewer rows (train.micro_batch), shorter records (data.max_seq_len), --set model.weights=bf16 or \
                 --set train.recompute_granularity=full take less; with more memory than then: tunehost smoke CONFIG, again",
            ))
    }

    /// Every step of a run at each of the fit's paces, slowest first; none without a fit.
    pub fn paces(&self, steps: &Steps) -> Vec<steps::Pace> {
        let of = |fit: &Fit| {
            let doubtful = if fit.doubts.is_empty() { "" } else { ", whose fit is not to be trusted" };
            let extrapolated = if steps.longest_record_tokens > fit.widest_tokens() { ", extrapolated" } else { "" };
            Pace::ALL
                .into_iter()
                .rev()
                .map(|pace| steps::Pace {
                    source: Source::Measured,
                    at: format!("each step as the {} of smoke{extrapolated}{doubtful}", pace.name()),
                    step_s: fit.of_steps(pace, steps),
                })
                .collect()
        };
        self.fit.as_ref().map(of).unwrap_or_default()
    }

    /// What is kept at `path`; nothing where there is no such file. Why it cannot be read, in words.
    pub fn read(path: &Path) -> std::result::Result<Option<Self>, String> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(format!("it cannot be read: {e}")),
        };
        match serde_json::from_slice::<Self>(&bytes) {
            Err(e) => Err(format!("it cannot be read ({e}); {AGAIN}")),
            Ok(smoke) if smoke.schema != SCHEMA => {
                Err(format!("it has the schema {}, and this program reads {SCHEMA}; {AGAIN}", smoke.schema))
            }
            Ok(smoke) => Ok(Some(smoke)),
        }
    }

    /// Whether `path` can be written: its folder is made where it is missing. To be asked before minutes of measuring.
    ///
    /// # Errors
    /// Class `io`.
    pub fn require_writable(path: &Path) -> Result<()> {
        let folder = atomic::folder_of(path);
        if path.is_dir() {
            return Err(Error::io("write", path, ErrorKind::IsADirectory.into()));
        }
        let made = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
        made.map(drop).map_err(|e| Error::io("write into", folder, e))
    }

    /// Writes it to `path`, whole or not at all, over an earlier one.
    ///
    /// # Errors
    /// Class `io`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let folder = atomic::folder_of(path);
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        let text = serde_json::to_vec_pretty(self).expect("numbers and names are JSON");
        atomic::write(path, &text, Existing::Replace)
    }
}

/// Where the measurements of a configuration are kept: `<run.root>/<name>.smoke.json`.
pub fn path_of(config: &Config) -> PathBuf {
    config.run.root.join(format!("{}.smoke.json", config.name))
}

impl ShapeResult {
    fn for_plan(&self) -> MeasuredShape {
        MeasuredShape {
            shape: self.asked.shape,
            outcome: self.outcome.name(),
            computed_peak_bytes: self.computed_peak_bytes,
            peak_bytes: self.peak_bytes,
            micro_batch_s: self.micro_batch_s,
        }
    }
}

/// What is kept at a place.
#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// Measurements of what there is now.
    Fresh(Box<Smoke>),
    /// Something that cannot be used, and why.
    Unusable(String),
}

impl Found {
    /// What `plan` tells of it; `path` is its place.
    pub fn for_plan(&self, path: PathBuf) -> Option<Measured> {
        let source = Source::Measured;
        match self {
            Self::Nothing => None,
            Self::Unusable(why) => {
                Some(Measured { source, path, unused: Some(why.clone()), measured: None, shapes: Vec::new() })
            }
            Self::Fresh(smoke) => Some(Measured {
                source,
                path,
                unused: None,
                measured: Some(smoke.measured.clone()),
                shapes: smoke.shapes.iter().map(ShapeResult::for_plan).collect(),
            }),
        }
    }

    /// Reads `path` for what `now` tells; it is not asked where there is nothing.
    ///
    /// # Errors
    /// Those of `now`.
    pub fn at(path: &Path, now: impl FnOnce() -> Result<Fingerprint>) -> Result<Self> {
        Ok(match Smoke::read(path) {
            Ok(None) => Self::Nothing,
            Err(why) => Self::Unusable(why),
            Ok(Some(smoke)) => match smoke.fingerprint.changed(&now()?) {
                Some(changed) => {
                    Self::Unusable(format!("what it measured is not what there is now: {changed}; {AGAIN}"))
                }
                None => Self::Fresh(smoke.into()),
            },
        })
    }
}
