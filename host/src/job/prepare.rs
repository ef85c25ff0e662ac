//! Everything a run needs before its first step, cheap checks first: what fails should fail before a large base is read.

use super::given::{self, Given};
use super::policies::Policies;
use crate::config::{Config, Recompute, RecomputeGranularity, RecomputeWord, TrainConfig};
use crate::corpus::{self, Corpus};
use crate::device;
use crate::error::{Error, Result};
use crate::export;
use crate::hash::FileHash;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::lora::{LoraPlan, group};
use crate::model::peft;
use crate::model::spec::ModelSpec;
use crate::model::weights::Model;
use crate::plugins::{Exporter, Origin, PlanRequest, Sampler};
use crate::report::{Reporter, bytes, duration};
use crate::train::engine::Engine;
use crate::train::gates;
use crate::train::steps::{Step, epoch_steps};
use burn::tensor::Device;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Instant;

/// What is known before the base is read.
pub struct Prepared {
    /// The base's shape.
    pub text: TextConfig,
    /// The base on disk.
    pub checkpoint: Checkpoint,
    /// Its tensors and modules.
    pub spec: ModelSpec,
    /// The adapted modules.
    pub lora: LoraPlan,
    /// The adapter that the run starts from, where it is not a fresh one.
    pub given: Option<Given>,
    /// The records.
    pub corpus: Corpus,
    /// The corpus manifest, where there is one.
    pub corpus_manifest: Option<FileHash>,
    /// The plugins.
    pub policies: Policies,
    /// Optimiser steps of the whole run.
    pub steps: Vec<Step>,
    /// Ids of the records that the sampler left out, by epoch; epochs without any are not in it.
    pub dropped: Vec<(u32, Vec<String>)>,
}

/// `export/adapter` is read again as an adapter; a plugin that merges has its place after the run, where its files are judged.
///
/// # Errors
/// `config::exporter` where the exporter lays out no adapter; those of asking it.
pub fn check_exporter(
    config: &Config,
    exporter: &mut Exporter,
    lora: &LoraPlan,
    spec: &ModelSpec,
    checkpoint: &Checkpoint,
) -> Result<()> {
    if !config.export.adapter {
        return Ok(());
    }
    let layout = exporter.plan(&export::untrained(lora, spec, checkpoint, None)?)?;
    match layout.texts.iter().any(|(name, _)| name == peft::CONFIG_FILE) {
        true => Ok(()),
        false => Err(Error::new("config::exporter", format!("{} lays out no adapter", exporter.identity()))
            .expected(format!("a plugin that writes {}, such as peft-adapter", peft::CONFIG_FILE))
            .help("leave plugins.exporter as it is, and export after the run: tunehost export RUN --exporter NAME")),
    }
}

impl Prepared {
    /// Checks and reads everything but the base's weights, and plans every epoch.
    ///
    /// # Errors
    /// Classes `device`, `model`, `config`, `plugin`, `corpus`; `gate::unquantised`.
    pub fn new(
        config: &Config,
        corpus_manifest: Option<FileHash>,
        mut policies: Policies,
        reporter: &mut Reporter,
    ) -> Result<Self> {
        let device = device::open(&config.model.device)?;
        let text = TextConfig::read(&config.model.base)?;
        device::check(&config.model.device, config.dtypes(), config.train.residuals, &text)?;
        let checkpoint = Checkpoint::open_trainable(&config.model.base)?;
        let (spec, towers) = ModelSpec::check(&text, &checkpoint.shapes())?;
        gates::quantised(config.model.quantize, &spec, config.model.weights)?;
        let lora = LoraPlan::new(&config.lora, &spec)?;
        reporter.line(format!(
            "base        {}: {} parameters in {} layers",
            config.model.base.display(),
            group(spec.parameters()),
            text.layers.len()
        ));
        if towers.parameters > 0 {
            let (tensors, parameters) = (towers.names.len(), group(towers.parameters));
            reporter
                .line(format!("            {tensors} tensors of other towers ({parameters} parameters) stay on disk"));
        }
        reporter.line(format!("\n{}", lora.table()));
        let given = config.lora.init.as_ref().map(|path| given::read(path, &spec, &lora, &device)).transpose()?;
        if let Some(Given { weights, run, .. }) = &given {
            let of = run.as_ref().map(|run| format!(" of run {run}")).unwrap_or_default();
            reporter.line(format!("starts from {}{of}", weights.path.display()));
        }
        check_exporter(config, &mut policies.exporter, &lora, &spec, &checkpoint)?;

        let started = Instant::now();
        let (data, template) = (&config.data, &config.template);
        let (base, filter) = (&config.model.base, &mut policies.filter);
        let corpus = corpus::load(data, template, base, text.vocab_size, filter, &mut |done, total| {
            reporter.progress("bytes of the corpus", done, total);
        })?;
        reporter.finish_steps();
        for source in &corpus.sources {
            reporter.line(format!("source      {source}"));
        }
        if !corpus.filtered.records.is_empty() {
            reporter.line(corpus.filtered.to_string());
        }
        reporter.line(corpus.report.to_string());
        let duplicates = corpus.duplicates.to_string();
        if !duplicates.is_empty() {
            reporter.line(duplicates);
        }
        for warning in &corpus.warnings {
            reporter.warn(warning);
        }
        reporter.line(format!(
            "corpus      {} records to train on, {} held out, read in {}{}",
            group(corpus.train.len()),
            group(corpus.held_out.len()),
            duration(started.elapsed()),
            corpus.cache.map_or(String::new(), |cache| format!(
                " ({} encoded, {} found in the cache)",
                group(cache.encoded as usize),
                group(cache.found as usize)
            ))
        ));
        if corpus.train.is_empty() {
            return Err(Error::new("corpus::nothing_to_train", "no record is left to train on")
                .expected("at least one record that is neither held out nor left out")
                .help("the lines above say where they went: look at data.held_out, data.max_seq_len and the corpus filter"));
        }
        let (steps, dropped) = planned_steps(config, &corpus, &mut policies.sampler)?;
        for (epoch, ids) in &dropped {
            let name = &policies.sampler.identity().name;
            reporter.warn(format!("{name} leaves {} records out of epoch {epoch}, the first: {}", ids.len(), ids[0]));
        }
        let names = policies.identities().map(|p| match &p.origin {
            Origin::Bundled => format!("{} {} {}", p.kind, p.name, p.version),
            Origin::File(path) => format!("{} {} {} ({})", p.kind, p.name, p.version, path.display()),
        });
        reporter.line(format!("plugins     {}", names.join(", ")));
        reporter.line(format!("plan        {} optimiser steps", group(steps.len())));
        Ok(Self { text, checkpoint, spec, lora, given, corpus, corpus_manifest, policies, steps, dropped })
    }

    /// The adapters before the first step.
    pub fn initial_adapter(&self, seed: u64, device: &Device) -> Adapter {
        match &self.given {
            Some(given) => given.adapter.clone(),
            None => Adapter::init(self.lora.clone(), seed, device),
        }
    }

    /// Reads the base's weights to the device.
    ///
    /// # Errors
    /// Class `model`.
    pub fn load_engine(&self, config: &Config, reporter: &mut Reporter) -> Result<Engine> {
        let device = device::open(&config.model.device)?;
        let started = Instant::now();
        let total_bytes = self.checkpoint.entries().values().map(|e| e.size_bytes()).sum();
        let mut read_bytes = 0;
        let mut model = Model::load(self.text.clone(), &self.checkpoint, &device, config.model.weights, &mut |read| {
            read_bytes = read;
            reporter.progress("bytes of the base", read, total_bytes);
        })?;
        reporter.finish_steps();
        reporter.line(format!(
            "device      {}: {} of weights loaded in {:.2} s",
            config.model.device,
            bytes(read_bytes),
            started.elapsed().as_secs_f64()
        ));
        model.activations = config.train.activations.dtype();
        let (device, weights) = (&config.model.device, config.model.weights);
        let mut by_implementation = BTreeMap::<String, Vec<&str>>::new();
        for (kernel, resolved) in device::kernels(device, config.dtypes())? {
            by_implementation.entry(resolved).or_default().push(kernel);
        }
        for (resolved, kernels) in by_implementation {
            let activations = config.train.activations.name();
            let requested = format!("(requested: {device}, weights {}, activations {activations})", weights.name());
            reporter.line(format!("kernels     {resolved}: {} {requested}", kernels.join(", ")));
        }
        reporter.event("loaded", json!({"bytes": read_bytes, "seconds": started.elapsed().as_secs_f64()}));
        let layers = model.layers.len();
        let recompute_layers = match config.train.recompute {
            Recompute::Word(RecomputeWord::All) => layers,
            Recompute::Word(RecomputeWord::None) => 0,
            Recompute::Layers(n) => n.min(layers),
        };
        let keep_products = config.train.recompute_granularity == RecomputeGranularity::Selective;
        let TrainConfig { loss_chunk_rows, residuals, .. } = config.train;
        Ok(Engine { model, recompute_layers, keep_products, loss_chunk_rows, residuals })
    }
}

/// The steps of all epochs, up to `train.max_steps`, and the ids of the records that the sampler dropped, by epoch.
///
/// # Errors
/// Class `plugin`; `plugin::empty_plan` where there is no step.
#[allow(clippy::type_complexity)] // two results of one pass
pub fn planned_steps(
    config: &Config,
    corpus: &Corpus,
    sampler: &mut Sampler,
) -> Result<(Vec<Step>, Vec<(u32, Vec<String>)>)> {
    let (lengths, roots) = corpus.columns();
    let limit = config.train.max_steps.map_or(usize::MAX, |n| n as usize);
    let (mut steps, mut dropped) = (Vec::new(), Vec::new());
    for epoch in 0..config.train.epochs {
        if steps.len() >= limit {
            break;
        }
        let plan = sampler.plan(&PlanRequest::configured(config, &lengths, &roots, epoch))?;
        if !plan.dropped.is_empty() {
            dropped.push((epoch, plan.dropped.iter().map(|i| corpus.train[*i as usize].id.to_string()).collect()));
        }
        steps.extend(epoch_steps(epoch, &plan, config.train.accumulation));
    }
    steps.truncate(limit);
    match steps.is_empty() {
        true => Err(Error::new("plugin::empty_plan", format!("{} planned no step", config.plugins.sampler))
            .expected("at least one micro-batch")
            .help("all records may have been dropped; look at train.epochs, train.max_steps and data.max_seq_len")),
        false => Ok((steps, dropped)),
    }
}
