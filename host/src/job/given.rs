//! The adapter that a run starts from, where it does not start from a fresh one: that of another run, or a PEFT folder
//! (`lora.init`).

use crate::error::{Error, Result};
use crate::hash::FileHash;
use crate::model::adapter::Adapter;
use crate::model::lora::LoraPlan;
use crate::model::peft::{self, WEIGHTS_FILE};
use crate::model::spec::ModelSpec;
use crate::run::folder::{EXPORT, PROVENANCE, resume_command};
use crate::run::provenance::Provenance;
use burn::tensor::Device;
use std::path::{Path, PathBuf};

/// An adapter that was trained before.
pub struct Given {
    /// The adapter, under the plan of the run that starts from it.
    pub adapter: Adapter,
    /// The file that it was read from.
    pub weights: FileHash,
    /// The run that trained it, where that is known.
    pub run: Option<String>,
}

/// Reads the adapter that the run in the folder `path` exported, or the one of the PEFT folder `path`, for a run that
/// trains `plan`.
///
/// # Errors
/// `run::no_adapter` for a run without one, `run::adapter_changed` where it is not what that run wrote, `config::lora_init` where
/// it does not fit `plan`; those of [`peft::read`].
pub fn read(path: &Path, spec: &ModelSpec, plan: &LoraPlan, device: &Device) -> Result<Given> {
    let run = path.join(PROVENANCE).is_file().then(|| Provenance::read(path)).transpose()?;
    let dir = if run.is_some() { path.join(EXPORT).join("adapter") } else { path.into() };
    let file = dir.join(WEIGHTS_FILE);
    if run.is_some() && !file.exists() {
        return Err(Error::new("run::no_adapter", format!("the run {} has no {}", path.display(), file.display()))
            .expected("a run that ended and exported its adapter (export.adapter = true)")
            .help(format!("end it: {}", resume_command(path))));
    }
    let weights =
        FileHash::of(&file).map_err(|e| e.expected("the folder of a run or of a PEFT adapter in lora.init"))?;
    if let Some(recorded) = run.as_ref().and_then(recorded).filter(|recorded| recorded.sha256 != weights.sha256) {
        let message = format!("{} has the sha256 {}", file.display(), weights.sha256);
        return Err(Error::new("run::adapter_changed", message)
            .expected(format!("{}, as the run that wrote it recorded", recorded.sha256))
            .help("to start from it as it is now, name its folder"));
    }
    let adapter = peft::read(&dir, spec, device)?;
    check(&adapter.plan, plan, &dir)?;
    Ok(Given { adapter: Adapter { plan: plan.clone(), ..adapter }, weights, run: run.map(|run| run.run_id) })
}

fn recorded(run: &Provenance) -> Option<&FileHash> {
    let exports = &run.outcome.as_ref()?.exports;
    exports.get(&PathBuf::from(EXPORT).join("adapter").join(WEIGHTS_FILE))
}

/// Whether the adapter's tensors mean to the run what they meant when they were trained.
fn check(found: &LoraPlan, plan: &LoraPlan, dir: &Path) -> Result<()> {
    let paths = |plan: &LoraPlan| plan.modules.iter().map(|module| module.path.clone()).collect::<Vec<_>>();
    if (found.rank, found.scale) == (plan.rank, plan.scale) && paths(found) == paths(plan) {
        return Ok(());
    }
    let shown = |plan: &LoraPlan| format!("rank {}, scale {}, {} modules", plan.rank, plan.scale, plan.modules.len());
    let message = format!("the adapter in {} has {}", dir.display(), shown(found));
    Err(Error::new("config::lora_init", message)
        .expected(format!("{}, as this run trains them", shown(plan)))
        .help("set lora.rank, lora.alpha, lora.rslora and lora.targets as they were when it was trained"))
}
