//! The rotation on cubecl, one unit a pair, and with the norm before it, one cube a head.

use super::backend::{RopeKernel, RopeOps};
use super::cpu::Direction;
use crate::cube::{UNITS, activations, alike, cover, empty, line, packed, sum_units, units};
use crate::norm::cube::inverse_rms;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cube(launch)]
fn rotate<T: Float>(
    x: &[T],
    cos: &[f32],
    sin: &[f32],
    y: &mut [T],
    heads: usize,
    pairs: usize,
    sign: f32,
    #[define(T)] _dtype: ElemType,
) {
    let place = ABSOLUTE_POS;
    if place < x.len() / 2 {
        let head = place / pairs;
        let pair = place % pairs;
        let angle = head / heads * pairs + pair;
        let first = head * pairs * 2 + pair;
        let (a, b) = (f32::cast_from(x[first]), f32::cast_from(x[first + pairs]));
        let (c, s) = (cos[angle], sign * sin[angle]);
        y[first] = T::cast_from(a * c - b * s);
        y[first + pairs] = T::cast_from(b * c + a * s);
    }
}

/// The norm of a head, rotated.
#[cube(launch)]
fn norm_rotate<T: Float>(
    x: &[T],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    y: &mut [T],
    rows: usize,
    heads: usize,
    pairs: usize,
    eps: f32,
    #[define(T)] _dtype: ElemType,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < rows;
    let row = select(wanted, CUBE_POS, 0usize);
    let start = row * pairs * 2;
    let r = inverse_rms(x, start, pairs * 2, eps, &mut partial);
    if wanted {
        let mut pair = UNIT_POS as usize;
        while pair < pairs {
            let (first, angle) = (start + pair, row / heads * pairs + pair);
            let a = f32::cast_from(x[first]) * r * weight[pair];
            let b = f32::cast_from(x[first + pairs]) * r * weight[pair + pairs];
            y[first] = T::cast_from(a * cos[angle] - b * sin[angle]);
            y[first + pairs] = T::cast_from(b * cos[angle] + a * sin[angle]);
            pair += UNITS;
        }
    }
}

/// The gradient of a pair of the norm's results, times the weight.
#[cube]
fn turned_back<T: Float>(
    dy: &[T],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    row: usize,
    pair: usize,
    heads: usize,
    pairs: usize,
) -> (f32, f32) {
    let (first, angle) = (row * pairs * 2 + pair, row / heads * pairs + pair);
    let (a, b) = (f32::cast_from(dy[first]), f32::cast_from(dy[first + pairs]));
    let (c, s) = (cos[angle], sin[angle]);
    ((a * c + b * s) * weight[pair], (b * c - a * s) * weight[pair + pairs])
}

/// The gradient of [`norm_rotate`]: with g as [`turned_back`], dx = r g - x r^3 sum(g x) / dim.
#[cube(launch)]
fn norm_rotate_backward<T: Float>(
    x: &[T],
    weight: &[f32],
    cos: &[f32],
    sin: &[f32],
    dy: &[T],
    dx: &mut [T],
    rows: usize,
    heads: usize,
    pairs: usize,
    eps: f32,
    #[define(T)] _dtype: ElemType,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < rows;
    let row = select(wanted, CUBE_POS, 0usize);
    let start = row * pairs * 2;
    let r = inverse_rms(x, start, pairs * 2, eps, &mut partial);
    let mut dot = 0.0f32;
    let mut pair = UNIT_POS as usize;
    while pair < pairs {
        let (a, b) = turned_back(dy, weight, cos, sin, row, pair, heads, pairs);
        dot += a * f32::cast_from(x[start + pair]) + b * f32::cast_from(x[start + pair + pairs]);
        pair += UNITS;
    }
    let through_r = r * r * r * sum_units(dot, &mut partial) / f32::cast_from(pairs * 2);
    if wanted {
        let mut pair = UNIT_POS as usize;
        while pair < pairs {
            let (a, b) = turned_back(dy, weight, cos, sin, row, pair, heads, pairs);
            let (of_a, of_b) = (f32::cast_from(x[start + pair]), f32::cast_from(x[start + pair + pairs]));
            dx[start + pair] = T::cast_from(r * a - of_a * through_r);
            dx[start + pair + pairs] = T::cast_from(r * b - of_b * through_r);
            pair += UNITS;
        }
    }
}

impl RopeKernel for CubeBackend {
    fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, direction: Direction) -> CubeTensor {
        let x = activations("rope", x);
        let [cos, sin] = [cos, sin].map(|tensor| packed("rope", tensor));
        let y = empty(&x, x.shape(), x.dtype);
        let [tokens, heads, head_dim] = x.shape().dims();
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Backward => -1.0,
        };
        let dtype = dtype_to_storage_type(x.dtype);
        rotate::launch(
            &x.client.clone(),
            cover(tokens * heads * head_dim / 2),
            units(),
            x.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            heads,
            head_dim / 2,
            sign,
            dtype,
        );
        y
    }
}

impl RopeOps for CubeBackend {
    fn rope(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
        Self::rotate(x, cos, sin, Direction::Forward)
    }

    fn rms_norm_rope(x: CubeTensor, weight: CubeTensor, cos: CubeTensor, sin: CubeTensor, eps: f64) -> CubeTensor {
        let x = activations("rope with rms_norm", x);
        let [weight, cos, sin] = [weight, cos, sin].map(|tensor| packed("rope with rms_norm", tensor));
        let y = empty(&x, x.shape(), x.dtype);
        let [tokens, heads, head_dim] = x.shape().dims();
        let dtype = dtype_to_storage_type(x.dtype);
        norm_rotate::launch(
            &x.client.clone(),
            line(tokens * heads),
            units(),
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            tokens * heads,
            heads,
            head_dim / 2,
            eps as f32,
            dtype,
        );
        y
    }

    fn rms_norm_rope_backward(
        x: CubeTensor,
        weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        dy: CubeTensor,
        eps: f64,
    ) -> CubeTensor {
        let [x, dy] = alike("rope with rms_norm", [x, dy]);
        let [weight, cos, sin] = [weight, cos, sin].map(|tensor| packed("rope with rms_norm", tensor));
        let dx = empty(&x, x.shape(), x.dtype);
        let [tokens, heads, head_dim] = x.shape().dims();
        let dtype = dtype_to_storage_type(x.dtype);
        norm_rotate_backward::launch(
            &x.client.clone(),
            line(tokens * heads),
            units(),
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            cos.into_buffer_arg(),
            sin.into_buffer_arg(),
            dy.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            tokens * heads,
            heads,
            head_dim / 2,
            eps as f32,
            dtype,
        );
        dx
    }
}
