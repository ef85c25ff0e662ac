//! AdamW on cubecl: one launch over a buffer.

use super::{AdamWOps, Scalars, Step, Write};
use crate::cube::{UNITS, cover, empty, line, packed, sum_units, units, upload};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use std::ops::Range;

/// Values that a cube sums the squares of.
const BLOCK: usize = 64 * UNITS;

#[cube(launch)]
fn adamw(
    values: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    gradient: &[f32],
    grad_factor: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    eps: f32,
    decay: f32,
    step_size: f32,
    correction: f32,
) {
    let i = ABSOLUTE_POS;
    if i < values.len() {
        let g = gradient[i] * grad_factor;
        let mean = m[i] * beta1 + g * rest1;
        let square = v[i] * beta2 + g * g * rest2;
        m[i] = mean;
        v[i] = square;
        let denominator = f32::sqrt(square) / correction + eps;
        values[i] = values[i] * decay - mean / denominator * step_size;
    }
}

/// `sums [parts, blocks]`: of the squares of each block of the part of `flat` from `starts` to `ends`.
#[cube(launch)]
fn squares(flat: &[f32], starts: &[u32], ends: &[u32], sums: &mut [f32], blocks: usize) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < sums.len();
    let part = select(wanted, CUBE_POS / blocks, 0usize);
    let first = starts[part] as usize + CUBE_POS % blocks * BLOCK;
    let end = select(wanted, usize::min(first + BLOCK, ends[part] as usize), 0usize);
    let mut sum = 0.0f32;
    let mut i = first + UNIT_POS as usize;
    while i < end {
        sum += flat[i] * flat[i];
        i += UNITS;
    }
    let sum = sum_units(sum, &mut partial);
    if wanted && UNIT_POS == 0 {
        sums[CUBE_POS] = sum;
    }
}

#[cube(launch)]
fn write(flat: &mut [f32], values: &[f32], start: usize, #[comptime] add: bool) {
    let i = ABSOLUTE_POS;
    if i < values.len() {
        let mut value = values[i];
        if add {
            value += flat[start + i];
        }
        flat[start + i] = value;
    }
}

/// `tensor` to be written to: itself where nobody else holds it.
fn writable(tensor: CubeTensor) -> CubeTensor {
    let tensor = packed("adamw", tensor);
    if tensor.can_mut() { tensor } else { tensor.copy() }
}

impl AdamWOps for CubeBackend {
    fn adamw(
        values: CubeTensor,
        m: CubeTensor,
        v: CubeTensor,
        gradient: CubeTensor,
        step: Step,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let [values, m, v] = [values, m, v].map(writable);
        let gradient = packed("adamw", gradient);
        let Scalars { grad_factor, betas, rests, eps, decay, step_size, correction } = step.scalars();
        adamw::launch(
            &values.client,
            cover(values.shape().num_elements()),
            units(),
            values.clone().into_buffer_arg(),
            m.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            gradient.into_buffer_arg(),
            grad_factor,
            betas[0],
            rests[0],
            betas[1],
            rests[1],
            eps,
            decay,
            step_size,
            correction,
        );
        (values, m, v)
    }

    fn sums_of_squares(flat: CubeTensor, parts: Vec<Range<usize>>) -> CubeTensor {
        let flat = packed("adamw", flat);
        let blocks = parts.iter().map(|part| part.len().div_ceil(BLOCK)).max().unwrap_or(0).max(1);
        let sums = empty(&flat, [parts.len(), blocks], DType::F32);
        let place = |of: fn(&Range<usize>) -> usize| -> Vec<u32> { parts.iter().map(|part| of(part) as u32).collect() };
        let (starts, ends) = (upload(&flat, &place(|part| part.start)), upload(&flat, &place(|part| part.end)));
        squares::launch(
            &flat.client.clone(),
            line(parts.len() * blocks),
            units(),
            flat.into_buffer_arg(),
            starts.into_buffer_arg(),
            ends.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            blocks,
        );
        sums
    }

    fn write_flat(flat: CubeTensor, start: usize, values: CubeTensor, write: Write) -> CubeTensor {
        let (flat, values) = (writable(flat), packed("adamw", values));
        self::write::launch(
            &flat.client,
            cover(values.shape().num_elements()),
            units(),
            flat.clone().into_buffer_arg(),
            values.into_buffer_arg(),
            start,
            write == Write::Add,
        );
        flat
    }
}
