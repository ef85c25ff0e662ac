//! What numbers are kept in, as configurations name it.

use super::Config;
use burn::tensor::DType;
use serde::{Deserialize, Serialize};
use tunehost_kernels::resolve::Dtypes;

impl Config {
    /// What a step's tensors are kept in, as the kernels are asked for it.
    pub fn dtypes(&self) -> Dtypes {
        Dtypes { weights: self.model.weights.dtype(), activations: self.train.activations.dtype() }
    }
}

/// How the base's frozen matrices (linear modules, experts, embedding and head) are kept and multiplied. Norms, router,
/// adapters and sums are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtype {
    /// Widened when they are loaded: four bytes a parameter.
    #[default]
    F32,
    /// Kept in bf16 (rounded to nearest even where the file has more): two bytes a parameter. Where the CPU has AVX-512
    /// BF16, the other operand of a product is rounded to bf16 too, which is what makes it fast; elsewhere it is not.
    Bf16,
}

impl WeightDtype {
    /// As a configuration spells it.
    pub fn name(self) -> &'static str {
        match self {
            WeightDtype::F32 => "f32",
            WeightDtype::Bf16 => "bf16",
        }
    }

    /// As tensors have it.
    pub fn dtype(self) -> DType {
        match self {
            WeightDtype::F32 => DType::F32,
            WeightDtype::Bf16 => DType::BF16,
        }
    }

    /// With activations in f32, in which everything but a run computes.
    pub fn beside_f32(self) -> Dtypes {
        Dtypes { weights: self.dtype(), activations: DType::F32 }
    }

    /// Bytes of a value.
    pub fn size_bytes(self) -> usize {
        match self {
            WeightDtype::F32 => 4,
            WeightDtype::Bf16 => 2,
        }
    }
}

/// What the operations of a layer and the loss head pass to each other. The residual stream, router, adapters and sums are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationDtype {
    /// Four bytes a value.
    #[default]
    F32,
    /// Rounded by every operation to bf16: on CUDA devices, beside weights in bf16.
    Bf16,
    /// Rounded by every operation to f16: on devices without matrix instructions for bf16, beside weights in f32.
    F16,
}

impl ActivationDtype {
    /// As a configuration spells it.
    pub fn name(self) -> &'static str {
        self.dtype().name()
    }

    /// As tensors have it.
    pub fn dtype(self) -> DType {
        match self {
            ActivationDtype::F32 => DType::F32,
            ActivationDtype::Bf16 => DType::BF16,
            ActivationDtype::F16 => DType::F16,
        }
    }
}
