//! The gated linear unit on cubecl: one unit an element.

use super::GluOps;
use crate::cube::{alike, cover, empty, units};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// sqrt(2 / pi) and 0.044715 sqrt(2 / pi), both doubled: (1 + tanh u) / 2 is the logistic function of 2 u.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = 0.071_354_82;

/// The share of x that gelu keeps. The exponent is bounded: not every device's exp reaches infinity in order.
#[cube]
fn gelu_share(x: f32) -> f32 {
    let exponent = f32::min(0.0f32 - x * (LINEAR + CUBIC * x * x), 88.0f32);
    1.0f32 / (1.0f32 + f32::exp(exponent))
}

/// gelu(x).
#[cube]
pub(crate) fn gelu(x: f32) -> f32 {
    x * gelu_share(x)
}

/// The derivative of gelu.
#[cube]
pub(crate) fn gelu_derivative(x: f32) -> f32 {
    let s = gelu_share(x);
    s + x * s * (1.0f32 - s) * (LINEAR + 3.0f32 * CUBIC * x * x)
}

#[cube(launch)]
fn geglu<T: Float>(gate: &[T], up: &[T], out: &mut [T], #[define(T)] _dtype: ElemType) {
    let i = ABSOLUTE_POS;
    if i < out.len() {
        out[i] = T::cast_from(gelu(f32::cast_from(gate[i])) * f32::cast_from(up[i]));
    }
}

#[cube(launch)]
fn geglu_backward<T: Float>(
    gate: &[T],
    up: &[T],
    d_out: &[T],
    d_gate: &mut [T],
    d_up: &mut [T],
    #[define(T)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < d_out.len() {
        let (x, d) = (f32::cast_from(gate[i]), f32::cast_from(d_out[i]));
        d_gate[i] = T::cast_from(d * f32::cast_from(up[i]) * gelu_derivative(x));
        d_up[i] = T::cast_from(d * gelu(x));
    }
}

impl GluOps for CubeBackend {
    fn geglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        let [gate, up] = alike("geglu", [gate, up]);
        let out = empty(&gate, gate.shape(), gate.dtype);
        let dtype = dtype_to_storage_type(gate.dtype);
        geglu::launch(
            &gate.client.clone(),
            cover(out.shape().num_elements()),
            units(),
            gate.into_buffer_arg(),
            up.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            dtype,
        );
        out
    }

    fn geglu_backward(gate: CubeTensor, up: CubeTensor, d_out: CubeTensor) -> (CubeTensor, CubeTensor) {
        let [gate, up, d_out] = alike("geglu", [gate, up, d_out]);
        let [d_gate, d_up] = [(); 2].map(|()| empty(&gate, gate.shape(), gate.dtype));
        let dtype = dtype_to_storage_type(gate.dtype);
        geglu_backward::launch(
            &gate.client.clone(),
            cover(gate.shape().num_elements()),
            units(),
            gate.into_buffer_arg(),
            up.into_buffer_arg(),
            d_out.into_buffer_arg(),
            d_gate.clone().into_buffer_arg(),
            d_up.clone().into_buffer_arg(),
            dtype,
        );
        (d_gate, d_up)
    }
}
