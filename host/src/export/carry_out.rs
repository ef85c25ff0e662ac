//! Between an exporter plugin and the disk: what it is told of a tuned model, and the plan that comes back carried out.

use super::PendingFolder;
use super::tensor::{ExportTensor, Factors, QuantizedWeight, factors, share_scales, updates};
use super::{gguf, vocabulary};
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::gguf::{ALIGNMENT, Value};
use crate::model::lora::LoraPlan;
use crate::model::spec::ModelSpec;
use crate::plugins::{BaseTensor, ExportPlan, PlannedTensor, Scheme, Source, TensorFile, Tuned};
use safetensors::View;
use std::collections::HashMap;

const CONFIG: &str = "config.json";

/// A disk gives a file whole blocks.
const BLOCK_BYTES: usize = 4096;
/// Most that the report takes, beside the notes of the plan.
const REPORT_BYTES: usize = 64 << 10;

/// What an exporter is told of `adapter` on the base of shape `spec` in `checkpoint`. The base's path is absolute, so that
/// an adapter finds its base whatever the current folder, and a resumed run writes the same bytes.
///
/// # Errors
/// Class `io`; `model::missing_tensor` for a module without a weight in the base.
pub fn tuned(
    adapter: &Adapter,
    spec: &ModelSpec,
    checkpoint: &Checkpoint,
    chat_template: Option<&str>,
) -> Result<Tuned> {
    let (weight_norms, update_norms) = norms(adapter, checkpoint)?;
    Ok(Tuned { weight_norms, update_norms, ..untrained(&adapter.plan, spec, checkpoint, chat_template)? })
}

/// As [`tuned`] before anything is trained: all norms are zero, and no weight is read.
///
/// # Errors
/// Those of [`tuned`].
pub fn untrained(
    plan: &LoraPlan,
    spec: &ModelSpec,
    checkpoint: &Checkpoint,
    chat_template: Option<&str>,
) -> Result<Tuned> {
    let base = checkpoint.dir();
    let base_path = base.canonicalize().map_err(|e| Error::io("find", base, e))?.display().to_string();
    let config = base.join(CONFIG);
    let base_config = std::fs::read_to_string(&config).map_err(|e| Error::io("read", &config, e))?;
    let places: HashMap<&str, u32> = checkpoint.entries().keys().map(String::as_str).zip(0..).collect();
    let module_tensors = plan.modules.iter().map(|module| {
        let name = format!("{}.weight", module.path);
        checkpoint.bytes(&name)?;
        Ok(places[name.as_str()])
    });
    Ok(Tuned {
        base_tensors: checkpoint
            .entries()
            .iter()
            .map(|(name, entry)| BaseTensor {
                name: name.clone(),
                dtype: format!("{:?}", entry.dtype),
                shape: entry.shape.iter().map(|&n| n as u64).collect(),
            })
            .collect(),
        base_config,
        base_path,
        modules: plan.modules.iter().map(|module| module.path.clone()).collect(),
        module_tensors: module_tensors.collect::<Result<_>>()?,
        modules_regex: plan.full_match_regex(spec),
        rank: plan.rank as u32,
        alpha: plan.alpha,
        rslora: plan.rslora,
        dropout: plan.dropout,
        weight_norms: vec![0.0; plan.modules.len()],
        update_norms: vec![0.0; plan.modules.len()],
        chat_template: chat_template.map(String::from),
    })
}

/// Chooses scales of the modules that it is shown.
pub type ChooseScales<'a> = dyn FnMut(&[&QuantizedWeight]) -> Result<()> + 'a;

/// Write what `plan` says into `folder`. The indices of the plan are those of [`tuned`]. `choose` is shown the modules that
/// are quantised; those whose scales it leaves get plain ones. `progress` is told the bytes of tensors that are written, of how many.
///
/// # Errors
/// `export::dtype`, `export::disk_full`, class `io`, those of `choose`.
pub fn carry_out(
    plan: &ExportPlan,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    folder: &PendingFolder,
    choose: &mut ChooseScales,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let stored: Vec<_> = checkpoint.entries().iter().collect();
    let factors = factors(adapter);
    let updates = updates(checkpoint, adapter, &factors)?;
    let mut quantized: Vec<Vec<QuantizedWeight>> = Vec::new();
    for file in &plan.tensor_files {
        let weights = file.quantized.iter().map(|module| {
            let (name, entry) = stored[module.tensor];
            QuantizedWeight::new(checkpoint, name, entry, module, updates.get(name))
        });
        quantized.push(weights.collect::<Result<_>>()?);
    }
    let modules = plan.tensor_files.iter().flat_map(|file| &file.quantized);
    let numbers: Vec<_> = modules.map(|m| (m.scheme == Scheme::Nvfp4).then_some(m.shared_scale)).collect();
    share_scales(&mut quantized, &numbers);
    let mut files = Vec::new();
    for (file, quantized) in plan.tensor_files.iter().zip(&quantized) {
        let tensor = |planned: &PlannedTensor| match planned.source {
            Source::Base(index) => {
                let (name, entry) = stored[index];
                ExportTensor::stored(checkpoint, name, entry, planned.stored, None)
            }
            Source::Merged(index, strength) => {
                let (name, entry) = stored[index];
                let update = updates.get(name).map(|update| (update, strength));
                ExportTensor::stored(checkpoint, name, entry, planned.stored, update)
            }
            Source::A(module) | Source::B(module) => {
                let (shape, values) = &factors[module][usize::from(matches!(planned.source, Source::B(_)))];
                Ok(ExportTensor::values(values, shape, planned.stored))
            }
            Source::Constant(index) => {
                let values = &plan.constants[index];
                Ok(ExportTensor::values(values, &[values.len()], planned.stored))
            }
        };
        let tensors = file.tensors.iter().map(|planned| Ok((planned.name.clone(), tensor(planned)?)));
        let mut tensors: Vec<(String, ExportTensor)> = tensors.collect::<Result<_>>()?;
        tensors.extend(quantized.iter().flat_map(QuantizedWeight::tensors));
        files.push((file, tensors));
    }
    let heads = files.iter().map(|(file, tensors)| match file.is_gguf() {
        true => Ok(Some(gguf::head_of(gguf_metadata(plan, checkpoint)?, tensors))),
        false => Ok(None),
    });
    let heads: Vec<Option<Vec<u8>>> = heads.collect::<Result<_>>()?;
    folder.check_space(needed_bytes(plan, checkpoint, &files, &heads))?;
    choose(&quantized.iter().flatten().collect::<Vec<_>>())?;
    let total = files.iter().flat_map(|(_, tensors)| tensors).map(|(_, tensor)| tensor.data_len()).sum();
    let mut done = 0;
    let mut written = |bytes| {
        done += bytes;
        progress(done, total);
    };
    for ((file, tensors), head) in files.into_iter().zip(heads) {
        match head {
            Some(head) => gguf::write(folder, &file.name, &head, &tensors, &mut written)?,
            None => folder.write_tensors(&file.name, tensors, &mut written)?,
        }
    }
    for (name, text) in &plan.texts {
        folder.write(name, text.as_bytes())?;
    }
    for name in &plan.copied_files {
        folder.copy(checkpoint.dir(), name)?;
    }
    Ok(())
}

/// What all files of the export take on a disk, at most: nothing of a tensor is made before it is written, but its size is known.
fn needed_bytes(
    plan: &ExportPlan,
    checkpoint: &Checkpoint,
    files: &[(&TensorFile, Vec<(String, ExportTensor)>)],
    heads: &[Option<Vec<u8>>],
) -> u64 {
    let of_tensors = files.iter().zip(heads).map(|((_, tensors), head)| {
        let sizes = tensors.iter().map(|(_, tensor)| tensor.data_len().next_multiple_of(ALIGNMENT));
        let head = head.as_ref().map_or_else(|| tensors.iter().map(listed_bytes).sum(), Vec::len);
        head + sizes.sum::<usize>()
    });
    let texts = plan.texts.iter().map(|(_, text)| text.len());
    let copies = plan
        .copied_files
        .iter()
        .map(|name| std::fs::metadata(checkpoint.dir().join(name)).map_or(0, |found| found.len() as usize));
    let report = REPORT_BYTES + plan.notes.iter().map(String::len).sum::<usize>();
    let sizes = of_tensors.chain(texts).chain(copies).chain([report]);
    sizes.map(|bytes| bytes.next_multiple_of(BLOCK_BYTES) as u64).sum()
}

/// Most bytes that a tensor takes in the header of a safetensors file: its name, two offsets, dtype, shape and the words between.
fn listed_bytes((name, tensor): &(String, ExportTensor)) -> usize {
    const NUMBER: usize = 21;
    64 + name.len() + NUMBER * (2 + tensor.shape().len())
}

/// What the plan says, and of the vocabulary what it leaves unsaid.
fn gguf_metadata(plan: &ExportPlan, checkpoint: &Checkpoint) -> Result<Vec<(String, Value)>> {
    let embedding = checkpoint.entries().iter().find(|(name, _)| name.ends_with("embed_tokens.weight"));
    let size = embedding.and_then(|(_, entry)| entry.shape.first().copied()).unwrap_or(0);
    let mut metadata = plan.gguf_metadata.clone();
    let said = |key: &String| plan.gguf_metadata.iter().any(|(said, _)| said == key);
    metadata.extend(vocabulary::entries(checkpoint.dir(), size)?.into_iter().filter(|(key, _)| !said(key)));
    Ok(metadata)
}

/// The norms of each module's weight in the base, and of its update; of the latter without ever forming it.
fn norms(adapter: &Adapter, checkpoint: &Checkpoint) -> Result<(Vec<f64>, Vec<f64>)> {
    let modules = adapter.plan.modules.iter().zip(factors(adapter));
    let norms = modules.map(|(module, factors)| {
        let mut squares = 0.0;
        checkpoint.read_pieces(&format!("{}.weight", module.path), |piece| {
            squares += piece.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
        })?;
        Ok((squares.sqrt(), adapter.plan.scale.abs() * product_norm(&factors, adapter.plan.rank)))
    });
    Ok(norms.collect::<Result<Vec<_>>>()?.into_iter().unzip())
}

/// The Frobenius norm of B A, from the rank x rank products B^T B and A A^T, whose elementwise product sums to its square.
fn product_norm([(_, a), (_, b)]: &Factors, rank: usize) -> f64 {
    let rows: Vec<&[f32]> = a.chunks(a.len() / rank).collect();
    let columns: Vec<Vec<f32>> = (0..rank).map(|at| b.iter().skip(at).step_by(rank).copied().collect()).collect();
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let product = |i: usize, j: usize| dot(rows[i], rows[j]) * dot(&columns[i], &columns[j]);
    // Both products are symmetric.
    let sum: f64 = (0..rank).map(|i| product(i, i) + 2.0 * (0..i).map(|j| product(i, j)).sum::<f64>()).sum();
    // Rounding can leave a tiny negative number of what is zero.
    sum.max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_of_an_update_is_that_of_its_product() {
        let (rank, input, output) = (3, 5, 4);
        let a: Vec<f32> = (0..rank * input).map(|i| (i as f32 * 0.9).sin()).collect();
        let b: Vec<f32> = (0..output * rank).map(|i| (i as f32 * 0.4).cos()).collect();
        let product = |row: usize, column: usize| -> f64 {
            (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * input + column])).sum()
        };
        let squares = (0..output).flat_map(|row| (0..input).map(move |column| (row, column)));
        let expected = squares.map(|(row, column)| product(row, column).powi(2)).sum::<f64>().sqrt();
        let norm = product_norm(&[([rank, input], a.clone()), ([output, rank], b.clone())], rank);
        assert!((norm - expected).abs() < 1e-9 * expected, "{norm} {expected}");
    }
}
