//! Adapters and optimiser state as the files of a checkpoint, and back.

use super::optimizer::AdamW;
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::flat::Place;
use crate::model::lora::LoraPlan;
use crate::model::peft::{read_tensors, tensor_file, weights_bytes};
use burn::tensor::Device;
use std::collections::BTreeMap;
use std::path::Path;

/// Checkpoint file with the adapter's tensors under their PEFT names.
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";
/// Checkpoint file with AdamW's moments, named after the adapter's tensors with `.m` and `.v`.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// The bytes of [`ADAPTER_FILE`] and [`OPTIMIZER_FILE`].
pub fn to_files(adapter: &Adapter, optimizer: &AdamW) -> [(&'static str, Vec<u8>); 2] {
    let [m, v] = &optimizer.moments;
    let moments = m.tensors().zip(v.tensors());
    let optimizer =
        tensor_file(moments.flat_map(|((name, m), (_, v))| [(format!("{name}.m"), m), (format!("{name}.v"), v)]));
    [(ADAPTER_FILE, weights_bytes(adapter)), (OPTIMIZER_FILE, optimizer)]
}

/// The adapter and optimiser of a checkpoint taken after `step` steps.
///
/// # Errors
/// `run::bad_checkpoint`, `model::adapter_tensor`, naming `origin`.
pub fn from_files(
    files: &BTreeMap<String, Vec<u8>>,
    plan: LoraPlan,
    config: &TrainConfig,
    step: u64,
    device: &Device,
    origin: &Path,
) -> Result<(Adapter, AdamW)> {
    let file = |name: &str| {
        files.get(name).ok_or_else(|| {
            Error::new("run::bad_checkpoint", format!("{} has no {name}", origin.display()))
                .help("resume from an earlier checkpoint")
        })
    };
    let adapter = Adapter::from_tensors(plan, read_tensors(file(ADAPTER_FILE)?, &origin.join(ADAPTER_FILE))?, device)?;
    let mut moments = read_tensors(file(OPTIMIZER_FILE)?, &origin.join(OPTIMIZER_FILE))?;
    let mut take = |Place { name, shape, .. }: &Place, moment: &str| -> Result<Vec<f32>> {
        let name = format!("{name}.{moment}");
        match moments.remove(&name) {
            Some((found, values)) if found == *shape => Ok(values),
            _ => Err(Error::new(
                "run::bad_checkpoint",
                format!("{} has no fitting {name}", origin.join(OPTIMIZER_FILE).display()),
            )
            .expected(format!("shape {shape:?}"))
            .help("resume from an earlier checkpoint")),
        }
    };
    let mut read = |moment| adapter.flat.read_like(|_, [a, b]| Ok([take(a, moment)?, take(b, moment)?]));
    let mut optimizer = AdamW::new(config, &adapter);
    (optimizer.step, optimizer.moments) = (step, [read("m")?, read("v")?]);
    Ok((adapter, optimizer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;
    use crate::model::fixtures::large_model_headers;
    use crate::model::spec::ModelSpec;

    #[test]
    fn a_checkpoint_of_26b_a4b_at_rank_64_takes_less_than_a_gib() {
        let (config, found) = large_model_headers();
        let spec = ModelSpec::check(&config, &found).unwrap().0;
        let plan = |rank| LoraPlan::new(&LoraConfig { rank, ..LoraConfig::default() }, &spec).unwrap();
        // The files themselves at rank 1: adapters and two moments in f32, and the names of 3 x 410 tensors.
        let narrow = Adapter::init(plan(1), 0, &Device::flex());
        let files = to_files(&narrow, &AdamW::new(&TrainConfig::default(), &narrow));
        let bytes: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
        let names = bytes - 3 * 4 * narrow.plan.parameters();
        assert!((3 * 410 * 64..3 * 410 * 256).contains(&names), "{names} bytes of names, shapes and offsets");
        // At rank 64 every value is there 64 times, and an offset has three digits more at most.
        let at_64 = 3 * 4 * plan(64).parameters() + names + 3 * 410 * 2 * 3;
        assert!((892_108_800..1 << 30).contains(&at_64), "{at_64} bytes");
    }
}
