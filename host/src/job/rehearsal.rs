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
use crate::train::steps::Step;
use crate::train::trainer::Trainer;

/// A run before its base is read; the device is its own until it is dropped.
pub struct Rehearsal<'a> {
    config: &'a Config,
    /// What is known without the base's weights.
    pub prepared: Prepared,
    _lease: Option<DeviceLease>,
}

impl<'a> Rehearsal<'a> {
    /// Asks what a run asks, in its order: whether the device is free, and the corpora may be trained on.
    ///
    /// # Errors
    /// Whatever would stop a run before it reads its base, but for what its folder and its results need.
    pub fn new(config: &'a Config) -> Result<Self> {
        let mut reporter = Reporter::new(Mode::Quiet);
        let lease = super::gates::take_device(config, &mut Records::new(), &reporter)?;
        let manifest = super::manifest(config)?;
        let mut policies = Policies::load(&config.plugins, None)?;
        eligibility::ask(config, manifest.as_ref(), &mut policies.eligibility, None, None)?;
        let prepared = Prepared::new(config, manifest.map(|m| m.file), policies, &mut reporter)?;
        Ok(Self { config, prepared, _lease: lease })
    }

    /// Reads the base to its device, where there is room.
    ///
    /// # Errors
    /// `gate::free_memory`, class `model`.
    pub fn load_engine(&self) -> Result<Engine> {
        let mut reporter = Reporter::new(Mode::Quiet);
        super::gates::room(self.config, &self.prepared, &mut Records::new(), &reporter)?;
        self.prepared.load_engine(self.config, &mut reporter)
    }

    /// Adapters and optimiser as the first step finds them, the steps, and the plugins that are asked on the way.
    pub fn parts<'b>(&'b mut self, engine: &'b Engine) -> (Trainer<'b>, &'b [Step], &'b mut Policies) {
        let adapter = self.prepared.initial_adapter(self.config.train.seed, &engine.model.device);
        let Prepared { corpus, steps, policies, .. } = &mut self.prepared;
        let trainer = Trainer {
            config: &self.config.train,
            engine,
            records: &corpus.train,
            total_steps: steps.len() as u64,
            optimizer: AdamW::new(&self.config.train, &adapter),
            adapter,
        };
        (trainer, steps, policies)
    }
}
