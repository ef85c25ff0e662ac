//! Between an exporter plugin and the disk: what it is told of a tuned model, and the plan that comes back carried out.

use super::PendingFolder;
use super::tensor::{ExportTensor, factors, updates};
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::spec::ModelSpec;
use crate::plugins::{BaseTensor, ExportPlan, PlannedTensor, Source, Tuned};
use std::collections::HashMap;
use std::path::Path;

const CONFIG: &str = "config.json";

/// What an exporter is told of `adapter` on the base of shape `spec` in `checkpoint`. The base's path is absolute, so that
/// an adapter finds its base whatever the current folder, and a resumed run writes the same bytes.
///
/// # Errors
/// Class `io`; `model::missing_tensor` for a module without a weight in the base.
pub fn tuned(adapter: &Adapter, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<Tuned> {
    let base = checkpoint.dir();
    let base_path = base.canonicalize().map_err(|e| Error::io("find", base, e))?.display().to_string();
    let config = base.join(CONFIG);
    let base_config = std::fs::read_to_string(&config).map_err(|e| Error::io("read", &config, e))?;
    let places: HashMap<&str, u32> = checkpoint.entries().keys().map(String::as_str).zip(0..).collect();
    let plan = &adapter.plan;
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
    })
}

/// Write what `plan` says into the new folder `dir`. The indices of the plan are those of [`tuned`].
///
/// # Errors
/// `export::exists`, `export::dtype`, class `io`.
pub fn carry_out(plan: &ExportPlan, adapter: &Adapter, checkpoint: &Checkpoint, dir: &Path) -> Result<()> {
    let folder = PendingFolder::new(dir)?;
    let stored: Vec<_> = checkpoint.entries().iter().collect();
    let factors = factors(adapter);
    let updates = updates(checkpoint, adapter, &factors)?;
    for file in &plan.tensor_files {
        let tensor = |planned: &PlannedTensor| match planned.source {
            Source::Base(index) => {
                let (name, entry) = stored[index];
                ExportTensor::stored(checkpoint, name, entry, planned.dtype, None)
            }
            Source::Merged(index, strength) => {
                let (name, entry) = stored[index];
                let update = updates.get(name).map(|update| (update, strength));
                ExportTensor::stored(checkpoint, name, entry, planned.dtype, update)
            }
            Source::A(module) | Source::B(module) => {
                let (shape, values) = &factors[module][usize::from(matches!(planned.source, Source::B(_)))];
                Ok(ExportTensor::values(values, *shape, planned.dtype))
            }
        };
        let tensors = file.tensors.iter().map(|planned| Ok((planned.name.as_str(), tensor(planned)?)));
        folder.write_tensors(&file.name, tensors.collect::<Result<_>>()?)?;
    }
    for (name, text) in &plan.texts {
        folder.write(name, text.as_bytes())?;
    }
    for name in &plan.copied_files {
        folder.copy(checkpoint.dir(), name)?;
    }
    folder.commit()
}
