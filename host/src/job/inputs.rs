//! What a run reads and computes with, hashed and named for provenance.

use super::prepare::Prepared;
use crate::config::Resolved;
use crate::error::Result;
use crate::hash::FileHash;
use crate::plugins::Limits;
use crate::run::folder::RunFolder;
use crate::run::machine::Machine;
use crate::run::provenance::{Implementation, Inputs, PluginRecord, Provenance};
use std::path::Path;

/// The kernels of a step, by name.
const KERNELS: [&str; 7] =
    ["windowed_attention", "rms_norm", "rope", "lora_linear", "geglu", "moe_experts", "linear_cross_entropy"];

/// The provenance of a run of `resolved` as things are now.
///
/// # Errors
/// Class `io` where an input cannot be read.
pub fn provenance(folder: &RunFolder, resolved: &Resolved, prepared: &Prepared) -> Result<Provenance> {
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
    if let Some(template) = &prepared.corpus.template {
        let (path, bytes) = (template.origin.clone().into(), template.source.len() as u64);
        inputs.template = Some(FileHash { path, bytes, sha256: template.sha256.clone() });
    }
    inputs.corpus_manifest = prepared.corpus_manifest.clone();
    inputs.corpus = prepared
        .corpus
        .files
        .iter()
        .map(|file| FileHash { path: file.path.clone(), bytes: file.bytes, sha256: file.sha256.clone() })
        .collect();
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
    // Only one implementation is built in, so whatever the device asks for is what it gets, or the device is refused.
    let flex = Implementation { requested: config.model.device.clone(), resolved: resolved_kernels() };
    let kernels = KERNELS.iter().map(|name| (name.to_string(), flex.clone())).collect();
    let mut provenance = Provenance::new(folder, resolved, inputs, Machine::cpu(rayon::current_num_threads()), kernels);
    for (epoch, ids) in &prepared.dropped {
        provenance.verdicts.insert(format!("records dropped by the sampler in epoch {epoch}"), ids.join(", "));
    }
    Ok(provenance)
}

/// The implementation that every kernel resolves to: f32 on the CPU with the instruction set that was detected.
pub fn resolved_kernels() -> String {
    format!("cpu-f32-{}", tunehost_kernels::simd::Isa::detect().name())
}

fn optional<'a>(base: &'a Path, names: &'a [&'a str]) -> impl Iterator<Item = std::path::PathBuf> + 'a {
    names.iter().map(|name| base.join(name)).filter(|path| path.exists())
}
