//! The devices of this build, and which kernels they resolve to.

use crate::config::WeightDtype;
use crate::error::{Error, Result};
use crate::hash::sha256;
use crate::model::config::TextConfig;
use crate::run::card::Card;
use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::{DType, DeviceKind};
use std::collections::BTreeMap;
use tunehost_kernels::resolve;
use tunehost_kernels::simd::Isa;

/// The devices of this build, as configurations name them.
#[cfg(not(feature = "wgpu"))]
const BUILT_IN: &str = "cpu";
#[cfg(feature = "wgpu")]
const BUILT_IN: &str = "cpu, wgpu, or wgpu:N for the N-th discrete card from 0";

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
        #[cfg(feature = "wgpu")]
        name if wgpu(name).is_some() => {
            let card = wgpu(name).flatten();
            wgpu_adapter(card).map(|_| Device::wgpu(card.map_or_else(Default::default, DeviceKind::DiscreteGpu)))
        }
        other => Err(Error::new("device::unavailable", format!("this build of tunehost cannot run on `{other}`"))
            .expected(BUILT_IN)
            .help(
                "`wgpu` needs a build with `--features wgpu`, and no build has CUDA yet; to try a configuration on the \
                 CPU: --device cpu",
            )),
    }
}

/// Whether the device `name` takes the weights, the residual stream and the sizes of a model. None falls back to another device.
///
/// # Errors
/// `device::unsupported`, naming the kernel.
pub fn check(name: &str, weights: WeightDtype, residuals: WeightDtype, text: &TextConfig) -> Result<()> {
    #[cfg(feature = "wgpu")]
    if wgpu(name).is_some() {
        let unsupported = |kernel: &str, why: String| {
            Error::new("device::unsupported", format!("the kernel `{kernel}` cannot run on `{name}`: {why}"))
        };
        if weights != WeightDtype::F32 {
            return Err(unsupported("lora_linear", format!("it has no weights in {}", weights.name()))
                .expected("model.weights = \"f32\"")
                .help("WGSL has no bf16: keep the base in f32 (--set model.weights=f32), or run on the CPU"));
        }
        if residuals != WeightDtype::F32 {
            let what = format!("`{name}` keeps no residual stream in {}: WGSL has no bf16", residuals.name());
            return Err(Error::new("device::unsupported", what)
                .expected("train.residuals = \"f32\"")
                .help("--set train.residuals=f32, or run on the CPU"));
        }
        let most = tunehost_kernels::attention::cube::MAX_DIM;
        if let Some(layer) = text.layers.iter().find(|layer| layer.head_dim > most) {
            return Err(unsupported("windowed_attention", format!("the base has heads of {} values", layer.head_dim))
                .expected(format!("head_dim up to {most}")));
        }
    }
    let _ = (name, weights, residuals, text);
    Ok(())
}

/// The device's hardware as its driver names it, where the device is not the CPU.
///
/// # Errors
/// `device::unavailable`.
pub fn hardware_name(name: &str) -> Result<Option<String>> {
    #[cfg(feature = "wgpu")]
    if let Some(card) = wgpu(name) {
        return wgpu_adapter(card).map(|adapter| Some(adapter.name));
    }
    let _ = name;
    Ok(None)
}

/// The driver of the device `name` as the device names it, where the device is not the CPU.
///
/// # Errors
/// `device::unavailable`.
pub fn driver(name: &str) -> Result<Option<String>> {
    #[cfg(feature = "wgpu")]
    if let Some(card) = wgpu(name) {
        return wgpu_adapter(card).map(|adapter| adapter.driver);
    }
    let _ = name;
    Ok(None)
}

/// The graphics card that the device `name` computes on, where it is one.
///
/// # Errors
/// `device::unavailable`.
pub fn card(name: &str) -> Result<Option<Card>> {
    #[cfg(feature = "wgpu")]
    if let Some(card) = wgpu(name) {
        let adapter = wgpu_adapter(card)?;
        return Ok(adapter.is_card.then(|| Card::new(std::path::Path::new("/"), adapter.pci)));
    }
    let _ = name;
    Ok(None)
}

/// The processes that NVIDIA's driver says compute on a card; none where it is another's, or does not tell.
pub fn computing(card: &Card) -> Vec<u32> {
    #[cfg(feature = "wgpu")]
    if let Some(processes) = nvml(card, |device| device.running_compute_processes()) {
        return processes.into_iter().map(|process| process.pid).collect();
    }
    let _ = card;
    Vec::new()
}

/// Free memory of a card, as its driver tells; nothing where it does not.
pub fn free_memory_bytes(card: &Card) -> Option<u64> {
    #[cfg(feature = "wgpu")]
    if let Some(memory) = nvml(card, |device| device.memory_info()) {
        return Some(memory.free);
    }
    card.free_memory_bytes()
}

/// What NVIDIA's management library answers of a card; nothing where either is not there.
#[cfg(feature = "wgpu")]
fn nvml<T>(
    card: &Card,
    ask: impl FnOnce(&nvml_wrapper::Device) -> std::result::Result<T, nvml_wrapper::error::NvmlError>,
) -> Option<T> {
    let nvml = nvml_wrapper::Nvml::init().ok()?;
    let device = nvml.device_by_pci_bus_id(card.pci()?).ok()?;
    ask(&device).ok()
}

/// What of the kernels of the device `name` is compiled in a run, in words.
pub fn compilation(name: &str) -> &'static str {
    match name {
        "cpu" => "nothing: the kernels are in the program, and the instruction set alone chooses among them",
        _ => "each kernel, by the driver and for its shapes, when it is first launched; none is chosen by measuring",
    }
}

/// Counts the kernels that are compiled for the device `name` from now on, until the count is asked for.
pub fn count_compiled(name: &str) -> Box<dyn FnOnce() -> u64> {
    #[cfg(feature = "wgpu")]
    if wgpu(name).is_some() {
        let launched = tunehost_kernels::wgpu::LaunchedKernels::new();
        return Box::new(|| launched.finish().len() as u64);
    }
    let _ = name;
    Box::new(|| 0)
}

/// What every kernel of a step resolves to on the device `name` with frozen matrices kept as `weights`, by the kernel's
/// name: who computes and in what, on the CPU with the instruction set that was detected. Nothing else is tried if that fails.
///
/// # Errors
/// `device::unavailable`.
pub fn kernels(name: &str, weights: WeightDtype) -> Result<[(&'static str, String); 7]> {
    #[cfg(feature = "wgpu")]
    if let Some(card) = wgpu(name) {
        let kept = match weights {
            WeightDtype::F32 => DType::F32,
            WeightDtype::Bf16 => DType::BF16,
        };
        return tunehost_kernels::wgpu::kernels(card, kept).map_err(|reason| no_adapter(card, &reason));
    }
    let _ = name;
    let isa = Isa::detect();
    let f32 = format!("cpu-f32-{}", isa.name());
    let products = match weights {
        WeightDtype::F32 => f32.clone(),
        WeightDtype::Bf16 if isa.multiplies_bf16() => format!("cpu-bf16-{}-bf16", isa.name()),
        WeightDtype::Bf16 => format!("cpu-bf16-widened-{}", isa.name()),
    };
    Ok(resolve::table(f32, products))
}

/// SHA-256 over kernels and what they resolve to, in any order: the same where every kernel is computed by the same
/// implementation, and so what a benchmark and a run are held against each other by.
pub fn kernels_sha256<'a>(resolved: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let by_name: BTreeMap<_, _> = resolved.into_iter().collect();
    let lines: String = by_name.into_iter().map(|(kernel, resolved)| format!("{kernel} {resolved}\n")).collect();
    sha256(lines.as_bytes())
}

/// Whether `name` is a device of wgpu; inside, the number of the discrete card that it pins.
#[cfg(feature = "wgpu")]
fn wgpu(name: &str) -> Option<Option<usize>> {
    match name.strip_prefix("wgpu")? {
        "" => Some(None),
        pinned => pinned.strip_prefix(':')?.parse().ok().map(Some),
    }
}

#[cfg(feature = "wgpu")]
fn wgpu_adapter(card: Option<usize>) -> Result<tunehost_kernels::wgpu::Adapter> {
    tunehost_kernels::wgpu::adapter(card).map_err(|reason| no_adapter(card, &reason))
}

#[cfg(feature = "wgpu")]
fn no_adapter(card: Option<usize>, reason: &str) -> Error {
    let which = card.map_or(String::new(), |card| format!(" that is the discrete card {card}"));
    Error::new("device::unavailable", format!("wgpu finds no device{which}: {reason}"))
        .expected("a driver for Vulkan, Metal or DX12")
        .help("on Debian without a GPU: apt-get install mesa-vulkan-drivers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_table_is_that_of_its_kernels_and_nothing_else() {
        let table = kernels("cpu", WeightDtype::F32).unwrap();
        let hash = |table: &[(&'static str, String)]| kernels_sha256(table.iter().map(|(name, by)| (*name, &by[..])));
        let mut changed = table.to_vec();
        changed.reverse();
        assert_eq!(hash(&table), hash(&changed));
        changed[0].1 = "another".into();
        assert_ne!(hash(&table), hash(&changed));
        assert_eq!(kernels_sha256([("b", "2"), ("a", "1")]), sha256(b"a 1\nb 2\n"));
    }
}
