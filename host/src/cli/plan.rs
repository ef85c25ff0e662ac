//! `tunehost plan`.

use super::{ConfigArgs, corpus, print};
use crate::config::{Action, Config};
use crate::corpus::{Corpus, Sample};
use crate::error::{Error, Result};
use crate::job::{Policies, check_exporter, planned_steps};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::lora::LoraPlan;
use crate::model::spec::ModelSpec;
use crate::plan::memory::Model;
use crate::plan::phases::Beside;
use crate::plan::report::{Base, Limit, Report, Sampled};
use crate::plan::steps::{self, Speed};
use crate::plugins::{CheckpointScheduler, Kind, PluginRef};
use crate::run::clock::unix_ms_now;
use crate::run::machine::free_memory_bytes;
use crate::smoke::{self, Fingerprint, Found};
use crate::train::gates;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Memory of the device, such as 95.6GiB; without it, what is free on a CPU now.
    #[arg(long, value_name = "SIZE")]
    device_memory: Option<String>,
    /// What the device multiplies at most, TFLOP/s; with --utilisation, for times and checkpoints.
    #[arg(long, value_name = "TFLOPS", requires = "utilisation")]
    peak_tflops: Option<f64>,
    /// The share of it that a run is assumed to reach, or a band: --utilisation 0.1,0.25.
    #[arg(long, value_name = "SHARE", value_delimiter = ',', requires = "peak_tflops")]
    utilisation: Vec<f64>,
    /// What `smoke --out` wrote; without it, <run.root>/<name>.smoke.json, where it is there.
    #[arg(long, value_name = "FILE")]
    smoke: Option<PathBuf>,
    /// Encode the whole corpus. Without it, one of more than 64 MiB that the encode cache does not hold is estimated from a sample.
    #[arg(long)]
    exact: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Bytes of a corpus that are encoded in about three seconds.
const SAMPLE_BYTES: u64 = 16 << 20;

pub fn plan(args: &PlanArgs) -> Result<()> {
    let speed = args.peak_tflops.map(|peak| Speed::new(peak, args.utilisation.clone())).transpose()?;
    let stated = args.device_memory.as_deref().map(size_bytes).transpose()?;
    let config = args.config.load()?.config;
    let text = TextConfig::read(&config.model.base)?;
    let checkpoint = Checkpoint::open_trainable(&config.model.base)?;
    let found = checkpoint.shapes();
    let (spec, towers) = ModelSpec::check(&text, &found)?;
    gates::quantised(config.model.quantize, &spec, config.model.weights)?;
    let lora = LoraPlan::new(&config.lora, &spec)?;
    let base = Base::of(&spec, &towers, &found, |name| checkpoint.size_bytes(name), config.model.weights, &text);
    let limit = Limit::of(stated, free_memory_bytes(&config.model.device));

    let find = |kind: Kind| PluginRef::configured(kind, &config.plugins);
    let settings = |kind: Kind| config.plugins.config.get(kind.config_key());
    // All that a run loads: what one of them lacks is found here too, and their memory is part of the run's.
    let mut policies = Policies::load(&config.plugins, None)?;
    check_exporter(&config, &mut policies.exporter, &lora, &spec, &checkpoint)?;
    let scheduler = find(Kind::CheckpointScheduler)?;
    let load_scheduler = || CheckpointScheduler::load(&scheduler, settings(Kind::CheckpointScheduler));
    let (corpus, sample) = lengths(&config, args.exact)?;
    let (planned, dropped) = planned_steps(&config, &corpus, &mut policies.sampler)?;
    let model = Model::new(&config, &text, &spec, &lora);
    let counted = steps::steps(&model, &planned, &corpus.train);
    let held_out = corpus.evaluation(config.eval.max_records_per_root);
    let beside = Beside {
        evaluation: model.evaluation(&held_out, counted.largest_micro_batch_tokens),
        export: config.export.merged.then(|| model.export(&config, &spec, &checkpoint, &held_out)),
    };
    let start_ms = unix_ms_now();
    let place = args.smoke.clone().unwrap_or_else(|| smoke::path_of(&config));
    let kept = Found::at(&place, || Fingerprint::of(&config, &checkpoint, &lora))?;
    if let (Found::Nothing, Some(path)) = (&kept, &args.smoke) {
        let message = format!("there is no {}", path.display());
        return Err(Error::new("usage::smoke", message).expected("a file that tunehost smoke --out wrote"));
    }
    if let (Found::Unusable(why), Some(path)) = (&kept, &args.smoke) {
        let message = format!("{} is not used: {why}", path.display());
        return Err(Error::new("usage::smoke", message).expected("measurements of this run's shapes by this build"));
    }
    let measured = if let Found::Fresh(smoke) = &kept { smoke.paces(&counted) } else { Vec::new() };
    let assumed = speed.iter().flat_map(|speed| speed.paces(&counted));
    let schedules = measured
        .into_iter()
        .chain(assumed)
        .map(|pace| steps::schedule(&mut load_scheduler()?, &pace, start_ms))
        .collect::<Result<Vec<_>>>()?;

    // What a run would be refused for.
    let seen = match &kept {
        Found::Fresh(smoke) if config.gates.smoke == Action::Stop => {
            smoke.look(&place, counted.largest_micro_batch_tokens).map(|_| ())
        }
        _ => Ok(()),
    };
    let dropped = dropped.iter().map(|(_, ids)| ids.len()).sum();
    let measured = kept.for_plan(place);
    let report = Report::new(
        &config, base, &model, limit, beside, measured, &corpus, sample, counted, dropped, speed, schedules,
    );
    match args.json {
        true => print(&serde_json::to_string_pretty(&report).expect("numbers and names are JSON"))?,
        false => print(&report.to_string())?,
    }
    report.require_fit()?;
    seen
}

/// The corpus: all of it where it is small, where the encode cache holds it or `exact` says so, else as a sample has it.
fn lengths(config: &Config, exact: bool) -> Result<(Corpus, Option<Sampled>)> {
    let sample = if exact { None } else { Sample::take(&config.data, SAMPLE_BYTES)? };
    if let Some(sample) = sample {
        let corpus = corpus::load(&Config { data: sample.config.clone(), ..config.clone() })?;
        // Where the cache has every sampled record, it is taken to have all.
        if corpus.cache.is_none_or(|cache| cache.encoded > 0 || cache.found == 0) {
            let Sample { rows, of_rows, .. } = sample;
            return Ok((sample.spread(corpus), Some(Sampled { rows, of_rows })));
        }
    }
    Ok((corpus::load(config)?, None))
}

/// `95.6GiB` in bytes.
fn size_bytes(text: &str) -> Result<usize> {
    const UNITS: [(&str, f64); 8] = [
        ("TiB", (1u64 << 40) as f64),
        ("GiB", (1 << 30) as f64),
        ("MiB", (1 << 20) as f64),
        ("KiB", 1024.0),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
        ("B", 1.0),
    ];
    let bytes = UNITS.iter().find_map(|(unit, bytes)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        Some(number * bytes).filter(|bytes| *bytes >= 1.0 && *bytes < 1e18)
    });
    bytes.map(|bytes| bytes as usize).ok_or_else(|| {
        Error::new("usage::size", format!("cannot read `--device-memory {text}`"))
            .expected("a number and its unit (GiB, MiB, GB, ...), such as 95.6GiB")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!(size_bytes("95.6GiB").unwrap(), 102_649_718_374);
        assert_eq!(size_bytes("512 MB").unwrap(), 512_000_000);
        for wrong in ["95.6", "GiB", "-1GiB", "nanGiB", "1 gib", ""] {
            assert_eq!(size_bytes(wrong).unwrap_err().code(), "usage::size", "{wrong}");
        }
    }
}
