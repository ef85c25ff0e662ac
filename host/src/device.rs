//! The devices of this build, and which kernels they resolve to.

use crate::config::WeightDtype;
use crate::error::{Error, Result};
use crate::model::config::TextConfig;
use crate::run::card::Card;
use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use nvml_wrapper::{Nvml, error::NvmlError};
use tunehost_kernels::gpu::Adapter;
pub use tunehost_kernels::gpu::Held;
pub use tunehost_kernels::resolve::sha256 as kernels_sha256;
use tunehost_kernels::resolve::{self, Dtypes, Refusal, Table};

/// A device, as configurations name it.
#[derive(Clone, Copy)]
enum Name {
    Cpu,
    /// What wgpu finds; inside, the number of the discrete card that it pins.
    #[cfg(feature = "wgpu")]
    Wgpu(Option<usize>),
    /// What CUDA counts as this one.
    #[cfg(feature = "cuda")]
    Cuda(u16),
}

impl Name {
    fn parse(name: &str) -> Result<Self> {
        let of_build = match name.split_once(':') {
            None if name == "cpu" => Some(Self::Cpu),
            #[cfg(feature = "wgpu")]
            None if name == "wgpu" => Some(Self::Wgpu(None)),
            #[cfg(feature = "wgpu")]
            Some(("wgpu", card)) => card.parse().ok().map(|card| Self::Wgpu(Some(card))),
            #[cfg(feature = "cuda")]
            Some(("cuda", index)) => index.parse().ok().map(Self::Cuda),
            _ => None,
        };
        of_build.ok_or_else(|| {
            Error::new("device::unavailable", format!("this build of tunehost cannot run on `{name}`"))
                .expected(built_in())
                .help(
                    "`wgpu` needs a build with `--features wgpu`, `cuda:0` one with `--features cuda`; to try a configuration \
                     on the CPU: --device cpu",
                )
        })
    }

    /// What the device's runtime settled on, where the device is not the CPU.
    fn adapter(self) -> Result<Option<Adapter>> {
        match self {
            Self::Cpu => Ok(None),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(card) => tunehost_kernels::wgpu::adapter(card).map(Some).map_err(|reason| {
                let which = card.map_or(String::new(), |card| format!(" that is the discrete card {card}"));
                Error::new("device::unavailable", format!("wgpu finds no device{which}: {reason}"))
                    .expected("a driver for Vulkan, Metal or DX12")
                    .help("on Debian without a GPU: apt-get install mesa-vulkan-drivers")
            }),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => tunehost_kernels::cuda::adapter(index.into()).map(Some).map_err(|reason| {
                Error::new("device::unavailable", format!("`cuda:{index}` cannot be used: {reason}"))
                    .expected("an NVIDIA GPU that `nvidia-smi` lists, and the CUDA toolkit with NVRTC")
                    .help("to try the configuration on the CPU: --device cpu")
            }),
        }
    }
}

/// The devices of this build, as configurations name them.
fn built_in() -> &'static str {
    match (cfg!(feature = "wgpu"), cfg!(feature = "cuda")) {
        (false, false) => "cpu",
        (true, false) => "cpu, wgpu, or wgpu:N for the N-th discrete card from 0",
        (false, true) => "cpu, or cuda:N for the N-th device of CUDA from 0",
        (true, true) => "cpu, wgpu, wgpu:N for the N-th discrete card from 0, or cuda:N for the N-th device of CUDA",
    }
}

/// The device that `name` names.
///
/// # Errors
/// `device::unavailable`.
pub fn open(name: &str) -> Result<Device> {
    let name = Name::parse(name)?;
    name.adapter()?;
    Ok(match name {
        Name::Cpu => {
            tunehost_kernels::memory::keep_freed();
            Device::flex()
        }
        #[cfg(feature = "wgpu")]
        Name::Wgpu(card) => Device::wgpu(card.map_or_else(Default::default, DeviceKind::DiscreteGpu)),
        #[cfg(feature = "cuda")]
        Name::Cuda(index) => Device::cuda(usize::from(index)),
    })
}

/// Whether the device `name` takes what a model's tensors are kept in, its residual stream and its sizes. None falls back to another
/// device.
///
/// # Errors
/// `device::unavailable`; `device::unsupported`, naming the kernel.
pub fn check(name: &str, dtypes: Dtypes, residuals: WeightDtype, text: &TextConfig) -> Result<()> {
    let device = Name::parse(name)?;
    kernels(name, dtypes)?;
    #[cfg(feature = "wgpu")]
    if let (Name::Wgpu(_), true) = (device, residuals != WeightDtype::F32) {
        let what = format!("`{name}` keeps no residual stream in {}: WGSL has no bf16", residuals.name());
        return Err(Error::new("device::unsupported", what)
            .expected("train.residuals = \"f32\"")
            .help("--set train.residuals=f32, or run on the CPU"));
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if !matches!(device, Name::Cpu) {
        let most = tunehost_kernels::attention::cube::MAX_DIM;
        if let Some(layer) = text.layers.iter().find(|layer| layer.head_dim > most) {
            let why = format!("the base has heads of {} values", layer.head_dim);
            return Err(unsupported(name, "windowed_attention", &why).expected(format!("head_dim up to {most}")));
        }
    }
    let _ = (device, residuals, text);
    Ok(())
}

fn unsupported(device: &str, kernel: &str, why: &str) -> Error {
    Error::new("device::unsupported", format!("the kernel `{kernel}` cannot run on `{device}`: {why}"))
}

/// The device's hardware as its driver names it, where the device is not the CPU.
///
/// # Errors
/// `device::unavailable`.
pub fn hardware_name(name: &str) -> Result<Option<String>> {
    Ok(Name::parse(name)?.adapter()?.map(|adapter| adapter.name))
}

/// The driver of the device `name` as it names itself, where the device is not the CPU.
///
/// # Errors
/// `device::unavailable`.
pub fn driver(name: &str) -> Result<Option<String>> {
    let device = Name::parse(name)?;
    let adapter = device.adapter()?;
    // CUDA does not tell.
    #[cfg(feature = "cuda")]
    if let Name::Cuda(_) = device {
        return Ok(nvml(|nvml| nvml.sys_driver_version()).map(|version| format!("NVIDIA {version}")));
    }
    Ok(adapter.and_then(|adapter| adapter.driver))
}

/// The graphics card that the device `name` computes on, where it is one.
///
/// # Errors
/// `device::unavailable`.
pub fn card(name: &str) -> Result<Option<Card>> {
    let adapter = Name::parse(name)?.adapter()?.filter(|adapter| adapter.is_card);
    Ok(adapter.map(|adapter| Card::new(std::path::Path::new("/"), adapter.pci)))
}

/// The processes that NVIDIA's driver says compute on a card; none where it is another's, or does not tell.
pub fn computing(card: &Card) -> Vec<u32> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let Some(processes) = nvml_of(card, |device| device.running_compute_processes()) {
        return processes.into_iter().map(|process| process.pid).collect();
    }
    let _ = card;
    Vec::new()
}

/// Free memory of a card, as its driver tells; nothing where it does not.
pub fn free_memory_bytes(card: &Card) -> Option<u64> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let Some(memory) = nvml_of(card, |device| device.memory_info()) {
        return Some(memory.free);
    }
    card.free_memory_bytes()
}

/// Memory of the device `name` that this process holds now, as its allocator tells; nothing where the device is the CPU, whose memory
/// the system tells ([`resident_bytes`](crate::run::machine::resident_bytes)), or there is none.
pub fn held(name: &str) -> Option<Held> {
    match Name::parse(name).ok()? {
        Name::Cpu => None,
        #[cfg(feature = "wgpu")]
        Name::Wgpu(card) => tunehost_kernels::wgpu::held(card).ok(),
        #[cfg(feature = "cuda")]
        Name::Cuda(index) => tunehost_kernels::cuda::held(index.into()).ok(),
    }
}

/// What NVIDIA's management library answers; nothing where it is not there.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn nvml<T>(ask: impl FnOnce(&Nvml) -> std::result::Result<T, NvmlError>) -> Option<T> {
    ask(&Nvml::init().ok()?).ok()
}

/// What it answers of a card; nothing where it does not know that.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn nvml_of<T>(card: &Card, ask: impl FnOnce(&nvml_wrapper::Device) -> std::result::Result<T, NvmlError>) -> Option<T> {
    let pci = card.pci()?;
    nvml(|nvml| ask(&nvml.device_by_pci_bus_id(pci)?))
}

/// What of the kernels of the device `name` is compiled in a run, in words.
pub fn compilation(name: &str) -> &'static str {
    match name {
        "cpu" => "nothing: the kernels are in the program, and the instruction set alone chooses among them",
        cuda if cuda.starts_with("cuda") => {
            "each kernel, by NVRTC and for its shapes, once, when it is first launched; none is chosen by measuring"
        }
        _ => "each kernel, by the driver and for its shapes, when it is first launched; none is chosen by measuring",
    }
}

/// Counts the kernels that are compiled for the device `name` from now on, until the count is asked for.
pub fn count_compiled(name: &str) -> Box<dyn FnOnce() -> u64> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if name != "cpu" {
        let launched = tunehost_kernels::gpu::LaunchedKernels::new();
        return Box::new(|| launched.finish().len() as u64);
    }
    let _ = name;
    Box::new(|| 0)
}

/// What every kernel of a step resolves to on the device `name` with tensors in `dtypes`, by the kernel's name: who computes and in what,
/// on the CPU with the instruction set that was detected. Nothing else is tried if that fails.
///
/// # Errors
/// `device::unavailable`; `device::unsupported`, naming the kernel that does not take them.
pub fn kernels(name: &str, dtypes: Dtypes) -> Result<Table> {
    let table = match Name::parse(name)?.adapter()? {
        None => resolve::cpu(dtypes),
        Some(adapter) => adapter.kernels(dtypes),
    };
    table.map_err(|Refusal { kernel, why, takes: Dtypes { weights, activations } }| {
        let [weights, activations] = [weights, activations].map(|dtype| dtype.name());
        unsupported(name, kernel, &why)
            .expected(format!("such as model.weights = \"{weights}\" and train.activations = \"{activations}\""))
            .help(format!(
                "--set model.weights={weights} --set train.activations={activations}; reference.toml says which device takes what"
            ))
    })
}
