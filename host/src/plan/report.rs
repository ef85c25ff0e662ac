//! The sizing of a run as one value, printed as text or as JSON.

use super::blocks::{BlockSize, blocks};
use super::memory::{Memory, Model, Shape};
use super::phases::{Beside, Evaluation, Export, RunPeak};
use super::steps::{Schedule, Speed, Steps};
use super::work::active_layer_parameters;
use super::{Source, Spread};
use crate::config::{Config, WeightDtype};
use crate::corpus::{Corpus, TruncationReport};
use crate::error::{Error, Result};
use crate::model::config::TextConfig;
use crate::model::spec::{ModelSpec, Slot, Towers};
use crate::report::bytes;
use crate::run::machine::free_disk_bytes;
use crate::run::retention::kept_at_once;
use crate::train::gates;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tunehost_kernels::Runtime;

/// Micro-batches that the table of memory goes over.
const MICRO_BATCHES: std::ops::RangeInclusive<usize> = 1..=8;
/// Lengths of rows that it goes over, and `data.max_seq_len`.
const SEQ_LENS: [usize; 5] = [2048, 4096, 8192, 16_384, 32_768];
/// Values of an adapter parameter in a checkpoint: itself and two moments.
pub(super) const CHECKPOINT_VALUES: usize = 3;

/// Everything that `tunehost plan` tells.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The base by blocks.
    pub base: Base,
    /// The adapters.
    pub adapters: Adapters,
    /// What the device must hold.
    pub memory: MemoryReport,
    /// What `tunehost smoke` measured of it; null where nothing was.
    pub measured: Option<Measured>,
    /// The optimiser's steps.
    pub steps: Steps,
    /// What length limit, padding and sampler cost.
    pub corpus: CorpusCost,
    /// The speed that times are of, where one was stated.
    pub speed: Option<Speed>,
    /// The run at each pace: as measured, slowest first, and at each utilisation.
    pub schedules: Vec<Schedule>,
    /// What is written.
    pub disk: Disk,
}

/// The base by blocks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Base {
    /// Shapes and sizes are those of the headers; sizes under a scheme follow from them.
    pub source: Source,
    /// Parameters on disk.
    pub parameters: usize,
    /// Bytes of them.
    pub disk_bytes: usize,
    /// Parameters of the layers that a token is multiplied with: linear modules, router and its experts.
    pub active_layer_parameters: usize,
    /// The same, and those of the head.
    pub active_parameters: usize,
    /// The blocks.
    pub blocks: Vec<BlockSize>,
}

impl Base {
    /// As [`blocks`].
    pub fn of(
        spec: &ModelSpec,
        towers: &Towers,
        found: &BTreeMap<String, (Vec<usize>, String)>,
        disk_bytes: impl Fn(&str) -> usize,
        weights: WeightDtype,
        text: &TextConfig,
    ) -> Self {
        let blocks = blocks(spec, towers, found, disk_bytes, weights);
        let active_layer_parameters = active_layer_parameters(text);
        Self {
            source: Source::Computed,
            active_layer_parameters,
            active_parameters: active_layer_parameters + text.hidden_size * text.vocab_size,
            parameters: blocks.iter().map(|block| block.parameters).sum(),
            disk_bytes: blocks.iter().map(|block| block.disk_bytes).sum(),
            blocks,
        }
    }

    /// Bytes on the device.
    pub fn device_bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.device_bytes).sum()
    }

    /// Bytes if every block that `scheme` takes is stored under it.
    pub fn quantised_bytes(&self, scheme: &str) -> usize {
        let of = |block: &BlockSize| block.quantised_bytes.get(scheme).copied().flatten().unwrap_or(block.disk_bytes);
        self.blocks.iter().map(of).sum()
    }
}

/// The adapters.
#[derive(Debug, Serialize)]
pub struct Adapters {
    /// From the shapes of the modules.
    pub source: Source,
    /// Rank.
    pub rank: usize,
    /// Adapted modules.
    pub modules: usize,
    /// Trainable parameters.
    pub parameters: usize,
    /// Their share of the parameters on disk.
    pub trainable_share: f64,
    /// By target and layer kind.
    pub targets: Vec<Target>,
    #[serde(skip)]
    table: String,
}

/// A target in the layers of one kind.
#[derive(Debug, Serialize)]
pub struct Target {
    /// Its name.
    pub target: &'static str,
    /// `sliding` or `full`.
    pub layers: &'static str,
    /// Modules.
    pub modules: usize,
    /// Their parameters.
    pub parameters: usize,
}

impl Adapters {
    pub(super) fn new(model: &Model, base_parameters: usize) -> Self {
        let lora = model.lora;
        let mut targets: BTreeMap<_, (usize, usize)> = BTreeMap::new();
        for module in &lora.modules {
            let (modules, parameters) = targets.entry((module.slot, module.kind)).or_default();
            *modules += 1;
            *parameters += lora.rank * (module.input + module.output);
        }
        let target =
            |((slot, kind), (modules, parameters)): ((Slot, crate::model::config::LayerKind), (usize, usize))| Target {
                target: slot.name(),
                layers: kind.name(),
                modules,
                parameters,
            };
        Self {
            source: Source::Computed,
            rank: lora.rank,
            modules: lora.modules.len(),
            parameters: lora.parameters(),
            trainable_share: lora.parameters() as f64 / base_parameters as f64,
            targets: targets.into_iter().map(target).collect(),
            table: lora.table(),
        }
    }
}

/// Memory of the device.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limit {
    /// Assumed where it was stated, else measured, once; null where the device does not tell.
    pub source: Option<Source>,
    /// Bytes; null where the device does not tell.
    pub bytes: Option<usize>,
    /// Measurements: one where it was measured.
    pub n: Option<usize>,
}

impl Limit {
    /// What was stated, else what is free.
    pub fn of(stated: Option<usize>, free: Option<u64>) -> Self {
        match stated {
            Some(bytes) => Self { source: Some(Source::Assumed), bytes: Some(bytes), n: None },
            None => Self {
                source: free.map(|_| Source::Measured),
                bytes: free.map(|bytes| bytes as usize),
                n: free.map(|_| 1),
            },
        }
    }

    fn fits(self, peak_bytes: usize) -> Option<bool> {
        self.bytes.map(|bytes| peak_bytes <= bytes)
    }
}

/// A shape and whether it fits.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Sized {
    /// The shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// What it takes.
    #[serde(flatten)]
    pub memory: Memory,
    /// Whether it fits; null where the limit is not known.
    pub fits: Option<bool>,
}

/// What the device must hold.
#[derive(Debug, Serialize)]
pub struct MemoryReport {
    /// From shapes and the kernels' own workspaces; the slack is assumed.
    pub source: Source,
    /// Whose workspaces those are.
    pub kernels: &'static str,
    /// The device that the run names.
    pub device: String,
    /// The device's memory.
    pub limit: Limit,
    /// Share of what is allocated that is added as slack.
    pub slack_share: f64,
    /// Where that is from.
    pub slack_source: Source,
    /// Where `process_bytes` are from: measured once, of the process that plans.
    pub process_source: Source,
    /// Measurements behind them.
    pub process_n: usize,
    /// The configured shape, all rows full.
    pub configured: Sized,
    /// The largest micro-batch that the sampler planned, as one row.
    pub planned: Sized,
    /// While held-out records are evaluated; null where none are.
    pub evaluation: Option<Evaluation>,
    /// While a merged model is written and judged; null where none is asked for.
    pub export: Option<Export>,
    /// The run: the highest of those three.
    pub run: RunPeak,
    /// Of the configured length, the most of 1 to 8 rows that fit. Null where none does, or that is not known.
    pub most_rows: Option<Sized>,
    /// Of the configured rows, the longest of the table's lengths at which they fit. Null likewise.
    pub longest: Option<Sized>,
    /// Micro-batches of 1 to 8 rows of 2,048 to 32,768 tokens.
    pub shapes: Vec<Sized>,
}

impl MemoryReport {
    fn new(config: &Config, model: &Model, limit: Limit, planned_tokens: usize, beside: Beside) -> Self {
        let sized = |micro_batch: usize, seq_len_tokens: usize| {
            let shape = Shape { micro_batch, seq_len_tokens };
            let memory = model.memory(shape);
            Sized { shape, memory, fits: limit.fits(memory.peak_bytes) }
        };
        let asked = config.data.max_seq_len;
        let mut lengths = SEQ_LENS.to_vec();
        lengths.push(asked);
        lengths.sort_unstable();
        lengths.dedup();
        let shapes: Vec<Sized> = lengths
            .iter()
            .flat_map(|length| MICRO_BATCHES.map(move |rows| (rows, *length)))
            .map(|(r, l)| sized(r, l))
            .collect();
        let rows = config.train.micro_batch as usize;
        let fitting = || shapes.iter().filter(|sized| sized.fits == Some(true));
        let most_rows =
            fitting().filter(|s| s.shape.seq_len_tokens == asked).max_by_key(|s| s.shape.micro_batch).copied();
        let lengths = lengths.iter().map(|length| sized(rows, *length));
        let longest = lengths.filter(|sized| sized.fits == Some(true)).max_by_key(|sized| sized.shape.seq_len_tokens);
        let planned = sized(1, planned_tokens);
        let Beside { evaluation, export } = beside;
        let peaks = [
            Some(("steps", planned.memory.peak_bytes)),
            evaluation.map(|evaluation| ("evaluation", evaluation.peak_bytes)),
            export.map(|export| ("export", export.peak_bytes)),
        ];
        let (of, peak_bytes) = peaks.into_iter().flatten().max_by_key(|(_, bytes)| *bytes).expect("there are steps");
        Self {
            source: Source::Computed,
            kernels: match model.runtime {
                Runtime::Cpu { .. } => "cpu",
                Runtime::Cubecl { .. } => "cubecl",
            },
            device: config.model.device.clone(),
            limit,
            slack_share: model.slack_share(),
            slack_source: Source::Assumed,
            process_source: Source::Measured,
            process_n: 1,
            configured: sized(rows, asked),
            planned,
            evaluation,
            export,
            run: RunPeak { of, peak_bytes, fits: limit.fits(peak_bytes) },
            most_rows,
            longest,
            shapes,
        }
    }
}

/// What `tunehost smoke` measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// On the run's device, by its own engine.
    pub source: Source,
    /// The file that has it.
    pub path: PathBuf,
    /// Why it is not used; null where it is.
    pub unused: Option<String>,
    /// When it was measured, UTC; null where it is not used.
    pub measured: Option<String>,
    /// The shapes; none where it is not used.
    pub shapes: Vec<MeasuredShape>,
}

/// A shape as it was measured, beside what is computed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeasuredShape {
    /// The shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// What became of it: `fits`, `out of memory`, `crashed`, `not tried`.
    pub outcome: &'static str,
    /// The peak as it was computed where it was measured.
    pub computed_peak_bytes: usize,
    /// The process's peak; of one that failed, when it last told.
    pub peak_bytes: Option<usize>,
    /// Time of a micro-batch.
    pub micro_batch_s: Option<Spread>,
}

/// What the length limit and the sampler cost.
#[derive(Debug, Serialize)]
pub struct CorpusCost {
    /// From the corpus as it was read and encoded, or estimated from a sample of it.
    pub source: Source,
    /// Of how many rows lengths are known, and of how many that is a sample; null where all are.
    pub sample: Option<Sampled>,
    /// Records whose lengths are known: what the length limit saw.
    pub encoded_records: usize,
    /// Records to train on.
    pub records: usize,
    /// Records held out.
    pub held_out_records: usize,
    /// Records that the sampler left out, over all epochs.
    pub left_out_records: usize,
    /// The sampler.
    pub sampler: String,
    /// Padding as a share of the rectangles around the micro-batches' rows.
    pub padding_share: f64,
    /// What the length limit cut, by root.
    pub truncation: TruncationReport,
}

/// A sample of a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sampled {
    /// Rows in it.
    pub rows: u64,
    /// Rows of the corpus.
    pub of_rows: u64,
}

/// What is written.
#[derive(Debug, Serialize)]
pub struct Disk {
    /// From shapes and lengths.
    pub source: Source,
    /// Encoded records, in the user's cache.
    pub encode_cache_bytes: usize,
    /// One checkpoint.
    pub checkpoint_bytes: usize,
    /// Those that stay of the most that a schedule saves, at the most one more while it is written; without a schedule, those that
    /// `checkpoint.keep_last` lets stay, and null where that is not known.
    pub checkpoints_bytes: Option<usize>,
    /// The exported adapter.
    pub adapter_bytes: usize,
    /// The merged model, stored as the base is.
    pub merged_bytes: usize,
    /// Checkpoints (one, where it is not known how many) and exports.
    pub run_bytes: usize,
    /// Free where the run folders are made; null where the system does not tell.
    pub free_bytes: Option<u64>,
    /// Where that is from.
    pub free_source: Source,
    /// Measurements behind it.
    pub free_n: usize,
}

impl Disk {
    /// As a run's gate looks at it.
    pub(super) fn require_fit(&self) -> Result<()> {
        let checkpoints = self.run_bytes - self.adapter_bytes - self.merged_bytes;
        let parts = [("checkpoints", checkpoints), ("adapter", self.adapter_bytes), (gates::MERGED, self.merged_bytes)];
        let parts = parts.into_iter().map(|(part, bytes)| (part, bytes as u64)).collect();
        gates::free_disk(&parts, self.free_bytes).map(drop)
    }
}

impl Report {
    /// Puts the parts together.
    #[allow(clippy::too_many_arguments)] // each is a part of what is told
    pub fn new(
        config: &Config,
        base: Base,
        model: &Model,
        limit: Limit,
        beside: Beside,
        measured: Option<Measured>,
        corpus: &Corpus,
        sample: Option<Sampled>,
        mut steps: Steps,
        left_out_records: usize,
        speed: Option<Speed>,
        schedules: Vec<Schedule>,
    ) -> Self {
        let adapter_bytes = model.lora.parameters() * size_of::<f32>();
        let checkpoint_bytes = CHECKPOINT_VALUES * adapter_bytes;
        let kept = |saved: &[u64]| kept_at_once(saved, &config.checkpoint, config.eval.every_steps.is_some());
        // Without a schedule, as many as stay if every step is saved, where that does not depend on how many steps there are.
        let every_step: Vec<u64> = (1..=steps.optimiser_steps as u64).collect();
        let most =
            config.checkpoint.keep_last.filter(|_| config.checkpoint.keep_every.is_none()).map(|_| kept(&every_step));
        let most = schedules.iter().map(|schedule| kept(&schedule.checkpoints)).max().or(most);
        let checkpoints_bytes = most.map(|most| most * checkpoint_bytes);
        let adapter_bytes = if config.export.adapter { adapter_bytes } else { 0 };
        let merged_bytes = if config.export.merged { base.disk_bytes } else { 0 };
        let disk = Disk {
            source: Source::Computed,
            encode_cache_bytes: sample.map_or(corpus.encoded_bytes(), |of| {
                (corpus.encoded_bytes() as f64 * of.of_rows as f64 / of.rows.max(1) as f64) as usize
            }),
            checkpoint_bytes,
            checkpoints_bytes,
            adapter_bytes,
            merged_bytes,
            run_bytes: checkpoints_bytes.unwrap_or(checkpoint_bytes) + adapter_bytes + merged_bytes,
            free_bytes: free_disk_bytes(&config.run.root),
            free_source: Source::Measured,
            free_n: 1,
        };
        if sample.is_some() {
            steps.source = Source::Estimated;
        }
        let corpus = CorpusCost {
            source: if sample.is_some() { Source::Estimated } else { Source::Measured },
            sample,
            encoded_records: corpus.report.roots.iter().map(|root| root.records as usize).sum(),
            records: corpus.train.len(),
            held_out_records: corpus.held_out.len(),
            left_out_records,
            sampler: config.plugins.sampler.clone(),
            padding_share: 1.0 - steps.tokens as f64 / steps.padded_tokens.max(1) as f64,
            truncation: corpus.report.clone(),
        };
        let adapters = Adapters::new(model, base.parameters);
        let memory = MemoryReport::new(config, model, limit, steps.largest_micro_batch_tokens, beside);
        Self { base, adapters, memory, measured, steps, corpus, speed, schedules, disk }
    }

    /// Whether the run fits, as far as that is known.
    ///
    /// # Errors
    /// `gate::free_memory`, `gate::free_disk`.
    pub fn require_fit(&self) -> Result<()> {
        let MemoryReport { planned, run, limit, .. } = &self.memory;
        if run.fits != Some(false) {
            return self.disk.require_fit();
        }
        let (what, help) = match run.of {
            "evaluation" => ("the evaluation of held-out records".into(), "eval.max_records_per_root = 0 turns it off"),
            "export" => (
                "the merged model's export".into(),
                "export.merged = false leaves it out; tunehost export RUN writes one on a machine with more",
            ),
            _ => (
                format!("the largest planned micro-batch, {} tokens,", planned.shape.tokens()),
                "train.recompute_granularity = \"full\", fewer rows (train.micro_batch) or shorter records \
                 (data.max_seq_len) take less",
            ),
        };
        let message = format!(
            "{what} takes {} at its peak, and the device has {} ({})",
            bytes(run.peak_bytes),
            bytes(limit.bytes.unwrap_or_default()),
            limit.source.map_or("", Source::name)
        );
        let error = Error::new("gate::free_memory", message).expected("a peak within the device's memory");
        Err(error.help(help).help("model.weights = \"bf16\" takes two bytes a parameter"))
    }

    /// The adapters as a table.
    pub fn adapter_table(&self) -> &str {
        &self.adapters.table
    }
}
