//! The normalisation on cubecl: one cube a row.

use super::RmsNormKernel;
use super::backend::RmsNormOps;
use crate::cube::{UNITS, empty, line, packed, sum_units, units};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// 1 / sqrt(mean(x^2) + eps) of `dim` values, for all units of a cube.
#[cube]
pub(crate) fn inverse_rms(x: &[f32], start: usize, dim: usize, eps: f32, partial: &mut Shared<[f32]>) -> f32 {
    let mut squares = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < dim {
        squares += x[start + i] * x[start + i];
        i += UNITS;
    }
    1.0f32 / f32::sqrt(sum_units(squares, partial) / f32::cast_from(dim) + eps)
}

#[cube(launch)]
fn rms_norm(
    x: &[f32],
    weight: &[f32],
    residual: &[f32],
    y: &mut [f32],
    rows: usize,
    dim: usize,
    eps: f32,
    scale: f32,
    #[comptime] weighted: bool,
    #[comptime] added: bool,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < rows;
    let start = select(wanted, CUBE_POS * dim, 0usize);
    let r = inverse_rms(x, start, dim, eps, &mut partial);
    if wanted {
        let mut i = UNIT_POS as usize;
        while i < dim {
            let mut value = x[start + i] * r;
            if weighted {
                value *= weight[i];
            }
            if added {
                value = (value + residual[start + i]) * scale;
            }
            y[start + i] = value;
            i += UNITS;
        }
    }
}

/// dx = r g - x r^3 sum(g x) / dim with g = scale dy weight.
#[cube(launch)]
fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    rows: usize,
    dim: usize,
    eps: f32,
    scale: f32,
    #[comptime] weighted: bool,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < rows;
    let start = select(wanted, CUBE_POS * dim, 0usize);
    let mut squares = 0.0f32;
    let mut dot = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < dim {
        let value = x[start + i];
        let mut g = dy[start + i] * scale;
        if weighted {
            g *= weight[i];
        }
        squares += value * value;
        dot += g * value;
        i += UNITS;
    }
    let squares = sum_units(squares, &mut partial);
    let dot = sum_units(dot, &mut partial);
    let r = 1.0f32 / f32::sqrt(squares / f32::cast_from(dim) + eps);
    let through_r = r * r * r * dot / f32::cast_from(dim);
    if wanted {
        let mut i = UNIT_POS as usize;
        while i < dim {
            let mut g = dy[start + i] * scale;
            if weighted {
                g *= weight[i];
            }
            dx[start + i] = r * g - x[start + i] * through_r;
            i += UNITS;
        }
    }
}

impl RmsNormKernel for CubeBackend {
    fn forward(x: CubeTensor, weight: Option<CubeTensor>, eps: f64, residual: Option<(CubeTensor, f32)>) -> CubeTensor {
        let x = packed("rms_norm", x);
        let y = empty(&x, x.shape(), DType::F32);
        let [rows, dim] = x.shape().dims();
        let weighted = weight.is_some();
        // What is absent is not read: any buffer stands in.
        let weight = weight.map_or_else(|| x.clone(), |weight| packed("rms_norm", weight));
        let added = residual.is_some();
        let (residual, scale) = residual.map_or_else(|| (x.clone(), 1.0), |(r, scale)| (packed("rms_norm", r), scale));
        rms_norm::launch(
            &x.client.clone(),
            line(rows),
            units(),
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            residual.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            rows,
            dim,
            eps as f32,
            scale,
            weighted,
            added,
        );
        y
    }

    fn backward(x: CubeTensor, weight: Option<CubeTensor>, dy: CubeTensor, eps: f64, scale: f32) -> CubeTensor {
        let (x, dy) = (packed("rms_norm", x), packed("rms_norm", dy));
        let dx = empty(&x, x.shape(), DType::F32);
        let [rows, dim] = x.shape().dims();
        let weighted = weight.is_some();
        let weight = weight.map_or_else(|| x.clone(), |weight| packed("rms_norm", weight));
        rms_norm_backward::launch(
            &x.client.clone(),
            line(rows),
            units(),
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            dy.into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            rows,
            dim,
            eps as f32,
            scale,
            weighted,
        );
        dx
    }
}

impl RmsNormOps for CubeBackend {
    fn rms_norm(x: CubeTensor, weight: CubeTensor, eps: f64) -> CubeTensor {
        Self::forward(x, Some(weight), eps, None)
    }

    fn rms_norm_weightless(x: CubeTensor, eps: f64) -> CubeTensor {
        Self::forward(x, None, eps, None)
    }

    fn rms_norm_residual(x: CubeTensor, weight: CubeTensor, residual: CubeTensor, eps: f64, scale: f32) -> CubeTensor {
        Self::forward(x, Some(weight), eps, Some((residual, scale)))
    }
}
