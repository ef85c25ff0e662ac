//! The process that computes one shape.

use crate::config::Config;
use crate::corpus::{Record, Tokens};
use crate::device::{self, Held};
use crate::error::{Error, Result};
use crate::job::{Policies, Prepared};
use crate::model::adapter::{Adapter, values};
use crate::model::rng::SplitMix64;
use crate::plan::memory::Shape;
use crate::report::{Mode, Reporter};
use crate::run::machine::peak_resident_bytes;
use crate::train::engine::Gradients;
use crate::train::gates::StepGates;
use crate::train::optimizer::AdamW;
use crate::train::steps::{MicroBatch, Step};
use crate::train::trainer::Trainer;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::io::Read;
use std::rc::Rc;
use std::thread;
use std::time::Instant;
use tunehost_kernels::trace;

/// The first step, which finds caches cold and compiles, and the last one, which is for its memory, are not timed.
const UNTIMED_STEPS: u64 = 2;
/// The fewest steps: one that is timed.
pub const LEAST_STEPS: u64 = UNTIMED_STEPS + 1;
/// Times that the optimiser's update is measured.
const UPDATES: usize = 5;

/// What the process tells, a JSON line each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Told {
    /// The base is on the device.
    Loaded(Peak),
    /// A step was done.
    Step {
        /// Its time, where it was timed.
        wall_s: Option<f64>,
        /// After it.
        #[serde(flatten)]
        peak: Peak,
    },
    /// All steps were done.
    Done {
        /// Micro-batches of each step.
        micro_batches: usize,
        /// Tokens with a target in each timed micro-batch.
        trained_tokens: usize,
        /// Seconds of the optimiser's update.
        optimizer_s: Vec<f64>,
    },
}

/// The most memory that this process had until now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// Of the device: on the CPU that of the process, null where the system does not tell; on another what its allocator reserved.
    pub bytes: Option<usize>,
    /// What tensors took of that, where the allocator tells it from what it reserved.
    pub in_use_bytes: Option<usize>,
    /// Of the host, where the device is not the CPU.
    pub host_bytes: Option<usize>,
}

/// Looks at the memory of a device.
#[derive(Clone)]
struct Watch {
    device: String,
    most: Rc<Cell<Held>>,
}

impl Watch {
    fn new(device: &str) -> Self {
        Self { device: device.into(), most: Rc::default() }
    }

    /// Takes down what the device holds at this moment.
    fn look(&self) {
        if let Some(now) = device::held(&self.device) {
            let most = self.most.get();
            self.most.set(Held {
                in_use_bytes: most.in_use_bytes.max(now.in_use_bytes),
                reserved_bytes: most.reserved_bytes.max(now.reserved_bytes),
            });
        }
    }

    fn peak(&self) -> Peak {
        self.look();
        let host_bytes = peak_resident_bytes();
        match self.most.get() {
            _ if self.device == "cpu" => Peak { bytes: host_bytes, ..Peak::default() },
            Held { in_use_bytes, reserved_bytes } => {
                Peak { bytes: Some(reserved_bytes), in_use_bytes: Some(in_use_bytes), host_bytes }
            }
        }
    }
}

/// Computes `steps` optimiser steps of `shape` as a run of `config` does: the same preparation, engine, optimiser and gates. The last
/// step trains every token, and keeps adapters and moments as they were, as one does beside which a checkpoint is written: no
/// step of the shape takes more memory. What is computed is thrown away.
///
/// # Errors
/// Those of a run.
pub fn compute(config: &Config, shape: Shape, steps: u64, tell: &mut dyn FnMut(&Told) -> Result<()>) -> Result<()> {
    end_with_parent()?;
    let mut reporter = Reporter::new(Mode::Quiet);
    let prepared = Prepared::new(config, None, Policies::load(&config.plugins, None)?, &mut reporter)?;
    let engine = prepared.load_engine(config, &mut reporter)?;
    let watch = Watch::new(&config.model.device);
    tell(&Told::Loaded(watch.peak()))?;

    let rows = rows(&prepared.corpus.train, shape, config.train.seed);
    let all_trained = rows.iter().map(|row| {
        let ids = row.tokens.ids();
        let labels: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        Record { tokens: Tokens::new(&ids, &labels), ..row.clone() }
    });
    let records: Vec<Record> = rows.iter().cloned().chain(all_trained).collect();
    let targets = |record: &Record| record.tokens.trained().skip(1).filter(|trained| *trained).count();
    let trained_tokens = rows.iter().map(targets).sum();
    // From the second micro-batch of a step on there is a sum of gradients; more of them take no more memory.
    let micro_batches = config.train.accumulation.min(2) as usize;
    let step_of = |first: usize| {
        let batch = MicroBatch { rows: (first..first + rows.len()).map(|i| vec![i as u32]).collect() };
        Step { epoch: 0, batches: vec![batch; micro_batches] }
    };
    let (usual, worst) = (step_of(0), step_of(rows.len()));

    let adapter = prepared.initial_adapter(config.train.seed, &engine.model.device);
    let optimizer = AdamW::new(&config.train, &adapter);
    let mut trainer =
        Trainer { config: &config.train, engine: &engine, records: &records, total_steps: steps, adapter, optimizer };
    let mut gates = StepGates::new(&config.gates, prepared.given.as_ref().map(|given| given.adapter.clone()));
    for index in 0..steps {
        let last = index + 1 == steps;
        let being_saved = last.then(|| (trainer.adapter.clone(), trainer.optimizer.clone()));
        let started = Instant::now();
        if last {
            // The most is within a step: looked for at the ends of its kernels, in the step that is not timed.
            let within = watch.clone();
            trace::record(move || within.look(), || trainer.step(index, &worst, &mut gates)).0?;
        } else {
            trainer.step(index, &usual, &mut gates)?;
        }
        finish(&trainer.adapter);
        let wall_s = started.elapsed().as_secs_f64();
        drop(being_saved);
        tell(&Told::Step { wall_s: (index > 0 && !last).then_some(wall_s), peak: watch.peak() })?;
    }
    let optimizer_s = (0..UPDATES).map(|_| update_s(&mut trainer)).collect();
    tell(&Told::Done { micro_batches, trained_tokens, optimizer_s })
}

/// Seconds of an update with gradients of the adapters' sizes and a learning rate of 0.
fn update_s(trainer: &mut Trainer) -> f64 {
    let gradients = Gradients::of(&trainer.adapter);
    let started = Instant::now();
    trainer.optimizer.update(&mut trainer.adapter, gradients, 1.0, 0.0);
    finish(&trainer.adapter);
    started.elapsed().as_secs_f64()
}

/// Waits for what a device that computes beside this process was asked for: it answers in order.
fn finish(adapter: &Adapter) {
    if let Some(last) = adapter.pairs().last() {
        values(&last.b);
    }
}

/// Rows of `shape` out of `records`, drawn by `seed` and laid end to end, each row one document with their labels.
fn rows(records: &[Record], shape: Shape, seed: u64) -> Vec<Record> {
    let mut draw = SplitMix64::new(seed, "rows of smoke");
    let (mut ids, mut labels) = (Vec::new(), Vec::new());
    while ids.len() < shape.tokens() {
        let record = &records[(draw.next_u64() % records.len() as u64) as usize];
        ids.extend(record.tokens.ids());
        labels.extend(record.tokens.labels());
    }
    let width = shape.seq_len_tokens;
    let rows = ids.chunks(width).zip(labels.chunks_mut(width)).take(shape.micro_batch);
    rows.map(|(ids, labels)| {
        // A cut may leave a row of which nothing is trained.
        labels[width - 1] = ids[width - 1] as i32;
        Record { id: "smoke".into(), root: 0, tokens: Tokens::new(ids, labels) }
    })
    .collect()
}

/// Ends this process when the one that started it does, however that ends: it holds the other end of standard input.
fn end_with_parent() -> Result<()> {
    let watch = || {
        _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    };
    let started = thread::Builder::new().name("parent".into()).spawn(watch);
    started.map(drop).map_err(|e| Error::new("io::failed", format!("cannot start a thread: {e}")).source(e))
}
