//! The linear layer on cubecl.

use super::cpu::row_key;
use super::{Dropout, LinearOps};
use crate::cube::{cover, empty, packed, units, upload};
use crate::matmul::cube::{product, product_beside};
use crate::resolve::cube::Math;
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::add;
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

#[cube(launch)]
fn drop_out(x: &[f32], keys: &[u32], y: &mut [f32], cols: usize, threshold: u32, factor: f32) {
    let i = ABSOLUTE_POS;
    if i < y.len() {
        let kept = element_hash(keys[i / cols], (i % cols) as u32) >= threshold;
        y[i] = select(kept, x[i] * factor, 0.0f32);
    }
}

/// `x [n, cols]` with the elements gone that [`Dropout`] drops; `x` itself without one.
fn dropped(x: CubeTensor, dropout: Option<Dropout>) -> CubeTensor {
    let Some(Dropout { p, seed }) = dropout else { return x };
    assert!((0.0..1.0).contains(&p), "dropout must be in [0, 1), not {p}");
    let [n, cols] = x.shape().dims();
    let keys: Vec<u32> = (0..n as u64).map(|row| row_key(seed, row)).collect();
    let y = empty(&x, [n, cols], DType::F32);
    drop_out::launch(
        &x.client.clone(),
        cover(n * cols),
        units(),
        x.clone().into_buffer_arg(),
        upload(&x, &keys).into_buffer_arg(),
        y.clone().into_buffer_arg(),
        cols,
        (p * 2f64.powi(32)) as u32,
        (1.0 / (1.0 - p)) as f32,
    );
    y
}

impl LinearOps for CubeBackend {
    fn frozen_linear(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let math = Math::with(&weight);
        product((packed("linear", x), false), (weight, true), 1.0, math)
    }

    fn frozen_linear_known(_: CubeTensor, _: CubeTensor, y: CubeTensor) -> CubeTensor {
        y
    }

    fn frozen_linear_backward(weight: CubeTensor, d_y: CubeTensor) -> CubeTensor {
        let math = Math::with(&weight);
        product((packed("linear", d_y), false), (weight, false), 1.0, math)
    }

    fn lora_linear(
        x: CubeTensor,
        weight: CubeTensor,
        a: CubeTensor,
        b: CubeTensor,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (CubeTensor, CubeTensor) {
        let [x, a, b] = [x, a, b].map(|tensor| packed("lora_linear", tensor));
        let math = Math::with(&weight);
        let whole = math.operand(x.clone());
        let thinned = if dropout.is_some() { dropped(x, dropout) } else { whole.clone() };
        let inner = product((thinned, false), (a, true), scale as f32, math);
        (product_beside((whole, false), (weight, true), [inner.clone(), b], math), inner)
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
        let [x, a, b, inner, d_y] = [x, a, b, inner, d_y].map(|tensor| packed("lora_linear", tensor));
        let math = Math::with(&weight);
        let d_y = math.operand(d_y);
        let d_inner = math.operand(product((d_y.clone(), false), (b, false), scale as f32, math));
        let d_x = match dropout {
            None => product_beside((d_y.clone(), false), (weight, false), [d_inner.clone(), a], math),
            Some(_) => {
                let base = product((d_y.clone(), false), (weight, false), 1.0, math);
                add(base, dropped(product((d_inner.clone(), false), (a, false), 1.0, math), dropout))
            }
        };
        let d_a = product((d_inner, true), (dropped(x, dropout), false), 1.0, math);
        let d_b = product((d_y, true), (inner, false), 1.0, math);
        (d_x, d_a, d_b)
    }
}
