//! The gated linear unit on f32 slices.

use crate::flex::unwritten;
use crate::simd::{self, Isa, vectorised};
use rayon::prelude::*;

/// Elements of one task.
const CHUNK: usize = 16 * 1024;

/// sqrt(2 / pi) and 0.044715 sqrt(2 / pi), both doubled: (1 + tanh u) / 2 is the logistic function of 2 u.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = 0.071_354_82;

#[inline(always)]
fn gelu(x: f32) -> f32 {
    x * simd::sigmoid(x * (LINEAR + CUBIC * x * x))
}

/// gelu(x) and its derivative.
#[inline(always)]
fn gelu_with_derivative(x: f32) -> (f32, f32) {
    let e = simd::exp(-x * (LINEAR + CUBIC * x * x));
    let s = 1.0 / (1.0 + e);
    // e s is 1 - s without cancellation.
    (x * s, s + x * s * (e * s) * (LINEAR + 3.0 * CUBIC * x * x))
}

vectorised! {
    /// out = gelu(gate) * up.
    pub(crate) fn geglu_into(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = gelu(gate) * up;
        }
    }
}

vectorised! {
    /// Replaces gate and up by their gradients for the gradient `d_out` of the output.
    pub(crate) fn geglu_backward_in_place(gate: &mut [f32], up: &mut [f32], d_out: &[f32]) {
        for ((gate, up), &d_out) in gate.iter_mut().zip(up.iter_mut()).zip(d_out) {
            let (value, derivative) = gelu_with_derivative(*gate);
            *gate = d_out * *up * derivative;
            *up = d_out * value;
        }
    }
}

/// gelu(gate) * up.
pub(crate) fn geglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let isa = Isa::detect();
    let mut out = unwritten(gate.len());
    out.par_chunks_mut(CHUNK)
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)))
        .for_each(|(out, (gate, up))| geglu_into(isa, gate, up, out));
    out
}

/// Gradients to gate and up.
pub(crate) fn geglu_backward(gate: &[f32], up: &[f32], d_out: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let isa = Isa::detect();
    let (mut d_gate, mut d_up) = (unwritten(gate.len()), unwritten(up.len()));
    d_gate
        .par_chunks_mut(CHUNK)
        .zip(d_up.par_chunks_mut(CHUNK))
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)).zip(d_out.par_chunks(CHUNK)))
        .for_each(|((d_gate, d_up), ((gate, up), d_out))| {
            d_gate.copy_from_slice(gate);
            d_up.copy_from_slice(up);
            geglu_backward_in_place(isa, d_gate, d_up, d_out);
        });
    (d_gate, d_up)
}
