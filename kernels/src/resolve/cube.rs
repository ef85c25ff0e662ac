//! On a cubecl device it is decided here alone, from what the device's runtime says of it: the operations ask [`math`], a
//! program prints and records [`crate::gpu::Adapter::kernels`].

use super::Capabilities;
use crate::mma::Unit;
use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};

/// What products, and those of the attention, compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Math {
    /// f32 throughout; bf16 operands are widened.
    F32,
    /// Operands rounded to 16 bits, sums in f32.
    Half {
        /// bf16; f16 in tests of the emulation, since WGSL has no bf16.
        operands: DType,
        /// Who multiplies.
        unit: Unit,
    },
}

impl Math {
    /// What an operation that takes `activations` keeps its own products in, for its next ones.
    pub(crate) fn kept(self, activations: DType) -> DType {
        match self {
            Self::F32 => activations,
            Self::Half { operands, .. } => operands,
        }
    }
}

/// That of products with frozen matrices kept as `weights`, of the adapters beside them, and of the attention.
pub(crate) fn math(client: &Client, weights: DType) -> Math {
    match weights {
        DType::BF16 if lacks_mma(client).is_none() => Math::Half { operands: DType::BF16, unit: Unit::Native },
        _ => Math::F32,
    }
}

/// What the device has beside f32.
pub(crate) fn capabilities(client: &Client) -> Capabilities {
    let has = |kind| client.features().supports_type(ElemType::Float(kind));
    Capabilities { f16: has(FloatKind::F16), bf16: has(FloatKind::BF16), lacks_mma: lacks_mma(client) }
}

/// What the device lacks of [`Unit::Native`] for bf16.
fn lacks_mma(client: &Client) -> Option<&'static str> {
    let (bf16, f32) = (ElemType::Float(FloatKind::BF16), ElemType::Float(FloatKind::F32));
    let features = client.features();
    let multiplies =
        features.matmul.mma.iter().any(|mma| {
            (mma.a_type, mma.b_type, mma.cd_type) == (bf16, bf16, f32) && (mma.m, mma.n, mma.k) == (16, 8, 16)
        });
    match () {
        _ if !multiplies => Some("mma.m16n8k16"),
        _ if !features.matmul.ldmatrix.contains(&bf16) => Some("ldmatrix"),
        _ if !features.copy_async => Some("cp.async"),
        _ => None,
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_matrix_instructions_says_what_it_lacks() {
        let client = cubecl::Device::wgpu(Default::default()).expect("a device").client();
        let of_wgsl = Capabilities { f16: true, bf16: false, lacks_mma: Some("mma.m16n8k16") };
        assert_eq!(capabilities(&client), of_wgsl);
    }
}
