//! `tunehost export`.

use super::{OutputArgs, WeightsArg};
use crate::config::{WeightDtype, parse_settings};
use crate::device;
use crate::error::{Error, Result};
use crate::export::source::{Tune, Wanted};
use crate::export::{self, Judge, MIN_RETAINED_GAIN, Made, PendingFolder, QuantizedWeight, Trial};
use crate::plugins::{Exporter, Kind, PluginRef};
use crate::report::bytes;
use clap::Args;
use std::cell::RefCell;
use std::path::PathBuf;

/// The exporter where none is named.
const DEFAULT: &str = "merge-bf16";

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The tune: a run folder, or an adapter folder as PEFT or tunehost writes it.
    tune: PathBuf,
    /// The plugin that lays out the export: merge-bf16, merge-then-quantize, gguf, peft-adapter, or the path of a .wasm file.
    #[arg(long, value_name = "PLUGIN", default_value = DEFAULT)]
    exporter: String,
    /// One setting of that plugin: --set scheme=nvfp4a16. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// The folder to write; it must not exist, or be empty.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The base that was tuned, where it is not the one that the run or the adapter names.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Records to judge by, which nothing was trained on: a file, a folder or a glob; of a run without it, its held-out records. May be
    /// repeated.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// Records to search the scales of a quantised export on, which may be trained ones; of a run without it, those that it trained
    /// on. May be repeated.
    #[arg(long, value_name = "FILE")]
    training_data: Vec<PathBuf>,
    /// Chat template for `messages` in those files, and of a run the one that was trained with, where it lies elsewhere now: a file,
    /// or the word `base` for the one in the model folder.
    #[arg(long, value_name = "PATH")]
    template: Option<String>,
    /// The export fails under this part of the gain: (base - export) / (base - tuned).
    #[arg(long, value_name = "PART", default_value_t = MIN_RETAINED_GAIN)]
    min_retained_gain: f64,
    /// Device to judge on: cpu, wgpu or cuda:0, as the build has them.
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
    pending.remove_on_signal()?;
    let settings = parse_settings(&args.sets)?;
    let plugin = PluginRef::resolve(Kind::Exporter, &args.exporter, &args.search_path)?.set_by("--set KEY=VALUE");
    let mut exporter = Exporter::load(&plugin, Some(&settings)).map_err(|e| match args.exporter == DEFAULT {
        true => e.help(
            "merge-bf16 is what is not named; `scheme` is of --exporter merge-then-quantize, `type` of --exporter gguf",
        ),
        false => e,
    })?;
    let device = device::open(&args.device)?;
    let wanted = Wanted {
        base: args.base.as_deref(),
        data: &args.data,
        training: &args.training_data,
        template: args.template.as_deref(),
    };
    let tune = Tune::open(&args.tune, &wanted, &device, &reporter)?;
    device::check(&args.device, WeightDtype::from(args.weights).beside_f32(), WeightDtype::F32, &tune.config)?;
    let judge = Judge { device: &device, weights: args.weights.into() };

    let tuned = export::tuned(&tune.adapter, &tune.spec, &tune.checkpoint, tune.template.as_deref())?;
    let plan = exporter.plan(&tuned)?;
    reporter.line(format!("exporter    {}", exporter.identity()));
    plan.notes.iter().for_each(|note| reporter.line(format!("note        {note}")));
    let mut search = None;
    let shared = RefCell::new(&mut reporter);
    let mut choose = |weights: &[&QuantizedWeight]| {
        let total = tune.config.layers.len();
        let progress = &mut |done| shared.borrow_mut().progress("layers whose scales are chosen", done, total);
        search = export::search_scales(&judge, &tune, weights, progress)?;
        Ok(())
    };
    let mut written = |done, total| shared.borrow_mut().progress("bytes written", done, total);
    export::carry_out(&plan, &tune.adapter, &tune.checkpoint, &pending, &mut choose, &mut written)?;
    reporter.finish_steps();
    if let Some(search) = &search {
        reporter.line(format!("scales      {search}"));
    }
    let (files, written) = pending.size()?;
    reporter.line(format!("written     {} in {files} files", bytes(written)));

    let records: Vec<_> = tune.records.iter().collect();
    let trial = Trial {
        judge,
        device: &args.device,
        models: [tune.on_disk(false), tune.on_disk(true)],
        spec: &tune.spec,
        records: &records,
        min_retained_gain: args.min_retained_gain,
    };
    let notes = [&plan.notes[..], &tune.warnings].concat();
    let made = Made {
        exporter: exporter.identity(),
        settings: &settings,
        notes: &notes,
        search: search.as_ref(),
        run_id: tune.run_id.as_deref(),
    };
    let (proof, report) = export::judge(&pending, &trial, &made, &mut reporter)?;
    pending.commit()?;
    proof.lines().into_iter().for_each(|line| reporter.result(line));
    reporter.result(format!("export      {}", args.out.display()));
    reporter.event("export", report);
    proof.verdict_on(&args.out, args.min_retained_gain)
}
