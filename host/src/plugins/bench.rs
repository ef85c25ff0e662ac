//! What a plugin's calls cost, measured on this machine.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::check::inputs;
use super::schema::Schema;
use super::{
    CaseFile, CheckpointScheduler, CorpusFilter, Description, Eligibility, Exporter, Kind, PlanRequest, PluginRef,
    Sampler, StepInfo,
};
use crate::error::Result;
use crate::model::lora::group;
use crate::plan::Spread;

/// Steps after which a scheduler is asked.
const SCHEDULER_CALLS: u32 = 100_000;

/// A call and how long it took.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// What was called.
    pub what: String,
    /// Of its repetitions; of many quick calls, one mean.
    pub us: Spread,
}

impl Measurement {
    fn of(what: &str, durations: &[Duration]) -> Self {
        let us: Vec<f64> = durations.iter().map(|duration| duration.as_secs_f64() * 1e6).collect();
        Self { what: what.into(), us: Spread::of(&us).expect("it was called") }
    }
}

/// Measure a plugin with the settings `config`, or the least that fit its schema. Its code is compiled and cached first.
///
/// # Errors
/// Class `plugin`: whatever a call meets.
pub fn bench(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let schema = Schema::parse(&Description::of(plugin)?.config_schema);
    let config = config.cloned().or_else(|| schema.ok().map(|schema| schema.minimal()));
    let config = config.as_ref();
    match plugin.identity().kind {
        Kind::Sampler => sampler(plugin, config),
        Kind::CheckpointScheduler => scheduler(plugin, config),
        Kind::CorpusFilter => filter(plugin, config),
        Kind::Eligibility => eligibility(plugin, config),
        Kind::Exporter => exporter(plugin, config),
    }
}

fn sampler(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let mut measured = vec![median("ready, its code cached", 5, || Sampler::load(plugin, config).map(drop))?];
    let mut sampler = Sampler::load(plugin, config)?;
    for (count, name, repetitions) in [(20_000, "plan 20,000 records", 9), (1_000_000, "plan 1,000,000 records", 3)] {
        let (lengths, roots) = (inputs::skewed(count, 16_384), inputs::roots(count));
        let request = PlanRequest {
            lengths: &lengths,
            roots: &roots,
            epoch: 0,
            seed: 42,
            max_seq_len: 16_384,
            rows_per_batch: 2,
            accumulation: 8,
            token_budget: None,
        };
        measured.push(median(name, repetitions, || sampler.plan(&request).map(drop))?);
    }
    Ok(measured)
}

fn scheduler(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let load = || CheckpointScheduler::load(plugin, config);
    let mut measured = vec![median("ready, its code cached", 5, || load().map(drop))?];
    let mut scheduler = load()?;
    let start = Instant::now();
    for step in 1..=u64::from(SCHEDULER_CALLS) {
        scheduler.after_step(&StepInfo {
            step,
            total_steps: SCHEDULER_CALLS.into(),
            wall_clock_ms: 1_700_000_000_000 + step * 1000,
            since_last_save_ms: step * 1000 % 900_000,
            last_save_cost_ms: 900,
            loss: 2.5,
        })?;
    }
    let what = format!("after-step, mean of {}", group(SCHEDULER_CALLS as usize));
    measured.push(Measurement::of(&what, &[start.elapsed() / SCHEDULER_CALLS]));
    Ok(measured)
}

fn filter(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let mut measured = vec![median("ready, its code cached", 5, || CorpusFilter::load(plugin, config).map(drop))?];
    let mut filter = CorpusFilter::load(plugin, config)?;
    let records = inputs::records(20_000);
    let candidates: Vec<_> = records.iter().map(inputs::Record::candidate).collect();
    let mut judge = || {
        let mut first = 0;
        candidates.chunks(4096).try_for_each(|chunk| {
            filter.filter(first, chunk)?;
            first += chunk.len() as u64;
            Ok(())
        })
    };
    measured.push(median("filter 20,000 records", 5, &mut judge)?);
    // Fifty such corpora, one after the other: what a million records cost without holding them all.
    let start = Instant::now();
    (0..50).try_for_each(|_| judge())?;
    measured.push(Measurement::of("filter 1,000,000 records", &[start.elapsed()]));
    Ok(measured)
}

fn eligibility(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let load = || Eligibility::load(plugin, config);
    let mut measured = vec![median("ready, its code cached", 5, || load().map(drop))?];
    let (mut eligibility, case) = (load()?, CaseFile::default());
    measured.push(median("rule, nothing to override", 101, || eligibility.rule(&case).map(drop))?);
    Ok(measured)
}

fn exporter(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Measurement>> {
    let load = || Exporter::load(plugin, config);
    let mut measured = vec![median("ready, its code cached", 5, || load().map(drop))?];
    let mut exporter = load()?;
    for (tensors, what) in [(657, "plan 657 tensors"), (20_000, "plan 20,000 tensors")] {
        let tuned = inputs::tuned(tensors, 3);
        measured.push(median(what, 9, || exporter.plan(&tuned).map(drop))?);
    }
    Ok(measured)
}

fn median(what: &str, repetitions: usize, mut call: impl FnMut() -> Result<()>) -> Result<Measurement> {
    let mut durations = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let start = Instant::now();
        call()?;
        durations.push(start.elapsed());
    }
    Ok(Measurement::of(what, &durations))
}

/// The measurements as aligned lines.
pub fn text(measured: &[Measurement]) -> String {
    let line = |m: &Measurement| format!("{:28} {} us\n", m.what, m.us);
    format!("measured: median (least to most, n)\n{}", measured.iter().map(line).collect::<String>())
}

/// The measurements as a JSON array of objects.
pub fn json(measured: &[Measurement]) -> Value {
    json!(measured)
}
