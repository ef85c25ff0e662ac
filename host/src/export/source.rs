//! What is exported: the tune of a run, or an adapter, with its base and the records to judge by.

use super::proof::OnDisk;
use crate::config::{Config, DataConfig};
use crate::corpus::{self, Corpus, EncodeOptions, Encoder, Record};
use crate::error::{Error, Result};
use crate::hash::FileHash;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::lora::LoraPlan;
use crate::model::peft;
use crate::model::spec::ModelSpec;
use crate::plugins::{CorpusFilter, Kind, PluginRef};
use crate::report::Reporter;
use crate::run::changes::configuration;
use crate::run::checkpoint::newest_whole;
use crate::run::folder::{CHECKPOINTS, EXPORT, PROVENANCE};
use crate::run::provenance::Provenance;
use crate::train::state::ADAPTER_FILE;
use burn::tensor::Device;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Records that scales are searched on.
const TRAINING_RECORDS: usize = 32;

/// A tune that can be exported.
pub struct Tune {
    /// The base on disk.
    pub checkpoint: Checkpoint,
    /// The base's shape.
    pub config: TextConfig,
    /// The base's tensors.
    pub spec: ModelSpec,
    /// What was trained.
    pub adapter: Adapter,
    /// The chat template that was trained with.
    pub template: Option<String>,
    /// The records to judge by, which nothing was trained on.
    pub records: Vec<Record>,
    /// Some of those that were trained on.
    pub training: Vec<Record>,
    /// The run; none where an adapter is exported.
    pub run_id: Option<String>,
    /// What the reader of the report should know before trusting it.
    pub warnings: Vec<String>,
}

/// What a command line says beside the folder.
#[derive(Debug, Default)]
pub struct Wanted<'a> {
    /// The base, where it is not the one that the adapter names.
    pub base: Option<&'a Path>,
    /// Files of records to judge by.
    pub data: &'a [PathBuf],
    /// Files of records to search scales on.
    pub training: &'a [PathBuf],
    /// Chat template for `messages`: a file, or `base`.
    pub template: Option<&'a str>,
}

impl Tune {
    /// The tune in `folder`: a run folder, or an adapter as PEFT writes it.
    ///
    /// # Errors
    /// `export::not_a_tune`, `export::other_base`, `export::other_input`, `export::no_adapter`, `export::no_records`, and those of base, adapter and
    /// corpus.
    pub fn open(folder: &Path, wanted: &Wanted, device: &Device, reporter: &Reporter) -> Result<Self> {
        if folder.join(PROVENANCE).exists() {
            Self::of_run(folder, wanted, device, reporter)
        } else if folder.join(peft::CONFIG_FILE).exists() {
            Self::of_adapter(folder, wanted, device, reporter)
        } else {
            let what = if folder.is_dir() { "is neither a run nor an adapter" } else { "is no folder" };
            Err(Error::new("export::not_a_tune", format!("{} {what}", folder.display()))
                .expected(format!("a folder with {PROVENANCE}, or with {}", peft::CONFIG_FILE))
                .help("name a run folder, such as runs/NAME-001, or the folder of an adapter that PEFT saved"))
        }
    }

    /// The model that was tuned, without and with what was trained.
    pub fn on_disk(&self, tuned: bool) -> OnDisk<'_> {
        let adapter = tuned.then_some(&self.adapter);
        OnDisk { checkpoint: &self.checkpoint, config: &self.config, adapter }
    }

    fn of_run(run: &Path, wanted: &Wanted, device: &Device, reporter: &Reporter) -> Result<Self> {
        let provenance = Provenance::read(run)?;
        let (resolved, _) = configuration(run, &provenance, &[])?;
        let base = wanted.base.unwrap_or(&resolved.config.model.base);
        reporter.line(format!("base        {}, compared byte for byte with what the run read", base.display()));
        refuse_other_base(&provenance, base)?;
        let config = TextConfig::read(base)?;
        let checkpoint = Checkpoint::open(base)?;
        let (spec, _) = ModelSpec::check(&config, &checkpoint.shapes())?;
        let mut warnings = Vec::new();
        let written = run.join(EXPORT).join("adapter");
        let adapter = if written.join(peft::CONFIG_FILE).exists() {
            refuse_other_adapter(&provenance, run)?;
            peft::read(&written, &spec, device)?
        } else {
            let Some((path, saved)) = newest_whole(&run.join(CHECKPOINTS))?.checkpoint else {
                return Err(Error::new("export::no_adapter", format!("{} has saved nothing yet", run.display()))
                    .expected("a run with a checkpoint")
                    .help(format!("continue it first: tunehost resume {}", run.display())));
            };
            warnings.push(format!("the run is not complete: its newest checkpoint, {}, is exported", path.display()));
            let bytes = saved.files.get(ADAPTER_FILE).map(Vec::as_slice).unwrap_or_default();
            let tensors = peft::read_tensors(bytes, &path.join(ADAPTER_FILE))?;
            Adapter::from_tensors(LoraPlan::new(&resolved.config.lora, &spec)?, tensors, device)?
        };
        let mut data = resolved.config.data.clone();
        data.template = wanted.template.map(String::from).or(data.template);
        let options = EncodeOptions::of(&data, &resolved.config.template);
        let encoder =
            Encoder::open(base, data.template.as_deref(), config.vocab_size, options).map_err(|e| match e.code() {
                "io::failed" => e.help("the template that was trained with may lie elsewhere: --template FILE"),
                _ => e,
            })?;
        let mut template = encoder.template().map(|template| template.info().source.clone());
        match (&provenance.inputs.template, encoder.template()) {
            (Some(recorded), Some(template)) => {
                let help = "put the template back that was trained with, or say where it is: --template FILE";
                refuse_other("export::other_input", recorded, &template.info().file_hash(), help)?;
            }
            // What only judges is no part of the export.
            _ => template = None,
        }
        let given = |files: &[PathBuf]| (!files.is_empty()).then(|| encode(&encoder, files)).transpose();
        let corpus = || corpus_of(&resolved.config, &data, base, config.vocab_size, &provenance);
        let (records, training) = match (given(wanted.data)?, given(wanted.training)?) {
            (Some(records), Some(training)) => (records, training),
            (Some(records), None) => {
                let training = corpus().map(|corpus| corpus.train).unwrap_or_else(|e| {
                    let without =
                        "the corpus of the run is not compared with what it recorded, and no scale is searched on it";
                    warnings.push(format!("{}: {without}", e.message()));
                    Vec::new()
                });
                (records, training)
            }
            (None, training) => {
                let corpus = corpus()?;
                let records = corpus.evaluation(resolved.config.eval.max_records_per_root).into_iter().cloned();
                (records.collect(), training.unwrap_or(corpus.train))
            }
        };
        if !wanted.data.is_empty() {
            warnings.extend(trained_too(&records, &training));
        }
        let training = spread(&training, TRAINING_RECORDS);
        let run_id = Some(provenance.run_id);
        Self { checkpoint, config, spec, adapter, template, records, training, run_id, warnings }.checked(reporter)
    }

    fn of_adapter(dir: &Path, wanted: &Wanted, device: &Device, reporter: &Reporter) -> Result<Self> {
        let base = match wanted.base {
            Some(base) => base.to_path_buf(),
            None => peft::base_of(dir)?,
        };
        // as a run lays it out: <run>/export/adapter
        if let Some(run) = dir.parent().and_then(Path::parent).filter(|run| run.join(PROVENANCE).is_file()) {
            refuse_other_base(&Provenance::read(run)?, &base)?;
        }
        let config = TextConfig::read(&base)?;
        let checkpoint = Checkpoint::open(&base)?;
        let (spec, _) = ModelSpec::check(&config, &checkpoint.shapes())?;
        let adapter = peft::read(dir, &spec, device)?;
        let encoder = Encoder::open(&base, wanted.template, config.vocab_size, EncodeOptions::default())?;
        let template = encoder.template().map(|template| template.info().source.clone());
        let (records, training) = (encode(&encoder, wanted.data)?, encode(&encoder, wanted.training)?);
        let warnings = trained_too(&records, &training).into_iter().collect();
        let training = spread(&training, TRAINING_RECORDS);
        Self { checkpoint, config, spec, adapter, template, records, training, run_id: None, warnings }
            .checked(reporter)
    }

    fn checked(self, reporter: &Reporter) -> Result<Self> {
        self.warnings.iter().for_each(|warning| reporter.warn(warning));
        if let Some(format) = self.checkpoint.quantized_as() {
            let message = format!("the base {} is quantised as {format}", self.checkpoint.dir().display());
            return Err(Error::new("model::quantization", message).expected("the base in BF16, F16 or F32"));
        }
        if self.records.is_empty() {
            return Err(Error::new("export::no_records", "there is no record to judge the export by")
                .expected("held-out records: an export is compared with base and tuned model on them")
                .help("name a file of records that nothing was trained on: --data held-out.jsonl"));
        }
        Ok(self)
    }
}

/// The files of the base must be those that the run read.
fn refuse_other_base(provenance: &Provenance, base: &Path) -> Result<()> {
    let inputs = &provenance.inputs;
    let files = inputs.base.iter().map(|(name, recorded)| (base.join(name), recorded));
    let tokenizer = inputs.tokenizer.iter().map(|recorded| (base.join("tokenizer.json"), recorded));
    for (path, recorded) in files.chain(tokenizer) {
        let help = "name the base that was tuned: --base DIR";
        let now = FileHash::of(&path).map_err(|e| e.help(help))?;
        refuse_other("export::other_base", recorded, &now, help)?;
    }
    Ok(())
}

/// The adapter that a run exported must be as it recorded it.
fn refuse_other_adapter(provenance: &Provenance, run: &Path) -> Result<()> {
    let exported = provenance.outcome.iter().flat_map(|outcome| &outcome.exports);
    let adapter = Path::new(EXPORT).join("adapter");
    for (path, recorded) in exported.filter(|(path, _)| path.starts_with(&adapter)) {
        let help = format!("move {} away: the run's newest checkpoint is exported then", run.join(&adapter).display());
        let now = FileHash::of(&run.join(path)).map_err(|e| e.help(&help))?;
        refuse_other("export::other_input", recorded, &now, &help)?;
    }
    Ok(())
}

/// The corpus of a run, whose files must be those that it read: in others the records that were trained on may be held out.
fn corpus_of(
    config: &Config,
    data: &DataConfig,
    base: &Path,
    vocab_size: usize,
    provenance: &Provenance,
) -> Result<Corpus> {
    let settings = config.plugins.config.get(Kind::CorpusFilter.config_key());
    let mut filter = CorpusFilter::load(&PluginRef::configured(Kind::CorpusFilter, &config.plugins)?, settings)?;
    let help = "put the corpus back, or name records that nothing was trained on: --data FILE";
    let corpus = corpus::load(data, &config.template, base, vocab_size, &mut filter, &mut |_, _| {});
    let corpus = corpus.map_err(|e| e.help(help))?;
    for (recorded, file) in provenance.inputs.corpus.iter().zip(&corpus.files) {
        refuse_other("export::other_input", recorded, &file.file_hash(), help)?;
    }
    Ok(corpus)
}

fn refuse_other(code: &'static str, recorded: &FileHash, now: &FileHash, help: &str) -> Result<()> {
    if now.sha256 == recorded.sha256 {
        return Ok(());
    }
    let message = format!("{} is not as the run recorded it: its sha256 is {}", now.path.display(), now.sha256);
    Err(Error::new(code, message).expected(format!("{}, as the run recorded", recorded.sha256)).help(help))
}

fn encode(encoder: &Encoder, files: &[PathBuf]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for file in files {
        records.extend(corpus::encode_for_scoring(encoder, file)?);
    }
    Ok(records)
}

/// How many of the `records` to judge by have the very tokens of one of `training`, where some have.
fn trained_too(records: &[Record], training: &[Record]) -> Option<String> {
    let judged: HashSet<Vec<u32>> = records.iter().map(|record| record.tokens.ids()).collect();
    let trained: HashSet<Vec<u32>> =
        training.iter().map(|record| record.tokens.ids()).filter(|ids| judged.contains(ids)).collect();
    let (count, total) =
        (records.iter().filter(|record| trained.contains(&record.tokens.ids())).count(), records.len());
    let said =
        format!("{count} of the {total} records to judge by were trained, or searched on: they are not held out");
    (count > 0).then_some(said)
}

/// At most `count` of `records`, evenly spread.
fn spread(records: &[Record], count: usize) -> Vec<Record> {
    let step = records.len().div_ceil(count).max(1);
    records.iter().step_by(step).cloned().collect()
}
