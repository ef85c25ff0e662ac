//! The device that wgpu finds: Vulkan, Metal or DX12.

use cubecl::Device;

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
