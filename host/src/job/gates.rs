//! The gates before anything long starts: the plan, what it takes, and what it is computed with.

use super::prepare::Prepared;
use crate::config::{Action, Config, WeightDtype};
use crate::corpus::Record;
use crate::device;
use crate::error::{Error, Result};
use crate::plan::memory::Model;
use crate::plugins::{CheckpointScheduler, Kind, PluginRef, StepInfo};
use crate::report::Reporter;
use crate::run::card::{Card, Holders};
use crate::run::checkpoint::own_folders;
use crate::run::clock::unix_ms_now;
use crate::run::folder::{CHECKPOINTS, EXPORT};
use crate::run::lease::DeviceLease;
use crate::run::machine::{free_disk_bytes, free_memory_bytes};
use crate::run::provenance::{GateRecord, Implementation, Verdict};
use crate::run::retention::kept_at_once;
use crate::smoke::{self, Fingerprint, Found};
use crate::train::gates::{self, Records, settle};
use crate::train::steps::Step;
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of a step's lines in the logs and in the manifest of the records, about, without the records.
const LINES_BYTES: usize = 400;
/// Bytes around an id in that manifest.
const ID_BYTES: usize = 4;

/// Keeps other runs off the device, as long as the lease lives, looks which other processes have it open, and writes that down.
///
/// # Errors
/// `device::in_use`, naming who has it.
pub fn take_device(config: &Config, records: &mut Records, reporter: &Reporter) -> Result<Option<DeviceLease>> {
    let (name, shared) = (&config.model.device, config.model.allow_shared);
    let card = device::card(name)?;
    // By its address, where it has one: it has several names.
    let lease = DeviceLease::take(card.as_ref().and_then(Card::pci).unwrap_or(name), shared)?;
    let Holders { processes, unseen } = card.map(|card| card.holders(&device::computing(&card))).unwrap_or_default();
    let by: Vec<String> = processes.iter().map(|(pid, process)| format!("{process} (pid {pid})")).collect();
    if !by.is_empty() && !shared {
        return Err(Error::new("device::in_use", format!("`{name}` is held by {}", by.join(", ")))
            .expected("a device that no other process has open")
            .help("end them, or wait until they end; --set model.allow_shared=true computes beside them"));
    }
    let action = if shared { Action::Warn } else { Action::Stop };
    let hidden = lease.as_ref().and_then(|lease| lease.hidden.as_ref());
    let (verdict, mut found) = match &lease {
        Some(_) if by.is_empty() => {
            let verdict = if hidden.is_some() { Verdict::Warned } else { Verdict::Passed };
            (verdict, format!("{name} is this run's alone"))
        }
        Some(_) => (Verdict::Warned, format!("{name} is shared with {}: model.allow_shared", by.join(", "))),
        None => (Verdict::Warned, format!("{name} is shared with another run: model.allow_shared")),
    };
    if unseen > 0 {
        found += &format!("; what {unseen} processes of other users have open could not be seen");
    }
    if let Some(why) = hidden {
        found += &format!("; the runs of other users do not see it: {why}");
    }
    if verdict == Verdict::Warned {
        reporter.warn(format!("gate device: {found}"));
    }
    records.insert("device".into(), GateRecord { action, verdict, found });
    Ok(lease)
}

/// Lets the gates look at a prepared run that will write into `folder`, which need not be there.
///
/// # Errors
/// Class `gate`: what one found that stops the run.
pub fn before_start(
    config: &Config,
    prepared: &Prepared,
    kernels: &BTreeMap<String, Implementation>,
    folder: &Path,
    records: &mut Records,
    reporter: &Reporter,
) -> Result<()> {
    let Prepared { corpus, steps, lora, checkpoint, .. } = prepared;
    let Config { gates: set, train, export, .. } = config;
    let mut look = |name: &str, action: Action, gate: &dyn Fn() -> Result<String>| {
        settle(records, name, action, gate).map(|warning| warning.iter().for_each(|text| reporter.warn(text)))
    };
    look("nothing_trained", set.nothing_trained, &|| gates::nothing_trained(steps, &corpus.train))?;
    look("tokens_per_step", set.tokens_per_step, &|| gates::tokens_per_step(steps, &corpus.train, train, set))?;
    look("single_root", set.single_root, &|| gates::single_root(steps, &corpus.train, &corpus.roots, set))?;
    look("kernels", set.kernels, &|| gates::kernels_as_asked(kernels))?;
    let base_bytes = checkpoint.entries().values().map(|e| e.size_bytes() as u64).sum();
    let left = |asked: bool, name: &str| asked && !folder.join(EXPORT).join(name).exists();
    let saved = saved_by_count(config, steps.len() as u64)?;
    let most = kept_at_once(&saved, &config.checkpoint, config.eval.every_steps.is_some());
    let there = own_folders(&folder.join(CHECKPOINTS)).map_or(0, |own| own.len());
    let (checkpoints, logs) = (most.saturating_sub(there).max(1), logs_bytes(steps, &corpus.train));
    let (adapter, merged) = (left(export.adapter, "adapter"), left(export.merged, "merged"));
    let disk = gates::least_disk(lora, checkpoints, logs, adapter, merged, base_bytes);
    look("free_disk", set.free_disk, &|| gates::free_disk(&disk, free_disk_bytes(folder)))?;
    look("smoke", set.smoke, &|| smoked(config, prepared, reporter))?;
    // A request for four bits stopped the run before its corpus was read.
    let format = if config.model.weights == WeightDtype::F32 { "f32" } else { "bf16 or f32" };
    let found = format!("no 4-bit weights were asked for: every one is kept in {format}");
    records.insert("quantize".into(), GateRecord { action: Action::Stop, verdict: Verdict::Passed, found });
    if let Some(template) = &corpus.template {
        // Another one than the base's stopped the run before its corpus was read, unless it was accepted.
        let accepted = config.template.accept_mismatch;
        let action = if accepted { Action::Warn } else { Action::Stop };
        let (verdict, found) = match (&template.base_sha256, template.differs_from_base()) {
            (None, _) => (Verdict::Passed, "the base ships no template to compare with".into()),
            (Some(_), false) => (Verdict::Passed, format!("the base's own, {}", template.sha256)),
            (Some(base), true) => {
                (Verdict::Warned, format!("{} is not the base's {base}: template.accept_mismatch", template.sha256))
            }
        };
        records.insert("template".into(), GateRecord { action, verdict, found });
    }
    if config.window.open.is_empty() { room(config, prepared, records, reporter) } else { Ok(()) }
}

/// The steps after which the run's scheduler saves by their count: those that it saves where no time passes. The last is saved in any
/// case, and all that is known of a scheduler that fails, which is for the run to tell.
///
/// # Errors
/// Those of starting it.
fn saved_by_count(config: &Config, total_steps: u64) -> Result<Vec<u64>> {
    let plugins = &config.plugins;
    let settings = plugins.config.get(Kind::CheckpointScheduler.config_key());
    let plugin = PluginRef::configured(Kind::CheckpointScheduler, plugins)?;
    let mut scheduler = CheckpointScheduler::load(&plugin, settings)?;
    let wall_clock_ms = unix_ms_now();
    let mut saved = Vec::new();
    for step in 1..total_steps {
        let info =
            StepInfo { step, total_steps, wall_clock_ms, since_last_save_ms: 0, last_save_cost_ms: 0, loss: 1.0 };
        match scheduler.after_step(&info) {
            Ok(decision) if decision.save => saved.push(step),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    saved.push(total_steps);
    Ok(saved)
}

/// What the logs of the steps take, and the manifest of their records.
fn logs_bytes(steps: &[Step], records: &[Record]) -> u64 {
    let id = |index: &u32| records[*index as usize].id.len() + ID_BYTES;
    let of =
        |step: &Step| LINES_BYTES + step.batches.iter().flat_map(|b| b.rows.iter().flatten()).map(id).sum::<usize>();
    steps.iter().map(of).sum::<usize>() as u64
}

/// What `tunehost smoke` measured of the run's shapes; what cannot be used is said.
///
/// # Errors
/// `gate::smoke` where it saw one fail.
fn smoked(config: &Config, prepared: &Prepared, reporter: &Reporter) -> Result<String> {
    let path = smoke::path_of(config);
    match Found::at(&path, || Fingerprint::of(config, &prepared.checkpoint, &prepared.lora))? {
        Found::Nothing => Ok(format!("nothing was measured: there is no {}", path.display())),
        Found::Unusable(why) => {
            let unused = format!("{} is not used: {why}", path.display());
            reporter.warn(&unused);
            Ok(unused)
        }
        Found::Fresh(smoke) => smoke.look(&path, largest_micro_batch(prepared)),
    }
}

/// Tokens of the largest planned micro-batch.
pub(super) fn largest_micro_batch(prepared: &Prepared) -> usize {
    let tokens = |step: &Step| step.batches.iter().map(|b| b.tokens(&prepared.corpus.train).0).max();
    prepared.steps.iter().filter_map(tokens).max().unwrap_or(0)
}

/// Lets the gate on the device's free memory look: with a `[window]`, once it has made room.
///
/// # Errors
/// `gate::free_memory`.
pub fn room(config: &Config, prepared: &Prepared, records: &mut Records, reporter: &Reporter) -> Result<()> {
    let Prepared { lora, spec, text, .. } = prepared;
    let Config { gates: set, model, .. } = config;
    // What this process holds is not free.
    let planned = Model { process_bytes: 0, ..Model::new(config, text, spec, lora) };
    let memory = gates::planned_memory(&planned, largest_micro_batch(prepared));
    let gate = || gates::free_memory(&memory, free_memory_bytes(&model.device));
    let warning = settle(records, "free_memory", set.free_memory, gate)?;
    warning.iter().for_each(|text| reporter.warn(text));
    Ok(())
}
