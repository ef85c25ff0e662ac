//! Base + adapter as one checkpoint: W' = W + scale B A for adapted modules, every other tensor byte for byte.
//!
//! Tensors stream from the mapped base to the output one at a time, so that memory stays near the largest tensor.

use super::PendingFolder;
use super::tensor::{ExportTensor, Update, factors, updates};
use crate::error::Result;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Largest shard in bytes; a checkpoint that fits is one file without an index.
pub const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// Files of the base that a server needs beside the weights, copied where they exist.
const COMPANIONS: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
];

const TEMPLATE_FILE: &str = "chat_template.jinja";

/// Writes the merged checkpoint to the new folder `dir`: weights in the base's own dtypes and names, config, tokenizer,
/// generation settings, and as `chat_template.jinja` the `template` that was trained with, or the base's own without one.
///
/// # Errors
/// `export::exists`, `model::missing_tensor`, `io::failed`.
pub fn write(
    checkpoint: &Checkpoint,
    adapter: &Adapter,
    template: Option<&str>,
    dir: &Path,
    max_shard_bytes: usize,
) -> Result<()> {
    let factors = factors(adapter);
    let updates = updates(checkpoint, adapter, &factors)?;
    let folder = PendingFolder::new(dir)?;
    write_weights(checkpoint, &updates, &folder, max_shard_bytes)?;
    for name in COMPANIONS {
        folder.copy(checkpoint.dir(), name)?;
    }
    match template {
        Some(template) => folder.write(TEMPLATE_FILE, template.as_bytes())?,
        None => folder.copy(checkpoint.dir(), TEMPLATE_FILE)?,
    }
    folder.commit()
}

fn write_weights<'a>(
    checkpoint: &'a Checkpoint,
    updates: &'a HashMap<String, Update<'a>>,
    folder: &PendingFolder,
    max_shard_bytes: usize,
) -> Result<()> {
    let mut shards: Vec<Vec<&str>> = vec![vec![]];
    let mut shard_bytes = 0;
    for (name, entry) in checkpoint.entries() {
        if shard_bytes > 0 && shard_bytes + entry.size_bytes() > max_shard_bytes {
            shards.push(vec![]);
            shard_bytes = 0;
        }
        shard_bytes += entry.size_bytes();
        shards.last_mut().expect("never empty").push(name);
    }
    let mut weight_map = BTreeMap::new();
    for (i, names) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let view = |name: &&'a str| {
            let update = updates.get(*name).map(|update| (update, 1.0));
            Ok((name.to_string(), ExportTensor::stored(checkpoint, name, &checkpoint.entries()[*name], None, update)?))
        };
        folder.write_tensors(&file, names.iter().map(view).collect::<Result<Vec<_>>>()?)?;
        weight_map.extend(names.iter().map(|name| (*name, file.clone())));
    }
    if shards.len() > 1 {
        let total: usize = checkpoint.entries().values().map(|e| e.size_bytes()).sum();
        let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        folder.write("model.safetensors.index.json", &serde_json::to_vec_pretty(&index).expect("plain JSON"))?;
    }
    Ok(())
}
