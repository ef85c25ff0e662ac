//! The typed configuration of a run. `configs/reference.toml` documents every key; a test loads it and fails on a key
//! that is missing there.

use super::{ActivationDtype, DataConfig, GatesConfig, TemplateConfig, WeightDtype};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// A whole run: base, data, adapters, training, plugins, evaluation and export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the run; the run folder is `<run.root>/<name>-<number>` unless `--run-dir` names one.
    pub name: String,
    /// The base model.
    pub model: ModelConfig,
    /// The corpus and how it becomes tokens.
    pub data: DataConfig,
    /// How the chat template is used.
    #[serde(default)]
    pub template: TemplateConfig,
    /// The low-rank adapters.
    #[serde(default)]
    pub lora: LoraConfig,
    /// Optimisation.
    #[serde(default)]
    pub train: TrainConfig,
    /// Policy components.
    #[serde(default)]
    pub plugins: PluginsConfig,
    /// Whether the corpora may be trained on.
    #[serde(default)]
    pub eligibility: EligibilityConfig,
    /// Which checkpoints stay.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Commands around a run.
    #[serde(default)]
    pub window: WindowConfig,
    /// Held-out evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Checks that stop a run, or warn.
    #[serde(default)]
    pub gates: GatesConfig,
    /// What is written after the last step.
    #[serde(default)]
    pub export: ExportConfig,
    /// Where run folders are made.
    #[serde(default)]
    pub run: RunConfig,
}

/// The base model and where it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Hugging Face folder with `config.json`, `model.safetensors` or shards, `tokenizer.json`.
    pub base: PathBuf,
    /// `cpu` or `cuda:0`.
    #[serde(default = "cpu")]
    pub device: String,
    /// How the frozen matrices are kept and multiplied.
    #[serde(default)]
    pub weights: WeightDtype,
    /// Four bits a weight: refused, with the weights that would stay as they are, since no kernel of this build takes them.
    #[serde(default)]
    pub quantize: Option<Quantize>,
    /// Compute on a device that another run of this machine computes on, or another process has open.
    #[serde(default)]
    pub allow_shared: bool,
}

/// The 4-bit formats that a configuration can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// Integers with a scale for a group.
    Int4,
    /// Quantiles of the normal distribution (QLoRA, arXiv 2305.14314).
    Nf4,
    /// E2M1 in blocks of 16 with E4M3 scales.
    Nvfp4,
}

impl Quantize {
    /// As a configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            Quantize::Int4 => "int4",
            Quantize::Nf4 => "nf4",
            Quantize::Nvfp4 => "nvfp4",
        }
    }
}

fn cpu() -> String {
    "cpu".into()
}

/// Which modules get an adapter: names (`q_proj`) or one regular expression that must match the whole module path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "an array of module names, or a regular expression (a string)")]
pub enum Targets {
    /// Last components of module paths.
    Names(Vec<String>),
    /// Full-match regular expression over module paths.
    Regex(String),
}

/// The adapters (LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank r.
    pub rank: usize,
    /// The update is scaled by alpha / r, or alpha / sqrt(r) with `rslora`.
    pub alpha: f64,
    /// Scale by alpha / sqrt(r).
    pub rslora: bool,
    /// Dropout probability on the adapter's input.
    pub dropout: f64,
    /// Adapted modules.
    pub targets: Targets,
    /// The adapter to start from: the folder of a run, whose exported adapter it is, or a PEFT folder. Without it A is random
    /// and B zero.
    pub init: Option<PathBuf>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        Self {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            dropout: 0.0,
            targets: Targets::Names(names.map(String::from).into()),
            init: None,
        }
    }
}

/// Which layers are run a second time in the backward pass instead of keeping their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "\"all\", \"none\" or a number of layers")]
pub enum Recompute {
    /// `"all"` or `"none"`.
    Word(RecomputeWord),
    /// The first N layers.
    Layers(usize),
}

/// The two words that `train.recompute` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeWord {
    /// Every layer: least memory.
    All,
    /// No layer: least time.
    None,
}

/// What a recomputed layer computes a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeGranularity {
    /// All but matrix products and attention, whose outputs are kept.
    Selective,
    /// Everything: least memory.
    Full,
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine down to `min_lr_ratio`.
    Cosine,
    /// A straight line down to `min_lr_ratio`.
    Linear,
    /// No decay.
    Constant,
}

/// Optimiser, schedule and the shape of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Seed of everything random: adapters, order, dropout.
    pub seed: u64,
    /// Passes over the training records.
    pub epochs: u32,
    /// Stop after this many optimiser steps, whatever the epochs say.
    pub max_steps: Option<u64>,
    /// Rows in a micro-batch.
    pub micro_batch: u32,
    /// Micro-batches in an optimiser step.
    pub accumulation: u32,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps of linear warm-up to `lr`.
    pub warmup_steps: u64,
    /// Shape after the warm-up.
    pub schedule: Schedule,
    /// Lowest learning rate as a share of `lr`.
    pub min_lr_ratio: f64,
    /// AdamW's beta 1 and 2.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip_norm: f64,
    /// Layers recomputed in the backward pass: `"all"`, `"none"` or the first N.
    pub recompute: Recompute,
    /// What a recomputed layer computes a second time.
    pub recompute_granularity: RecomputeGranularity,
    /// How the residual stream is kept between layers; inside a layer it is f32.
    pub residuals: WeightDtype,
    /// What the operations of a layer and the loss head pass to each other.
    pub activations: ActivationDtype,
    /// Rows of the loss head computed at once: its extra memory is this x vocabulary x 4 bytes.
    pub loss_chunk_rows: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            epochs: 1,
            max_steps: None,
            micro_batch: 2,
            accumulation: 8,
            lr: 2e-4,
            warmup_steps: 10,
            schedule: Schedule::Cosine,
            min_lr_ratio: 0.1,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            clip_norm: 1.0,
            recompute: Recompute::Word(RecomputeWord::All),
            recompute_granularity: RecomputeGranularity::Selective,
            residuals: WeightDtype::F32,
            activations: ActivationDtype::F32,
            loss_chunk_rows: 512,
        }
    }
}

/// The kinds of plugin, as the keys of `[plugins]` and `[plugins.config]` spell them; `--plugins` writes `-` for `_`.
pub const PLUGIN_KINDS: [&str; 5] = ["sampler", "checkpoint_scheduler", "corpus_filter", "eligibility", "exporter"];

/// The component of each kind, by name or path, and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PluginsConfig {
    /// Decides which records share a micro-batch, and the order.
    pub sampler: String,
    /// Decides when to save.
    pub checkpoint_scheduler: String,
    /// Decides which records are trained, and as what.
    pub corpus_filter: String,
    /// Decides whether a run may train on corpora that something stands against.
    pub eligibility: String,
    /// Lays out the exported adapter.
    pub exporter: String,
    /// Folders looked in before the bundled plugins.
    pub search_path: Vec<PathBuf>,
    /// Kinds ([`PLUGIN_KINDS`]) whose plugin may import the virtual WASI.
    pub wasi: Vec<String>,
    /// Limits of a plugin, by kind: `[plugins.limits.sampler]`.
    pub limits: BTreeMap<String, LimitsConfig>,
    /// Settings handed to a plugin as JSON, by kind: `[plugins.config.sampler]`.
    pub config: BTreeMap<String, serde_json::Value>,
}

impl Default for PluginsConfig {
    fn default() -> Self {
        Self {
            sampler: "bucket-to-pair".into(),
            checkpoint_scheduler: "wall-clock".into(),
            corpus_filter: "keep-all".into(),
            eligibility: "strict".into(),
            exporter: "peft-adapter".into(),
            search_path: Vec::new(),
            wasi: Vec::new(),
            limits: BTreeMap::new(),
            config: BTreeMap::new(),
        }
    }
}

impl PluginsConfig {
    /// The plugin of each kind, in the order of [`PLUGIN_KINDS`].
    pub fn named(&self) -> [&String; 5] {
        let Self { sampler, checkpoint_scheduler, corpus_filter, eligibility, exporter, .. } = self;
        [sampler, checkpoint_scheduler, corpus_filter, eligibility, exporter]
    }

    /// As [`PluginsConfig::named`], to be changed.
    pub fn named_mut(&mut self) -> [&mut String; 5] {
        let Self { sampler, checkpoint_scheduler, corpus_filter, eligibility, exporter, .. } = self;
        [sampler, checkpoint_scheduler, corpus_filter, eligibility, exporter]
    }

    /// The plugin of the kind whose key is `kind`, one of [`PLUGIN_KINDS`].
    pub fn of(&self, kind: &str) -> &str {
        let position = PLUGIN_KINDS.iter().position(|known| *known == kind).expect("a kind of plugin");
        self.named()[position]
    }
}

/// What the eligibility plugin rules on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EligibilityConfig {
    /// The corpus manifest; without it the plugin is not asked.
    pub manifest: Option<PathBuf>,
    /// The grants; their ledger is beside them.
    pub grants: Option<PathBuf>,
}

/// Limits of one plugin; what is not set is as its kind has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// All memory of the plugin, MiB.
    pub memory_mib: Option<u64>,
    /// What one call may hand over, MiB.
    pub answer_mib: Option<u64>,
    /// Log lines shown in a minute; the others are counted.
    pub log_lines_per_minute: Option<u64>,
    /// Time for each part of the start, milliseconds.
    pub start_deadline_ms: Option<u64>,
    /// Time for each call, milliseconds.
    pub call_deadline_ms: Option<u64>,
}

impl LimitsConfig {
    /// Each limit by name, its value, and what it may be.
    pub fn named(&self) -> [(&'static str, Option<u64>, RangeInclusive<u64>); 5] {
        const DAY_MS: u64 = 86_400_000;
        let Self { memory_mib, answer_mib, log_lines_per_minute, start_deadline_ms, call_deadline_ms } = *self;
        [
            ("memory_mib", memory_mib, 1..=65_536),
            ("answer_mib", answer_mib, 1..=4096),
            ("log_lines_per_minute", log_lines_per_minute, 0..=60_000),
            ("start_deadline_ms", start_deadline_ms, 1..=DAY_MS),
            ("call_deadline_ms", call_deadline_ms, 1..=DAY_MS),
        ]
    }
}

/// Which checkpoints stay; when one is saved, the checkpoint scheduler decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// The newest N; without it, every one stays.
    pub keep_last: Option<u32>,
    /// Beside them, those of steps divisible by N.
    pub keep_every: Option<u64>,
    /// Beside them, that of the best evaluation by steps.
    pub keep_best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { keep_last: None, keep_every: None, keep_best: true }
    }
}

/// Commands around a run; each is a program and its arguments, and no shell is involved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WindowConfig {
    /// Run in order before the base is loaded.
    pub open: Vec<Vec<String>>,
    /// Run in order when the run ended, however it did.
    pub close: Vec<Vec<String>>,
    /// Time for each command, seconds; after it, it is killed.
    pub deadline_s: u64,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self { open: Vec::new(), close: Vec::new(), deadline_s: 600 }
    }
}

/// Held-out loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Most held-out records evaluated per root; 0 turns the evaluation off.
    pub max_records_per_root: usize,
    /// Also evaluate in the run: after every so many optimiser steps, and after the last.
    pub every_steps: Option<u64>,
    /// Also evaluate when so many minutes have passed since the last evaluation. Such ones choose nothing: `timing.jsonl` has them.
    pub every_minutes: Option<f64>,
    /// Bootstrap resamples of the held-out records that a standard error is taken over.
    pub resamples: u32,
    /// End training after so many evaluations by steps in a row without a lower loss.
    pub patience: Option<u32>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { max_records_per_root: 60, every_steps: None, every_minutes: None, resamples: 200, patience: None }
    }
}

/// What is written when the run ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExportConfig {
    /// PEFT adapter folder.
    pub adapter: bool,
    /// Base with the adapter merged in.
    pub merged: bool,
    /// Which adapter that is.
    pub checkpoint: ExportedCheckpoint,
}

/// The adapter that is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportedCheckpoint {
    /// That of the last step.
    #[default]
    Last,
    /// That of the lowest held-out loss among the evaluations by steps.
    Best,
}

impl Default for ExportConfig {
    fn default() -> Self {
        Self { adapter: true, merged: true, checkpoint: ExportedCheckpoint::Last }
    }
}

/// Where run folders are made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Folder that holds the run folders.
    pub root: PathBuf,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self { root: "runs".into() }
    }
}
