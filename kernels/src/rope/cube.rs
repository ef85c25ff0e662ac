//! The rotation on cubecl: one unit a pair.

use super::backend::{RopeKernel, RopeOps};
use super::cpu::Direction;
use crate::cube::{cover, empty, packed, units};
use crate::norm::RmsNormKernel;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cube(launch)]
fn rotate(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32], heads: usize, pairs: usize, sign: f32) {
    let place = ABSOLUTE_POS;
    if place < x.len() / 2 {
        let head = place / pairs;
        let pair = place % pairs;
        let angle = head / heads * pairs + pair;
        let first = head * pairs * 2 + pair;
        let (a, b) = (x[first], x[first + pairs]);
        let (c, s) = (cos[angle], sign * sin[angle]);
        y[first] = a * c - b * s;
        y[first + pairs] = b * c + a * s;
    }
}

impl RopeKernel for CubeBackend {
    fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, direction: Direction) -> CubeTensor {
        let [x, cos, sin] = [x, cos, sin].map(|tensor| packed("rope", tensor));
        let y = empty(&x, x.shape(), DType::F32);
        let [tokens, heads, head_dim] = x.shape().dims();
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Backward => -1.0,
        };
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
        );
        y
    }
}

/// `[tokens, heads, head_dim]` as `[tokens * heads, head_dim]`.
fn rows_of_heads(x: CubeTensor) -> CubeTensor {
    let [tokens, heads, head_dim] = x.shape().dims();
    CubeBackend::float_reshape(x, [tokens * heads, head_dim].into())
}

impl RopeOps for CubeBackend {
    fn rope(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
        Self::rotate(x, cos, sin, Direction::Forward)
    }

    fn rms_norm_rope(x: CubeTensor, weight: CubeTensor, cos: CubeTensor, sin: CubeTensor, eps: f64) -> CubeTensor {
        let shape = x.shape();
        let normed = <Self as RmsNormKernel>::forward(rows_of_heads(x), Some(weight), eps, None);
        Self::rotate(Self::float_reshape(normed, shape), cos, sin, Direction::Forward)
    }

    fn rms_norm_rope_backward(
        x: CubeTensor,
        weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        dy: CubeTensor,
        eps: f64,
    ) -> CubeTensor {
        let shape = x.shape();
        let d_normed = rows_of_heads(Self::rotate(dy, cos, sin, Direction::Backward));
        let dx = <Self as RmsNormKernel>::backward(rows_of_heads(x), Some(weight), d_normed, eps, 1.0);
        Self::float_reshape(dx, shape)
    }
}
