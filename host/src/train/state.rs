//! Adapters and optimiser state as the files of a checkpoint, and back.

use super::optimizer::{AdamW, Moments};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, peft_names, tensor};
use crate::model::lora::LoraPlan;
use crate::model::peft::{read_tensors, tensor_file, weights_bytes};
use burn::tensor::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

/// Checkpoint file with the adapter's tensors under their PEFT names.
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";
/// Checkpoint file with AdamW's moments, named after the adapter's tensors with `.m` and `.v`.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// The bytes of [`ADAPTER_FILE`] and [`OPTIMIZER_FILE`].
pub fn to_files(adapter: &Adapter, optimizer: &AdamW) -> [(&'static str, Vec<u8>); 2] {
    let modules = adapter.plan.modules.iter().zip(&optimizer.moments);
    let moments = modules.flat_map(|(module, moments)| peft_names(module).into_iter().zip(moments));
    let optimizer = tensor_file(
        moments
            .flat_map(|(name, Moments { m, v })| [(format!("{name}.m"), m.clone()), (format!("{name}.v"), v.clone())]),
    );
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
    let mut take = |name: String, like: &Tensor<2>| -> Result<Tensor<2>> {
        match moments.remove(&name) {
            Some((shape, values)) if shape == like.dims() => Ok(tensor(shape, values, device)),
            _ => Err(Error::new(
                "run::bad_checkpoint",
                format!("{} has no fitting {name}", origin.join(OPTIMIZER_FILE).display()),
            )
            .expected(format!("shape {:?}", like.dims()))
            .help("resume from an earlier checkpoint")),
        }
    };
    let mut optimizer = AdamW::new(config, &adapter);
    optimizer.step = step;
    for (module, state) in adapter.plan.modules.iter().zip(&mut optimizer.moments) {
        for (name, state) in peft_names(module).into_iter().zip(state) {
            *state = Moments { m: take(format!("{name}.m"), &state.m)?, v: take(format!("{name}.v"), &state.v)? };
        }
    }
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
