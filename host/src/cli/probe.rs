//! `tunehost probe`.

use super::{ConfigArgs, corpus, print};
use crate::config::{Config, WeightDtype};
use crate::device;
use crate::error::Result;
use crate::job::{Rehearsal, planned_steps};
use crate::model::config::TextConfig;
use crate::plugins::{Kind, PluginRef, Sampler};
use crate::probe::{adapters, determinism, mask, padding, template};
use clap::{Args, Subcommand};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Display;

#[derive(Debug, Subcommand)]
pub enum ProbeCommand {
    /// Which keys each query sees, by changing keys and values and looking at what the attention kernel makes of it. No weight is
    /// read.
    Mask(ProbeArgs),
    /// What the template makes of a conversation, where its trained spans lie, and whether special tokens are one token each.
    Template(ProbeArgs),
    /// Whether a gradient reaches every adapter, by one micro-batch of the run.
    Adapters(ProbeArgs),
    /// What the micro-batches of the run would waste in an engine that pads.
    Padding {
        #[command(flatten)]
        args: ProbeArgs,
        /// Fail where more than this share of the tokens is padding, such as 0.01.
        #[arg(long, value_name = "SHARE", value_parser = share)]
        most: Option<f64>,
    },
    /// Whether a step gives the same bytes twice, and with another number of threads.
    Determinism(ProbeArgs),
}

#[derive(Debug, Args)]
pub struct ProbeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl ProbeArgs {
    fn load(&self) -> Result<Config> {
        Ok(self.config.load()?.config)
    }

    /// Prints what was found, and fails where something is wrong with it.
    fn conclude(&self, report: &(impl Serialize + Display), verdict: Result<()>) -> Result<()> {
        match self.json {
            true => print(&serde_json::to_string_pretty(report).expect("numbers and names are JSON"))?,
            false => print(&report.to_string())?,
        }
        verdict
    }
}

/// A number from 0 to 1.
fn share(text: &str) -> std::result::Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "expected a share from 0 to 1, such as 0.01".into())
}

pub fn execute(command: &ProbeCommand) -> Result<()> {
    match command {
        ProbeCommand::Mask(args) => {
            let config = args.load()?;
            let (model, dtypes) = (&config.model, config.dtypes());
            let text = TextConfig::read(&model.base)?;
            device::check(&model.device, dtypes, WeightDtype::F32, &text)?;
            let mut resolved = BTreeMap::from(device::kernels(&model.device, dtypes)?);
            let kernel = resolved.remove("windowed_attention").expect("every table has the attention");
            let report = mask::probe(&text, &model.device, dtypes, kernel)?;
            args.conclude(&report, report.verdict())
        }
        ProbeCommand::Template(args) => {
            let config = args.load()?;
            let report = template::probe(&config, &corpus::encoder(&config)?)?;
            args.conclude(&report, report.verdict())
        }
        ProbeCommand::Adapters(args) => {
            let config = args.load()?;
            let mut rehearsal = Rehearsal::new(&config)?;
            let engine = rehearsal.load_engine()?;
            let (mut trainer, steps, _) = rehearsal.parts(&engine);
            let report = adapters::probe(&mut trainer, steps, &config.model.device)?;
            args.conclude(&report, report.verdict())
        }
        ProbeCommand::Padding { args, most } => {
            let config = args.load()?;
            let sampler = PluginRef::configured(Kind::Sampler, &config.plugins)?;
            let mut sampler = Sampler::load(&sampler, corpus::settings(&config, Kind::Sampler))?;
            let corpus = corpus::load(&config)?;
            let (steps, _) = planned_steps(&config, &corpus, &mut sampler)?;
            let name = &sampler.identity().name;
            let report = padding::probe(name, &steps, &corpus.train, config.data.max_seq_len);
            args.conclude(&report, report.verdict(*most))
        }
        ProbeCommand::Determinism(args) => {
            let config = args.load()?;
            let mut rehearsal = Rehearsal::new(&config)?;
            let engine = rehearsal.load_engine()?;
            let (trainer, steps, _) = rehearsal.parts(&engine);
            let report = determinism::probe(&trainer, steps, &config.model.device)?;
            args.conclude(&report, report.verdict())
        }
    }
}
