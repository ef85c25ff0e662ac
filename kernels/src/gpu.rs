//! What is known of a device that a runtime of cubecl finds.

use crate::resolve::{self, Capabilities, Dtypes, Refusal, Table};
/// Every kernel that is launched while it lives, each once. A process compiles its kernels anew, so these were compiled.
#[cfg(feature = "cubecl")]
pub use cubecl::launched::LaunchedKernels;

/// What a runtime settled on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// Its name, as its driver says it.
    pub name: String,
    /// Its driver and what that says of itself, such as its version, where the runtime tells.
    pub driver: Option<String>,
    /// Whether it is a graphics card, and not a processor that stands in for one.
    pub is_card: bool,
    /// Its address on the PCI bus (`0000:01:00.0`), where the driver tells.
    pub pci: Option<String>,
    /// The runtime, with the language that kernels are compiled to where it has several: `wgpu<wgsl>`, `cuda`.
    pub(crate) runtime: &'static str,
    /// What it has beside f32.
    pub(crate) has: Capabilities,
}

impl Adapter {
    /// The device behind `client`: what its runtime says of it.
    #[cfg(feature = "cubecl")]
    pub(crate) fn new(client: &cubecl::client::Client) -> Self {
        let identity = &client.properties().identity;
        let pci = identity.physical.as_ref().and_then(|physical| physical.pci_address);
        Self {
            name: identity.name.to_string(),
            driver: None,
            is_card: true,
            pci: pci.map(|address| address.to_string()),
            runtime: client.name(),
            has: resolve::cube::capabilities(client),
        }
    }

    /// What every kernel of a step resolves to on it.
    ///
    /// # Errors
    /// On dtypes that it does not compute in.
    pub fn kernels(&self, dtypes: Dtypes) -> Result<Table, Refusal> {
        resolve::cubecl(self.runtime, self.has, dtypes)
    }
}

/// Memory that the allocator of a device holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// What tensors take.
    pub in_use_bytes: usize,
    /// What it has from the driver for that, and so gone for everybody else: with what of a page nobody asked for, and what was freed and
    /// is kept for whoever asks next.
    pub reserved_bytes: usize,
}

impl Held {
    /// That of the device behind `client`.
    #[cfg(feature = "cubecl")]
    pub(crate) fn of(client: &cubecl::client::Client) -> Self {
        let usage = client.memory_report(cubecl::MemoryScope::Device).usage();
        Self { in_use_bytes: usage.bytes_in_use as usize, reserved_bytes: usage.bytes_reserved as usize }
    }
}
