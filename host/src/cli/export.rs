//! `tunehost export`.

use super::{OutputArgs, WeightsArg};
use crate::config::parse_settings;
use crate::device;
use crate::error::{Error, Result};
use crate::export::source::{Tune, Wanted};
use crate::export::{self, Judge, OnDisk, PendingFolder, Proof, SearchReport, Verdict};
use crate::hash::FileHash;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::peft;
use crate::plugins::{Exporter, Identity, Kind, PluginRef};
use crate::report::{Reporter, bytes};
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What is said of the export, beside its files.
const REPORT: &str = "export.json";

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The tune: a run folder, or an adapter folder as PEFT or tunehost writes it.
    tune: PathBuf,
    /// The plugin that lays out the export: merge-bf16, merge-then-quantize, peft-adapter, or the path of a .wasm file.
    #[arg(long, value_name = "PLUGIN", default_value = "merge-bf16")]
    exporter: String,
    /// One setting of that plugin: --set scheme=nvfp4a16. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// The folder to write; it must not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base that was tuned, where it is not the one that the run or the adapter names.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Records to judge by, which nothing was trained on; of a run without it, its held-out records. May be repeated.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// For an adapter: records to search the scales of a quantised export on, which may be trained ones. May be repeated.
    #[arg(long, value_name = "FILE")]
    training_data: Vec<PathBuf>,
    /// Chat template for `messages` in those files: a file, or the word `base` for the one in the model folder.
    #[arg(long, value_name = "PATH")]
    template: Option<String>,
    /// The export fails under this part of the gain: (base - export) / (base - tuned).
    #[arg(long, value_name = "PART", default_value_t = 0.8)]
    min_retained_gain: f64,
    /// Device to judge on: cpu, or wgpu in a build with that feature.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// How matrices are kept and multiplied to judge by.
    #[arg(long, value_enum, default_value = "f32")]
    weights: WeightsArg,
    /// Also look for the plugin in this folder, before the bundled plugins. May be repeated.
    #[arg(long, value_name = "DIR")]
    search_path: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn export(args: &ExportArgs) -> Result<()> {
    let mut reporter = args.output.reporter();
    if !(0.0..=1.0).contains(&args.min_retained_gain) {
        let message = format!("--min-retained-gain is {}", args.min_retained_gain);
        return Err(Error::new("usage::invalid_value", message).expected("0 to 1"));
    }
    let pending = PendingFolder::new(&args.out)?;
    let settings = parse_settings(&args.sets)?;
    let plugin = PluginRef::resolve(Kind::Exporter, &args.exporter, &args.search_path)?;
    let mut exporter = Exporter::load(&plugin, Some(&settings))?;
    let device = device::open(&args.device)?;
    let wanted = Wanted {
        base: args.base.as_deref(),
        data: &args.data,
        training: &args.training_data,
        template: args.template.as_deref(),
    };
    let tune = Tune::open(&args.tune, &wanted, &device, &reporter)?;
    device::check(&args.device, args.weights.into(), &tune.config)?;
    let judge = Judge { device: &device, weights: args.weights.into() };

    let tuned = export::tuned(&tune.adapter, &tune.spec, &tune.checkpoint, tune.template.as_deref())?;
    let plan = exporter.plan(&tuned)?;
    reporter.line(format!("exporter    {}", exporter.identity()));
    let mut search = None;
    export::carry_out(&plan, &tune.adapter, &tune.checkpoint, &pending, &mut |weights| {
        let total = tune.config.layers.len();
        let progress = &mut |done| reporter.progress("layers whose scales are chosen", done, total);
        search = export::search_scales(&judge, &tune, weights, progress)?;
        Ok(())
    })?;
    reporter.finish_steps();
    if let Some(search) = &search {
        reporter.line(format!("scales      {search}"));
    }
    let files = hashes(pending.temporary())?;
    let written = files.values().map(|file| file["bytes"].as_u64().unwrap_or_default()).sum::<u64>();
    reporter.line(format!("written     {} in {} files", bytes(written as usize), files.len()));

    let proof = prove(&judge, &tune, pending.temporary(), args.min_retained_gain, &mut reporter)?;
    reporter.finish_steps();
    let report = report(args, &tune, exporter.identity(), &settings, &files, search.as_ref(), &proof);
    pending.write(REPORT, format!("{report:#}\n").as_bytes())?;
    pending.commit()?;
    say(&proof, args, &reporter);
    reporter.event("export", report);
    judged(&proof, args)
}

/// Judges the files in `dir`, as they were written.
fn prove(judge: &Judge, tune: &Tune, dir: &Path, min_retained_gain: f64, reporter: &mut Reporter) -> Result<Proof> {
    let records: Vec<_> = tune.records.iter().collect();
    let (base, tuned) = (tune.on_disk(false), tune.on_disk(true));
    let mut judge_with = |export: OnDisk| {
        let models = [base, tuned, export];
        let total = Judge::layers(models);
        judge.prove(models, &records, min_retained_gain, &mut |done| reporter.progress("layers judged", done, total))
    };
    if dir.join(peft::CONFIG_FILE).exists() {
        let adapter = peft::read(dir, &tune.spec, judge.device)?;
        return judge_with(OnDisk { adapter: Some(&adapter), ..base });
    }
    let (checkpoint, config) = (Checkpoint::open(dir)?, TextConfig::read(dir)?);
    judge_with(OnDisk { checkpoint: &checkpoint, config: &config, adapter: None })
}

fn hashes(dir: &Path) -> Result<BTreeMap<String, Value>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(|e| Error::io("list", dir, e))? {
        let path = entry.map_err(|e| Error::io("list", dir, e))?.path();
        let hash = FileHash::of(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(name, json!({"bytes": hash.bytes, "sha256": hash.sha256}));
    }
    Ok(files)
}

#[allow(clippy::too_many_arguments)] // what the report consists of
fn report(
    args: &ExportArgs,
    tune: &Tune,
    exporter: &Identity,
    settings: &Value,
    files: &BTreeMap<String, Value>,
    search: Option<&SearchReport>,
    proof: &Proof,
) -> Value {
    json!({
        "schema": 1,
        "program": env!("CARGO_PKG_VERSION"),
        "exporter": {"name": exporter.name, "version": exporter.version, "sha256": exporter.sha256, "settings": settings},
        "run": tune.run_id,
        "base": tune.checkpoint.dir(),
        "files": files,
        "judged_with": {"device": args.device, "weights": crate::config::WeightDtype::from(args.weights).name()},
        "scales": search,
        "min_retained_gain": args.min_retained_gain,
        "proof": proof,
    })
}

fn say(proof: &Proof, args: &ExportArgs, reporter: &Reporter) {
    let Proof { records, tokens, base, tuned, export, kl, standard_error, retained_gain, .. } = proof;
    let error = standard_error.map_or("n/a".into(), |error| format!("{error:.4}"));
    reporter.result(format!("judged      {records} held-out records, {tokens} trained tokens; losses in nats a token"));
    reporter.result(format!("  base                {base:.4}"));
    reporter.result(format!("  base + adapter      {tuned:.4}  (gain {:.4}, s.e. {error})", base - tuned));
    reporter.result(format!("  export              {export:.4}  (KL to base + adapter {kl:.5})"));
    let retained = retained_gain.map_or("n/a".into(), |part| format!("{:.1}%", 100.0 * part));
    reporter.result(format!("  retained gain       {retained}"));
    reporter.result(format!("export      {}", args.out.display()));
}

/// An error where the export does not hold what was tuned. Its files stay, and its report says so.
fn judged(proof: &Proof, args: &ExportArgs) -> Result<()> {
    let out = args.out.display();
    let retained = proof.retained_gain.map_or(0.0, |part| 100.0 * part);
    let error = match proof.verdict {
        Verdict::Passed => return Ok(()),
        Verdict::Failed => {
            Error::new("export::gain_lost", format!("{out} retains {retained:.1}% of what was tuned"))
                .expected(format!("at least {:.1}%, as --min-retained-gain says", 100.0 * args.min_retained_gain))
                .help("use a scheme with more bits, or merge-bf16")
        }
        Verdict::NoMeasurableGain => Error::new("export::no_measurable_gain", format!("{out}: no measurable gain"))
            .expected("a loss of base + adapter that is lower than the base's by more than two standard errors")
            .help("judge on more records with --data, or tune longer; the files are written, and nothing is known of them"),
        Verdict::EqualToTheBase => {
            Error::new("export::equal_to_base", format!("{out} answers as the base does, to the last bit"))
                .expected("a model that differs from its base")
                .help("the adapter changes nothing, or the update was rounded away")
        }
    };
    Err(error.help(format!("{REPORT} says so too")))
}
