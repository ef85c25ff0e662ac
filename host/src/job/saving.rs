//! Checkpoints written while training goes on: a thread of its own gets a snapshot; at most one is on its way.

use super::training::SCHEDULER_MEMORY;
use crate::config::CheckpointConfig;
use crate::error::Result;
use crate::model::adapter::Adapter;
use crate::run::checkpoint::{self, Checkpoint, Position};
use crate::run::folder::{CHECKPOINTS, METRICS, RunFolder};
use crate::run::metrics::StepLog;
use crate::run::retention;
use crate::train::optimizer::AdamW;
use crate::train::state;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a checkpoint is made of. Tensors are never changed in place while another holds them, so that the clones of a
/// snapshot cost no time and stay what they are.
pub struct Snapshot {
    /// Optimiser steps done.
    pub step: u64,
    /// Where the next step starts.
    pub position: Position,
    /// The adapters.
    pub adapter: Adapter,
    /// Their optimiser state.
    pub optimizer: AdamW,
    /// What the checkpoint scheduler remembers, where it remembers anything.
    pub memory: Option<Vec<u8>>,
    /// Length of the metrics with the line of the step, and without its evaluation: the same whenever it is saved.
    pub metrics_bytes: u64,
}

/// Writes the checkpoints of a run.
pub struct Saver {
    target: Target,
    on_its_way: Option<JoinHandle<Result<Duration>>>,
    /// When the newest snapshot was taken, or this process began.
    pub last: Instant,
    /// How long writing the last one took; nothing where none is written yet.
    pub last_cost: Duration,
    /// The step of the best evaluation so far, whose checkpoint may have to stay.
    pub best: Option<u64>,
}

#[derive(Clone)]
struct Target {
    checkpoints: PathBuf,
    config_sha256: String,
    keep: CheckpointConfig,
}

impl Saver {
    /// A saver of the run in `folder`.
    pub fn new(folder: &RunFolder, config_sha256: &str, keep: CheckpointConfig) -> Self {
        let target = Target { checkpoints: folder.file(CHECKPOINTS), config_sha256: config_sha256.into(), keep };
        Self { target, on_its_way: None, last: Instant::now(), last_cost: Duration::ZERO, best: None }
    }

    /// Removes what is not to be kept beside the whole checkpoint of `step`: a run may have been killed before it could.
    ///
    /// # Errors
    /// Class `io`.
    pub fn remove_expired(&self, step: u64) -> Result<()> {
        self.target.remove_expired(step, self.best)
    }

    /// Starts to write a snapshot, once the one before is written. The logs are synced first: they must reach at least as far.
    ///
    /// # Errors
    /// Those of the checkpoint before.
    pub fn start(&mut self, snapshot: Snapshot, metrics: &StepLog, timing: &StepLog) -> Result<()> {
        self.finish()?;
        self.last = Instant::now();
        let (target, started, best) = (self.target.clone(), self.last, self.best);
        let (metrics, timing) = (metrics.handle()?, timing.handle()?);
        self.on_its_way = Some(thread::spawn(move || {
            metrics.sync()?;
            timing.sync()?;
            target.write(snapshot, &metrics, best)?;
            Ok(started.elapsed())
        }));
        Ok(())
    }

    /// Says whether the checkpoint on its way failed, without waiting for it.
    ///
    /// # Errors
    /// Classes `run`, `io`.
    pub fn check(&mut self) -> Result<()> {
        if self.on_its_way.as_ref().is_some_and(JoinHandle::is_finished) { self.finish() } else { Ok(()) }
    }

    /// Waits for the checkpoint on its way.
    ///
    /// # Errors
    /// Classes `run`, `io`.
    pub fn finish(&mut self) -> Result<()> {
        let Some(thread) = self.on_its_way.take() else { return Ok(()) };
        self.last_cost = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(())
    }
}

impl Target {
    fn write(&self, snapshot: Snapshot, metrics: &StepLog, best: Option<u64>) -> Result<()> {
        let Snapshot { step, position, adapter, optimizer, memory, metrics_bytes } = snapshot;
        let state = state::to_files(&adapter, &optimizer).into_iter().map(|(name, bytes)| (name.to_string(), bytes));
        let memory = memory.map(|memory| (SCHEDULER_MEMORY.to_string(), memory));
        let metrics = (METRICS.to_string(), metrics.first(metrics_bytes)?);
        let files = state.chain(memory).chain([metrics]).collect();
        let config_sha256 = self.config_sha256.clone();
        checkpoint::write(&self.checkpoints, &Checkpoint { step, position, config_sha256, files })?;
        self.remove_expired(step, best)
    }

    fn remove_expired(&self, newest: u64, best: Option<u64>) -> Result<()> {
        retention::apply(&self.checkpoints, &self.keep, newest, best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LoraConfig, TrainConfig};
    use crate::model::config::TextConfig;
    use crate::model::fixtures::fixture;
    use crate::model::lora::LoraPlan;
    use crate::model::spec::ModelSpec;
    use crate::run::folder::TIMING;
    use burn::tensor::Device;
    use serde_json::json;
    use std::fs;
    use std::process::Command;

    fn snapshot(metrics: &StepLog) -> Snapshot {
        let text = TextConfig::read(&fixture("golden/model")).unwrap();
        let plan = LoraPlan::new(&LoraConfig::default(), &ModelSpec::new(&text, "model.")).unwrap();
        let adapter = Adapter::init(plan, 1, &Device::flex());
        let optimizer = AdamW::new(&TrainConfig::default(), &adapter);
        let position = Position { epoch: 0, step_in_epoch: 1 };
        Snapshot { step: 1, position, adapter, optimizer, memory: None, metrics_bytes: metrics.bytes() }
    }

    #[test]
    fn training_goes_on_while_a_checkpoint_is_written() {
        let root = tempfile::tempdir().unwrap();
        let run = RunFolder::create(root.path(), "demo").unwrap();
        let path = run.file(METRICS);
        let (mut metrics, timing) = (StepLog::create(&path).unwrap(), StepLog::create(&run.file(TIMING)).unwrap());
        metrics.append(&json!({"step": 1})).unwrap();
        // A pipe in the place of what goes into the checkpoint: whoever reads it waits for somebody to write.
        let line = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut saver = Saver::new(&run, "config", CheckpointConfig::default());
        saver.start(snapshot(&metrics), &metrics, &timing).unwrap();
        saver.check().unwrap();
        let saved = checkpoint::folder_of_step(&run.file(CHECKPOINTS), 1);
        assert!(!saved.exists(), "it waits, and the training does not");
        fs::write(&path, &line).unwrap();
        saver.finish().unwrap();
        assert_eq!(checkpoint::read(&saved).unwrap().files[METRICS], line);
    }
}
