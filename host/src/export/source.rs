//! What is exported: the tune of a run, or an adapter, with its base and the records to judge by.

use super::proof::OnDisk;
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
            Self::of_adapter(folder, wanted, device)
        } else {
            Err(Error::new("export::not_a_tune", format!("{} is neither a run nor an adapter", folder.display()))
                .expected(format!("a folder with {PROVENANCE}, or with {}", peft::CONFIG_FILE)))
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
        refuse_other_base(&provenance, base)?;
        if let Some(recorded) = &provenance.inputs.tokenizer {
            refuse_other(
                "export::other_base",
                recorded,
                &FileHash::of(&base.join("tokenizer.json"))?,
                "name the base that was tuned with --base",
            )?;
        }
        let config = TextConfig::read(base)?;
        let checkpoint = Checkpoint::open(base)?;
        let (spec, _) = ModelSpec::check(&config, &checkpoint.shapes())?;
        let written = run.join(EXPORT).join("adapter");
        let adapter = if written.join(peft::CONFIG_FILE).exists() {
            peft::read(&written, &spec, device)?
        } else {
            let Some((path, saved)) = newest_whole(&run.join(CHECKPOINTS))?.checkpoint else {
                return Err(Error::new("export::no_adapter", format!("{} has saved nothing yet", run.display()))
                    .expected("a run with a checkpoint")
                    .help(format!("continue it first: tunehost resume {}", run.display())));
            };
            reporter.warn(format!("the run is not complete: its newest checkpoint, {}, is exported", path.display()));
            let bytes = saved.files.get(ADAPTER_FILE).map(Vec::as_slice).unwrap_or_default();
            let tensors = peft::read_tensors(bytes, &path.join(ADAPTER_FILE))?;
            Adapter::from_tensors(LoraPlan::new(&resolved.config.lora, &spec)?, tensors, device)?
        };
        let plugins = &resolved.config.plugins;
        let settings = plugins.config.get(Kind::CorpusFilter.config_key());
        let mut filter = CorpusFilter::load(&PluginRef::configured(Kind::CorpusFilter, plugins)?, settings)?;
        let data = &resolved.config.data;
        let options = EncodeOptions::of(data, &resolved.config.template);
        let mut ignore = |_, _| {};
        let corpus = corpus::load(data, &resolved.config.template, base, config.vocab_size, &mut filter, &mut ignore)?;
        refuse_other_corpus(&provenance, &corpus, wanted.data.is_empty())?;
        let template = corpus.template.as_ref().map(|template| template.source.clone());
        let records = match wanted.data {
            [] => corpus.evaluation(resolved.config.eval.max_records_per_root).into_iter().cloned().collect(),
            files => {
                let template = wanted.template.or(data.template.as_deref());
                encode(base, template, config.vocab_size, options, files)?.1
            }
        };
        let training = spread(&corpus.train, TRAINING_RECORDS);
        let run_id = Some(provenance.run_id);
        Self { checkpoint, config, spec, adapter, template, records, training, run_id }.checked()
    }

    fn of_adapter(dir: &Path, wanted: &Wanted, device: &Device) -> Result<Self> {
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
        let encode = |files| encode(&base, wanted.template, config.vocab_size, EncodeOptions::default(), files);
        let ((template, records), (_, training)) = (encode(wanted.data)?, encode(wanted.training)?);
        let training = spread(&training, TRAINING_RECORDS);
        Self { checkpoint, config, spec, adapter, template, records, training, run_id: None }.checked()
    }

    fn checked(self) -> Result<Self> {
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
    for (name, recorded) in &provenance.inputs.base {
        refuse_other(
            "export::other_base",
            recorded,
            &FileHash::of(&base.join(name))?,
            "name the base that was tuned with --base",
        )?;
    }
    Ok(())
}

/// The template must be the one that was trained with; where the export is `judged` by what the corpus holds out, so must its files:
/// in others the records that were trained on may be held out.
fn refuse_other_corpus(provenance: &Provenance, corpus: &Corpus, judged: bool) -> Result<()> {
    let inputs = &provenance.inputs;
    if let (Some(recorded), Some(template)) = (&inputs.template, &corpus.template) {
        refuse_other(
            "export::other_input",
            recorded,
            &template.file_hash(),
            "put the template back that was trained with",
        )?;
    }
    let files = inputs.corpus.iter().zip(&corpus.files).filter(|_| judged);
    for (recorded, file) in files {
        refuse_other(
            "export::other_input",
            recorded,
            &file.file_hash(),
            "put the corpus back, or name records that nothing was trained on: --data FILE",
        )?;
    }
    Ok(())
}

fn refuse_other(code: &'static str, recorded: &FileHash, now: &FileHash, help: &str) -> Result<()> {
    if now.sha256 == recorded.sha256 {
        return Ok(());
    }
    let message = format!("{} is not the file that the run read: its sha256 is {}", now.path.display(), now.sha256);
    Err(Error::new(code, message).expected(format!("{}, as the run recorded", recorded.sha256)).help(help))
}

/// The text of the template, and the records of `files`.
fn encode(
    base: &Path,
    template: Option<&str>,
    vocab_size: usize,
    options: EncodeOptions,
    files: &[PathBuf],
) -> Result<(Option<String>, Vec<Record>)> {
    let encoder = Encoder::open(base, template, vocab_size, options)?;
    let mut records = Vec::new();
    for file in files {
        records.extend(corpus::encode_for_scoring(&encoder, file)?);
    }
    Ok((encoder.template().map(|template| template.info().source.clone()), records))
}

/// At most `count` of `records`, evenly spread.
fn spread(records: &[Record], count: usize) -> Vec<Record> {
    let step = records.len().div_ceil(count).max(1);
    records.iter().step_by(step).cloned().collect()
}
