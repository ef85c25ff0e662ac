//! Gated linear unit with the tanh form of GELU (Shazeer, "GLU variants improve transformer", 2020):
//! gelu_tanh(gate) * up, gelu_tanh(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

mod backend;
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod cube;
pub mod reference;

pub use backend::GluOps;

use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// gelu_tanh(gate) * up, elementwise, with gradients to both. Both inputs have the same shape and dtype, f32, f16 or bf16, which are those
/// of the result and the gradients too.
///
/// # Panics
/// If shapes or dtypes differ, or on another dtype; on the CPU on any but f32.
pub fn geglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    assert_eq!(gate.dims(), up.dims(), "gate and up differ in shape");
    assert_eq!(gate.dtype(), up.dtype(), "gate and up differ in dtype");
    let _span = trace::kernel("geglu", || Work::of(0, 3 * gate.shape().num_elements(), gate.dtype()));
    Tensor::from_dispatch(Dispatch::geglu(gate.into_dispatch(), up.into_dispatch()))
}

#[cfg(test)]
mod tests;
