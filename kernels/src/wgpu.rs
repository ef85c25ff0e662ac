//! The device that wgpu finds: Vulkan, Metal or DX12.

use crate::gpu::{Adapter, Held};
use cubecl::Device;
use cubecl::client::Client;
use cubecl::wgpu::WgpuDeviceKind;
use cubecl::wgpu::wgpu::{AdapterInfo, Backends, DeviceType, Instance, InstanceDescriptor};

/// The adapter of the discrete card of this number, from 0, or the one that burn's default wgpu device computes on; asking for it
/// makes the connection.
///
/// # Errors
/// The reason, where wgpu finds no adapter.
pub fn adapter(discrete: Option<usize>) -> Result<Adapter, String> {
    let client = client(discrete)?;
    let adapter = Adapter::new(&client);
    let info = info(&adapter.name, discrete);
    Ok(Adapter {
        driver: info.as_ref().map(|info| format!("{} {}", info.driver, info.driver_info).trim().to_string()),
        is_card: info.as_ref().is_some_and(|info| info.device_type != DeviceType::Cpu),
        pci: info.map(|info| info.device_pci_bus_id).filter(|pci| !pci.is_empty()),
        ..adapter
    })
}

/// Memory that the allocator of that adapter holds now.
///
/// # Errors
/// As [`adapter`].
pub fn held(discrete: Option<usize>) -> Result<Held, String> {
    Ok(Held::of(&client(discrete)?))
}

fn client(discrete: Option<usize>) -> Result<Client, String> {
    let kind = discrete.map_or_else(WgpuDeviceKind::default, WgpuDeviceKind::DiscreteGpu);
    Ok(Device::wgpu(kind).map_err(|error| error.to_string())?.client())
}

/// What wgpu says of an adapter, of which the runtime keeps the name alone: the discrete card of this number, or the first of
/// the name. OpenGL, which shows cards a second time, is asked where nothing else shows any.
fn info(name: &str, discrete: Option<usize>) -> Option<AdapterInfo> {
    let mut infos = infos(Backends::all() - Backends::GL);
    if infos.is_empty() {
        infos = self::infos(Backends::GL);
    }
    let mut infos = infos.into_iter();
    match discrete {
        Some(number) => infos.filter(|info| info.device_type == DeviceType::DiscreteGpu).nth(number),
        None => infos.find(|info| info.name == name),
    }
}

fn infos(backends: Backends) -> Vec<AdapterInfo> {
    let instance = Instance::new(InstanceDescriptor { backends, ..InstanceDescriptor::new_without_display_handle() });
    let adapters = cubecl::future::block_on(instance.enumerate_adapters(backends));
    adapters.iter().map(|adapter| adapter.get_info()).collect()
}
