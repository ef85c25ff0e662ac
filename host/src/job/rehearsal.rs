//! A run up to its first step, for commands that measure or check what it would compute and keep nothing: no run folder is
//! made, and no grant is used.

use super::policies::Policies;
use super::prepare::Prepared;
use crate::config::Config;
use crate::eligibility;
use crate::error::Result;
use crate::report::{Mode, Reporter};
use crate::run::lease::DeviceLease;
use crate::train::engine::Engine;
use crate::train::gates::Records;
use crate::train::optimizer::AdamW;
use crate::train::trainer::Trainer;

/// A run that is ready for its first step; the device is its own until it is dropped.
pub struct Rehearsal<'a> {
    config: &'a Config,
    /// What is known without the base's weights.
    pub prepared: Prepared,
    /// The base on its device.
    pub engine: Engine,
    _lease: Option<DeviceLease>,
}

impl<'a> Rehearsal<'a> {
    /// Asks what a run asks (whether the device is free, the corpora may be trained on, memory is enough), in its order,
    /// and loads what it loads.
    ///
    /// # Errors
    /// Whatever would stop a run before its first step, but for what its folder and its results need.
    pub fn new(config: &'a Config) -> Result<Self> {
        let mut reporter = Reporter::new(Mode::Quiet);
        let mut records = Records::new();
        let lease = super::gates::take_device(config, &mut records, &reporter)?;
        let manifest = super::manifest(config)?;
        let mut policies = Policies::load(&config.plugins)?;
        eligibility::ask(config, manifest.as_ref(), &mut policies.eligibility, None, None)?;
        let prepared = Prepared::new(config, manifest.map(|m| m.file), policies, &mut reporter)?;
        super::gates::room(config, &prepared, &mut records, &reporter)?;
        let engine = prepared.load_engine(config, &mut reporter)?;
        Ok(Self { config, prepared, engine, _lease: lease })
    }

    /// The adapters and the optimiser as the first step finds them.
    pub fn trainer(&self) -> Trainer<'_> {
        let adapter = self.prepared.initial_adapter(self.config.train.seed, &self.engine.model.device);
        Trainer {
            config: &self.config.train,
            engine: &self.engine,
            records: &self.prepared.corpus.train,
            total_steps: self.prepared.steps.len() as u64,
            optimizer: AdamW::new(&self.config.train, &adapter),
            adapter,
        }
    }
}
