//! The linear layer on cubecl.

use super::cpu::row_key;
use super::{Dropout, LinearOps};
use crate::cube::{activations, cover, empty, packed, units, upload};
use crate::matmul::cube::{product, product_beside};
use crate::resolve::cube::Math;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The finaliser of MurmurHash3, as on the CPU: every device drops the same elements.
#[cube]
fn element_hash(key: u32, col: u32) -> u32 {
    let mut h = key ^ ((col + 1u32) * 0x9e37_79b9u32);
    h = (h ^ (h >> 16u32)) * 0x85eb_ca6bu32;
    h = (h ^ (h >> 13u32)) * 0xc2b2_ae35u32;
    h ^ (h >> 16u32)
}

/// `y` = `x` with the elements gone that [`Dropout`] drops, or `y` plus that.
#[cube(launch)]
fn drop_out<X: Float, Y: Float>(
    x: &[X],
    keys: &[u32],
    y: &mut [Y],
    cols: usize,
    threshold: u32,
    factor: f32,
    #[comptime] add: bool,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let i = ABSOLUTE_POS;
    if i < y.len() {
        let kept = element_hash(keys[i / cols], (i % cols) as u32) >= threshold;
        let mut value = select(kept, f32::cast_from(x[i]) * factor, 0.0f32);
        if comptime!(add) {
            value += f32::cast_from(y[i]);
        }
        y[i] = Y::cast_from(value);
    }
}

/// Writes or adds to `y [n, cols]` what [`Dropout`] leaves of `x`.
fn drop_into(y: &CubeTensor, x: CubeTensor, Dropout { p, seed }: Dropout, add: bool) {
    assert!((0.0..1.0).contains(&p), "dropout must be in [0, 1), not {p}");
    let [n, cols] = x.shape().dims();
    let keys: Vec<u32> = (0..n as u64).map(|row| row_key(seed, row)).collect();
    let dtypes = [x.dtype, y.dtype].map(dtype_to_storage_type);
    drop_out::launch(
        &y.client,
        cover(n * cols),
        units(),
        x.into_buffer_arg(),
        upload(y, &keys).into_buffer_arg(),
        y.clone().into_buffer_arg(),
        cols,
        (p * 2f64.powi(32)) as u32,
        (1.0 / (1.0 - p)) as f32,
        add,
        dtypes,
    );
}

/// What [`Dropout`] leaves of `x`, as an operand of `math`; `x` itself without one.
fn dropped(x: CubeTensor, dropout: Option<Dropout>, math: Math) -> CubeTensor {
    let Some(dropout) = dropout else { return x };
    let y = empty(&x, x.shape(), math.kept(x.dtype));
    drop_into(&y, x, dropout, false);
    y
}

/// `x` times the weight, or its transpose.
fn frozen(x: CubeTensor, weight: CubeTensor, transposed: bool) -> CubeTensor {
    let (x, math) = (activations("linear", x), Math::with(&weight));
    let dtype = x.dtype;
    product((x, false), (weight, transposed), 1.0, dtype, math)
}

/// The result and the adapter's inner product.
pub(super) fn forward(
    x: CubeTensor,
    weight: CubeTensor,
    [a, b]: [CubeTensor; 2],
    scale: f64,
    dropout: Option<Dropout>,
    math: Math,
) -> (CubeTensor, CubeTensor) {
    let x = activations("lora_linear", x);
    let [a, b] = [a, b].map(|tensor| packed("lora_linear", tensor));
    let dtype = x.dtype;
    let whole = math.operand(x.clone());
    let thinned = if dropout.is_some() { dropped(x, dropout, math) } else { whole.clone() };
    let inner = product((thinned, false), (a, true), scale as f32, dtype, math);
    (product_beside((whole, false), (weight, true), [inner.clone(), b], dtype, math), inner)
}

/// The gradients of `x`, `a` and `b`.
pub(super) fn backward(
    [x, inner, d_y]: [CubeTensor; 3],
    weight: CubeTensor,
    [a, b]: [CubeTensor; 2],
    scale: f64,
    dropout: Option<Dropout>,
    math: Math,
) -> [CubeTensor; 3] {
    let [x, inner, d_y] = [x, inner, d_y].map(|tensor| activations("lora_linear", tensor));
    let [a, b] = [a, b].map(|tensor| packed("lora_linear", tensor));
    let dtype = x.dtype;
    let d_y = math.operand(d_y);
    let d_inner = product((d_y.clone(), false), (b, false), scale as f32, math.kept(dtype), math);
    let d_x = match dropout {
        None => product_beside((d_y.clone(), false), (weight, false), [d_inner.clone(), a], dtype, math),
        Some(dropout) => {
            let d_x = product((d_y.clone(), false), (weight, false), 1.0, dtype, math);
            let through_adapter = product((d_inner.clone(), false), (a, false), 1.0, dtype, math);
            drop_into(&d_x, through_adapter, dropout, true);
            d_x
        }
    };
    let d_a = product((d_inner, true), (dropped(x, dropout, math), false), 1.0, DType::F32, math);
    let d_b = product((d_y, true), (inner, false), 1.0, DType::F32, math);
    [d_x, d_a, d_b]
}

impl LinearOps for CubeBackend {
    fn frozen_linear(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        frozen(x, weight, true)
    }

    fn frozen_linear_known(_: CubeTensor, _: CubeTensor, y: CubeTensor) -> CubeTensor {
        y
    }

    fn frozen_linear_backward(weight: CubeTensor, d_y: CubeTensor) -> CubeTensor {
        frozen(d_y, weight, false)
    }

    fn lora_linear(
        x: CubeTensor,
        weight: CubeTensor,
        a: CubeTensor,
        b: CubeTensor,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (CubeTensor, CubeTensor) {
        let math = Math::with(&weight);
        forward(x, weight, [a, b], scale, dropout, math)
    }

    fn lora_linear_known(
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        y: CubeTensor,
        _: CubeTensor,
        _: f64,
        _: Option<Dropout>,
    ) -> CubeTensor {
        y
    }

    fn lora_linear_backward(
        x: CubeTensor,
        weight: CubeTensor,
        a: CubeTensor,
        b: CubeTensor,
        inner: CubeTensor,
        d_y: CubeTensor,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let math = Math::with(&weight);
        let [d_x, d_a, d_b] = backward([x, inner, d_y], weight, [a, b], scale, dropout, math);
        (d_x, d_a, d_b)
    }
}
