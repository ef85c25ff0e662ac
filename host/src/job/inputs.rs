//! What a run reads and computes with, hashed and named for provenance.

use super::prepare::Prepared;
use crate::config::{ActivationDtype, Config, ModelConfig, Resolved};
use crate::corpus::{FileInfo, TemplateInfo};
use crate::device;
use crate::error::{Error, Result};
use crate::hash::FileHash;
use crate::plugins::Limits;
use crate::run::machine::Machine;
use crate::run::provenance::{Implementation, Inputs, PluginRecord, Provenance};
use std::collections::BTreeMap;
use std::path::Path;

/// The kernels of a step that multiply with frozen matrices, by name.
const MULTIPLY_WEIGHTS: [&str; 3] = ["lora_linear", "moe_experts", "linear_cross_entropy"];

/// The provenance of a run of `resolved` in the folder `run`, as things are now.
///
/// # Errors
/// Class `io` where an input cannot be read.
pub fn provenance(run: &Path, resolved: &Resolved, prepared: &Prepared) -> Result<Provenance> {
    let config = &resolved.config;
    let base = &config.model.base;
    let mut inputs = Inputs::default();
    for path in prepared
        .checkpoint
        .files()
        .map(Path::to_path_buf)
        .chain(optional(base, &["config.json", "model.safetensors.index.json", "generation_config.json"]))
    {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        inputs.base.insert(name, FileHash::of(&path)?);
    }
    inputs.tokenizer = optional(base, &["tokenizer.json"]).next().map(|path| FileHash::of(&path)).transpose()?;
    inputs.template = prepared.corpus.template.as_ref().map(TemplateInfo::file_hash);
    inputs.corpus_manifest = prepared.corpus_manifest.clone();
    inputs.adapter = prepared.given.as_ref().map(|given| given.weights.clone());
    inputs.corpus = prepared.corpus.files.iter().map(FileInfo::file_hash).collect();
    for plugin in prepared.policies.identities() {
        let record = PluginRecord {
            name: plugin.name.clone(),
            version: plugin.version.clone(),
            source: plugin.origin.to_string(),
            sha256: plugin.sha256.clone(),
            limits: Some(Limits::configured(plugin.kind, &config.plugins)),
        };
        inputs.plugins.insert(plugin.kind.config_key().into(), record);
    }
    // A run may be verified from another folder than it was started in.
    let Inputs { base, corpus, tokenizer, template, corpus_manifest, adapter, .. } = &mut inputs;
    let files = base.values_mut().chain(corpus);
    let single = [tokenizer, template, corpus_manifest, adapter];
    for file in files.chain(single.into_iter().flatten()) {
        file.path = std::path::absolute(&file.path).map_err(|e| Error::io("find", &file.path, e))?;
    }
    let name = &config.model.device;
    let kernels = kernels(config)?;
    let cpu = Machine::cpu(rayon::current_num_threads());
    let device_name = device::hardware_name(name)?.unwrap_or_else(|| cpu.device_name.clone());
    let driver = if name == "cpu" { cpu.driver.clone() } else { device::driver(name)? };
    let machine = Machine { device: name.clone(), device_name, driver, ..cpu };
    let mut provenance = Provenance::new(run, resolved, inputs, machine, kernels);
    provenance.parent_run = prepared.given.as_ref().and_then(|given| given.run.clone());
    for (epoch, ids) in &prepared.dropped {
        provenance.verdicts.insert(format!("records dropped by the sampler in epoch {epoch}"), ids.join(", "));
    }
    Ok(provenance)
}

/// What is asked of each kernel, and what it resolves to. A device is what was asked for, or the run is refused: none stands
/// in for another.
///
/// # Errors
/// `device::unavailable`, `device::unsupported`.
pub fn kernels(config: &Config) -> Result<BTreeMap<String, Implementation>> {
    let ModelConfig { device, weights, .. } = &config.model;
    // What a configuration does not name is f32.
    let activations = match config.train.activations {
        ActivationDtype::F32 => String::new(),
        narrow => format!(", activations {}", narrow.name()),
    };
    let implementation = |(name, resolved): (&str, String)| {
        let requested = match MULTIPLY_WEIGHTS.contains(&name) {
            true => format!("{device} {}{activations}", weights.name()),
            false => format!("{device}{activations}"),
        };
        (name.to_string(), Implementation { requested, resolved })
    };
    Ok(device::kernels(device, config.dtypes())?.into_iter().map(implementation).collect())
}

fn optional<'a>(base: &'a Path, names: &'a [&'a str]) -> impl Iterator<Item = std::path::PathBuf> + 'a {
    names.iter().map(|name| base.join(name)).filter(|path| path.exists())
}
