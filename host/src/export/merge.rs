//! Base + adapter as one checkpoint: W' = W + scale B A for adapted modules, every other tensor byte for byte.
//!
//! Tensors stream from the mapped base to the output one at a time, so that memory stays near the largest tensor.

use super::PendingFolder;
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::model::checkpoint::{Checkpoint, to_f32};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
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

struct Update {
    scale: f64,
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    input: usize,
}

struct MergedTensor<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
    size_bytes: usize,
    update: Option<&'a Update>,
}

impl View for MergedTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.checkpoint.bytes(self.name).expect("the entry came from this checkpoint");
        match self.update {
            None => Cow::Borrowed(bytes),
            Some(update) => Cow::Owned(merged_bytes(bytes, self.dtype, update)),
        }
    }

    fn data_len(&self) -> usize {
        self.size_bytes
    }
}

/// W + scale B A in f32, rounded to nearest even where the base stores 16 bits.
fn merged_bytes(base: &[u8], dtype: Dtype, update: &Update) -> Vec<u8> {
    let mut w = to_f32(base, dtype).expect("adapted weights were loaded, so their dtype is known");
    w.par_chunks_mut(update.input).zip(update.b.par_chunks(update.rank)).for_each(|(row, b)| {
        let mut delta = vec![0f64; update.input];
        for (b, a) in b.iter().zip(update.a.chunks(update.input)) {
            for (d, a) in delta.iter_mut().zip(a) {
                *d += f64::from(*b) * f64::from(*a);
            }
        }
        for (w, d) in row.iter_mut().zip(delta) {
            *w = (f64::from(*w) + update.scale * d) as f32;
        }
    });
    match dtype {
        Dtype::BF16 => w.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => w.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => w.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

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
    let updates = updates(checkpoint, adapter)?;
    let folder = PendingFolder::new(dir)?;
    write_weights(checkpoint, &updates, &folder, max_shard_bytes)?;
    for name in COMPANIONS {
        let from = checkpoint.dir().join(name);
        if from.exists() {
            copy(&from, &folder)?;
        }
    }
    let shipped = checkpoint.dir().join(TEMPLATE_FILE);
    match template {
        Some(template) => folder.write(TEMPLATE_FILE, template.as_bytes())?,
        None if shipped.exists() => copy(&shipped, &folder)?,
        None => {}
    }
    folder.commit()
}

fn copy(from: &Path, folder: &PendingFolder) -> Result<()> {
    let name = from.file_name().unwrap_or_default().to_string_lossy();
    fs::copy(from, folder.path(&name)).map(drop).map_err(|e| Error::io("copy", from, e))
}

fn updates(checkpoint: &Checkpoint, adapter: &Adapter) -> Result<HashMap<String, Update>> {
    let modules = adapter.plan.modules.iter().zip(&adapter.modules);
    modules
        .map(|(m, pair)| {
            let name = format!("{}.weight", m.path);
            checkpoint.bytes(&name)?;
            let (a, b) = (values(&pair.a), values(&pair.b));
            Ok((name, Update { scale: adapter.plan.scale, a, b, rank: adapter.plan.rank, input: m.input }))
        })
        .collect()
}

fn write_weights(
    checkpoint: &Checkpoint,
    updates: &HashMap<String, Update>,
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
    let metadata = Some(HashMap::from([("format".to_string(), "pt".to_string())]));
    let mut weight_map = BTreeMap::new();
    for (i, names) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let views = names.iter().map(|name| {
            let entry = &checkpoint.entries()[*name];
            let view = MergedTensor {
                checkpoint,
                name,
                dtype: entry.dtype,
                shape: &entry.shape,
                size_bytes: entry.size_bytes(),
                update: updates.get(*name),
            };
            (*name, view)
        });
        let path = folder.path(&file);
        safetensors::serialize_to_file(views, metadata.clone(), &path)
            .map_err(|e| Error::new("io::failed", format!("cannot write {}: {e}", path.display())).source(e))?;
        weight_map.extend(names.iter().map(|name| (*name, file.clone())));
    }
    if shards.len() > 1 {
        let total: usize = checkpoint.entries().values().map(|e| e.size_bytes()).sum();
        let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        folder.write("model.safetensors.index.json", &serde_json::to_vec_pretty(&index).expect("plain JSON"))?;
    }
    Ok(())
}
