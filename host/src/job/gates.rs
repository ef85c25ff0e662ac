//! The gates before anything long starts: the plan, what it takes, and what it is computed with.

use super::prepare::Prepared;
use crate::config::{Action, Config};
use crate::error::Result;
use crate::report::Reporter;
use crate::run::folder::EXPORT;
use crate::run::lease::DeviceLease;
use crate::run::machine::{free_disk_bytes, free_memory_bytes};
use crate::run::provenance::{GateRecord, Implementation, Verdict};
use crate::train::gates::{self, Records, settle};
use crate::train::steps::Step;
use std::collections::BTreeMap;
use std::path::Path;

/// Keeps other runs off the device, as long as the lease lives, and writes that down.
///
/// # Errors
/// `device::in_use`.
pub fn take_device(config: &Config, records: &mut Records, reporter: &Reporter) -> Result<Option<DeviceLease>> {
    let (name, shared) = (&config.model.device, config.model.allow_shared);
    let lease = DeviceLease::take(name, shared)?;
    let action = if shared { Action::Warn } else { Action::Stop };
    let (verdict, found) = match &lease {
        Some(_) => (Verdict::Passed, format!("{name} is this run's alone")),
        None => (Verdict::Warned, format!("{name} is shared with another run: model.allow_shared")),
    };
    if lease.is_none() {
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
    let disk = gates::least_disk(lora, left(export.adapter, "adapter"), left(export.merged, "merged"), base_bytes);
    look("free_disk", set.free_disk, &|| gates::free_disk(&disk, free_disk_bytes(folder)))?;
    // A request for four bits stopped the run before its corpus was read.
    let found = format!("no 4-bit weights were asked for: every one is kept in {} or f32", config.model.weights.name());
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

/// Lets the gate on the device's free memory look: with a `[window]`, once it has made room.
///
/// # Errors
/// `gate::free_memory`.
pub fn room(config: &Config, prepared: &Prepared, records: &mut Records, reporter: &Reporter) -> Result<()> {
    let Prepared { corpus, steps, lora, spec, text, .. } = prepared;
    let Config { gates: set, model, train, .. } = config;
    let tokens = |step: &Step| step.batches.iter().map(|b| b.tokens(&corpus.train).0).max();
    let largest = steps.iter().filter_map(tokens).max().unwrap_or(0);
    let memory = gates::least_memory(spec, model.weights, lora, text, train, largest);
    let gate = || gates::free_memory(&memory, free_memory_bytes(&model.device));
    let warning = settle(records, "free_memory", set.free_memory, gate)?;
    warning.iter().for_each(|text| reporter.warn(text));
    Ok(())
}
