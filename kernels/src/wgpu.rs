//! The device that wgpu finds: Vulkan, Metal or DX12.

use cubecl::Device;
use cubecl::wgpu::wgpu::{Backends, Instance};

/// Every kernel that is launched while it lives, and so compiled, each once: WGSL is compiled anew by each process.
pub use cubecl::launched::LaunchedKernels;

/// What wgpu settled on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The adapter's name, as its driver says it.
    pub name: String,
    /// The language that kernels are compiled to, with the runtime: `wgpu<wgsl>`.
    pub runtime: &'static str,
}

/// The adapter that burn's default wgpu device computes on; asking for it makes the connection.
///
/// # Errors
/// The reason, where wgpu finds no adapter.
pub fn adapter() -> Result<Adapter, String> {
    let client = Device::wgpu(Default::default()).map_err(|error| error.to_string())?.client();
    Ok(Adapter { name: client.properties().identity.name.to_string(), runtime: client.name() })
}

/// The driver of the first adapter called `name`, and what it says of itself, such as its version: the runtime keeps the
/// adapter's name alone.
pub fn driver(name: &str) -> Option<String> {
    let adapters = cubecl::future::block_on(Instance::default().enumerate_adapters(Backends::all()));
    let info = adapters.iter().map(|adapter| adapter.get_info()).find(|info| info.name == name)?;
    Some(format!("{} {}", info.driver, info.driver_info).trim().to_string())
}
