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

/// gelu_tanh(gate) * up, elementwise, f32, with gradients to both. Both inputs have the same shape.
///
/// # Panics
/// If the shapes differ.
pub fn geglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    assert_eq!(gate.dims(), up.dims(), "gate and up differ in shape");
    let _span = trace::kernel("geglu", || Work::f32(0, 3 * gate.shape().num_elements()));
    Tensor::from_dispatch(Dispatch::geglu(gate.into_dispatch(), up.into_dispatch()))
}

#[cfg(test)]
mod tests;
