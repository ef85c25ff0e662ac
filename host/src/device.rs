//! The devices of this build, and which kernels they resolve to.

use crate::config::WeightDtype;
use crate::error::{Error, Result};
use burn::tensor::Device;
use tunehost_kernels::simd::Isa;

/// The device that `name` names.
///
/// # Errors
/// `device::unavailable`.
pub fn open(name: &str) -> Result<Device> {
    match name {
        "cpu" => {
            tunehost_kernels::memory::keep_freed();
            Ok(Device::flex())
        }
        other => Err(Error::new("device::unavailable", format!("this build of tunehost cannot run on `{other}`"))
            .expected("cpu")
            .help("GPU devices are not built in yet; to try a configuration on the CPU: --set model.device=cpu")),
    }
}

/// What the f32 kernels resolve to: the CPU with the instruction set that was detected.
pub fn resolved_f32() -> String {
    format!("cpu-f32-{}", Isa::detect().name())
}

/// What the products with frozen matrices kept as `weights` resolve to.
pub fn resolved_products(weights: WeightDtype) -> String {
    let isa = Isa::detect();
    match weights {
        WeightDtype::F32 => resolved_f32(),
        WeightDtype::Bf16 if isa.multiplies_bf16() => format!("cpu-bf16-{}-bf16", isa.name()),
        WeightDtype::Bf16 => format!("cpu-bf16-widened-{}", isa.name()),
    }
}
