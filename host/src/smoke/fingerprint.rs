//! What a measurement depends on.

use crate::config::{Config, Recompute, RecomputeWord};
use crate::device;
use crate::error::Result;
use crate::hash::{FileHash, sha256};
use crate::model::checkpoint::Checkpoint;
use crate::model::lora::LoraPlan;
use crate::run::machine::Machine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The key of the kernels' hash.
const KERNELS: &str = "kernels_sha256";

/// Everything but the shape that memory and time of a step depend on, by its key in the configuration or, where it has none, by
/// what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// That of a run of `config` with this base and these adapters, in this process. No weight is read: the base counts by its
    /// `config.json` and the headers of its tensors.
    ///
    /// # Errors
    /// `device::unavailable`; class `io`.
    pub fn of(config: &Config, checkpoint: &Checkpoint, lora: &LoraPlan) -> Result<Self> {
        let headers: String = checkpoint
            .entries()
            .iter()
            .map(|(name, entry)| format!("{name} {:?} {:?}\n", entry.dtype, entry.shape))
            .collect();
        let modules: String = lora.modules.iter().map(|module| format!("{}\n", module.path)).collect();
        let train = &config.train;
        let recompute = match train.recompute {
            Recompute::Word(RecomputeWord::All) => "all".to_string(),
            Recompute::Word(RecomputeWord::None) => "none".into(),
            Recompute::Layers(layers) => layers.to_string(),
        };
        let granularity = serde_json::to_value(train.recompute_granularity).expect("a word is JSON");
        let name = &config.model.device;
        let machine = Machine::cpu(rayon::current_num_threads());
        let device_name = device::hardware_name(name)?.unwrap_or(machine.device_name);
        let kernels = device::kernels(name, config.dtypes())?;
        let mut parts = BTreeMap::from([
            ("base.config".to_string(), FileHash::of(&config.model.base.join("config.json"))?.sha256),
            ("base.headers".into(), sha256(headers.as_bytes())),
            ("device_name".into(), device_name),
            (KERNELS.into(), device::kernels_sha256(kernels.iter().map(|(kernel, by)| (*kernel, &by[..])))),
            ("lora.dropout".into(), config.lora.dropout.to_string()),
            ("lora.modules".into(), format!("{}, sha256 {}", lora.modules.len(), sha256(modules.as_bytes()))),
            ("lora.rank".into(), lora.rank.to_string()),
            ("model.device".into(), name.clone()),
            ("model.weights".into(), config.model.weights.name().into()),
            ("threads".into(), machine.threads.to_string()),
            // With more than one micro-batch a step keeps a sum of gradients while it computes.
            ("train.accumulation".into(), (if train.accumulation > 1 { "2 or more" } else { "1" }).into()),
            ("train.activations".into(), train.activations.name().into()),
            ("train.loss_chunk_rows".into(), train.loss_chunk_rows.to_string()),
            ("train.micro_batch".into(), train.micro_batch.to_string()),
            ("train.recompute".into(), recompute),
            ("train.residuals".into(), train.residuals.name().into()),
            ("train.recompute_granularity".into(), granularity.as_str().unwrap_or_default().into()),
            ("tunehost".into(), env!("CARGO_PKG_VERSION").into()),
        ]);
        parts.extend(kernels.map(|(kernel, resolved)| (format!("kernel.{kernel}"), resolved)));
        Ok(Self(parts))
    }

    /// The device, as the configuration names it.
    pub fn device(&self) -> &str {
        self.0.get("model.device").map_or("", String::as_str)
    }

    /// Hash of what the kernels resolve to, as a run's provenance has it; nothing where an earlier version wrote this.
    pub fn kernels_sha256(&self) -> Option<&str> {
        self.0.get(KERNELS).map(String::as_str)
    }

    /// What is otherwise in `now`, in words; nothing where nothing is.
    pub fn changed(&self, now: &Self) -> Option<String> {
        let keys: Vec<&String> = self.0.keys().chain(now.0.keys().filter(|key| !self.0.contains_key(*key))).collect();
        let value = |of: &Self, key: &str| of.0.get(key).cloned().unwrap_or_else(|| "nothing".into());
        let differs = keys.iter().filter(|key| self.0.get(**key) != now.0.get(**key));
        let lines: Vec<String> =
            differs.map(|key| format!("{key} was {}, is {}", value(self, key), value(now, key))).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }
}
