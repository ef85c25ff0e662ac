//! The linear layer on f32 slices.

use super::Dropout;
use crate::flex::unwritten;
use crate::matmul::{Matrix, Weights, Write, matmul, par_matmul};
use crate::simd::{self, Isa, vectorised};
use rayon::prelude::*;

/// Sizes of a linear layer: x is `[n, input]`, the weight `[output, input]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) n: usize,
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// A LoRA pair: `a` is `[rank, input]`, `b` `[output, rank]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    pub(crate) dropout: Option<Dropout>,
}

/// Rows whose dropped-out copy exists at a time.
const DROPOUT_ROWS: usize = 512;

/// y = x W^T.
pub(crate) fn linear(x: &[f32], weight: Weights, Shape { n, input, output }: Shape) -> Vec<f32> {
    let mut y = unwritten(n * output);
    par_matmul(&[(Matrix::new(x, n, input), weight.matrix(output, input).t())], &mut y, Write::Set);
    y
}

/// Gradient of [`linear`] to x: d_y W.
pub(crate) fn linear_backward(weight: Weights, d_y: &[f32], Shape { n, input, output }: Shape) -> Vec<f32> {
    let mut d_x = unwritten(n * input);
    par_matmul(&[(Matrix::new(d_y, n, output), weight.matrix(output, input))], &mut d_x, Write::Set);
    d_x
}

/// y `[n, output]` and the scaled inner product scale * drop(x) A^T `[n, rank]`.
pub(crate) fn lora_linear(x: &[f32], weight: Weights, adapter: &Adapter, shape: Shape) -> (Vec<f32>, Vec<f32>) {
    let Shape { n, input, output } = shape;
    let rank = adapter.rank;
    let a = Matrix::new(adapter.a, rank, input).t().into();
    let mut inner = vec![0f32; n * rank];
    match adapter.dropout {
        None => par_matmul(&[(Matrix::new(x, n, input), a)], &mut inner, Write::Set),
        Some(dropout) => {
            for (chunk, (x, inner)) in
                x.chunks(DROPOUT_ROWS * input).zip(inner.chunks_mut(DROPOUT_ROWS * rank)).enumerate()
            {
                let kept = drop_rows(x, input, chunk * DROPOUT_ROWS, dropout);
                par_matmul(&[(Matrix::new(&kept, x.len() / input, input), a)], inner, Write::Set);
            }
        }
    }
    simd::scale(Isa::detect(), &mut inner, adapter.scale);
    let mut y = unwritten(n * output);
    let base = (Matrix::new(x, n, input), weight.matrix(output, input).t());
    let low_rank = (Matrix::new(&inner, n, rank), Matrix::new(adapter.b, output, rank).t().into());
    par_matmul(&[base, low_rank], &mut y, Write::Set);
    (y, inner)
}

/// Gradients to x `[n, input]`, A `[rank, input]` and B `[output, rank]`; `inner` is what [`lora_linear`] returned.
pub(crate) fn lora_linear_backward(
    x: &[f32],
    weight: Weights,
    adapter: &Adapter,
    inner: &[f32],
    d_y: &[f32],
    Shape { n, input, output }: Shape,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let rank = adapter.rank;
    let (a, b) = (Matrix::new(adapter.a, rank, input), Matrix::new(adapter.b, output, rank));
    let d_y_matrix = Matrix::new(d_y, n, output);

    let mut d_inner = vec![0f32; n * rank];
    par_matmul(&[(d_y_matrix, b.into())], &mut d_inner, Write::Set);
    simd::scale(Isa::detect(), &mut d_inner, adapter.scale);

    let mut d_x = unwritten(n * input);
    let base = (d_y_matrix, weight.matrix(output, input));
    match adapter.dropout {
        None => par_matmul(&[base, (Matrix::new(&d_inner, n, rank), a.into())], &mut d_x, Write::Set),
        Some(dropout) => {
            par_matmul(&[base], &mut d_x, Write::Set);
            let mask = RowMask::new(dropout);
            d_x.par_chunks_mut(64 * input).zip(d_inner.par_chunks(64 * rank)).enumerate().for_each(
                |(chunk, (d_x, d_inner))| {
                    let mut through_a = vec![0f32; d_x.len()];
                    matmul(Matrix::new(d_inner, d_x.len() / input, rank), a, &mut through_a, Write::Set);
                    for (row, (d_x, part)) in d_x.chunks_mut(input).zip(through_a.chunks_mut(input)).enumerate() {
                        mask.apply(chunk * 64 + row, part);
                        simd::add_scaled(Isa::detect(), d_x, 1.0, part);
                    }
                },
            );
        }
    }

    let mut d_a = vec![0f32; rank * input];
    let d_inner_t = Matrix::new(&d_inner, n, rank).t();
    match adapter.dropout {
        None => par_matmul(&[(d_inner_t, Matrix::new(x, n, input).into())], &mut d_a, Write::Set),
        Some(dropout) => {
            for (chunk, x) in x.chunks(DROPOUT_ROWS * input).enumerate() {
                let (first, rows) = (chunk * DROPOUT_ROWS, x.len() / input);
                let kept = drop_rows(x, input, first, dropout);
                let left = d_inner_t.col_range(first..first + rows);
                par_matmul(&[(left, Matrix::new(&kept, rows, input).into())], &mut d_a, Write::Add);
            }
        }
    }

    let mut d_b_t = vec![0f32; rank * output];
    par_matmul(&[(Matrix::new(inner, n, rank).t(), d_y_matrix.into())], &mut d_b_t, Write::Set);
    (d_x, d_a, transposed(&d_b_t, rank, output))
}

/// Bytes that the gradient of the layer takes beside inputs and results on a CPU, for `n` rows, `output` columns of the result and an adapter
/// of this `rank`: the gradient of A x, and that of B before it is transposed. Dropout, which works on a few rows at a time, adds to it.
pub(crate) fn workspace_bytes(n: usize, output: usize, rank: usize) -> usize {
    rank * (n + output) * size_of::<f32>()
}

/// The transpose `[cols, rows]` of a small matrix.
fn transposed(matrix: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0f32; rows * cols];
    for (row, values) in matrix.chunks_exact(cols).enumerate() {
        for (col, &value) in values.iter().enumerate() {
            out[col * rows + row] = value;
        }
    }
    out
}

/// A dropped-out copy of rows `first` and on.
fn drop_rows(x: &[f32], cols: usize, first: usize, dropout: Dropout) -> Vec<f32> {
    let mask = RowMask::new(dropout);
    let mut kept = x.to_vec();
    kept.par_chunks_mut(cols).enumerate().for_each(|(row, values)| mask.apply(first + row, values));
    kept
}

/// The dropout mask, made where it is needed: element (row, col) is kept where a hash of (seed, row, col) is at or above
/// `p`.
struct RowMask {
    seed: u64,
    threshold: u32,
    factor: f32,
}

impl RowMask {
    fn new(Dropout { p, seed }: Dropout) -> Self {
        assert!((0.0..1.0).contains(&p), "dropout must be in [0, 1), not {p}");
        Self { seed, threshold: (p * 2f64.powi(32)) as u32, factor: (1.0 / (1.0 - p)) as f32 }
    }

    fn apply(&self, row: usize, values: &mut [f32]) {
        let key = row_key(self.seed, row as u64);
        mask_row(Isa::detect(), values, key, self.threshold, self.factor);
    }
}

vectorised! {
    fn mask_row(values: &mut [f32], key: u32, threshold: u32, factor: f32) {
        for (col, value) in values.iter_mut().enumerate() {
            let factor = if element_hash(key, col as u32) >= threshold { factor } else { 0.0 };
            *value *= factor;
        }
    }
}

/// 32 bits from a seed and a row: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
pub(super) fn row_key(seed: u64, row: u64) -> u32 {
    let mut z = seed.wrapping_add(row.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 32) as u32
}

/// 32 bits from a row's key and a column: the finaliser of MurmurHash3 over their mix.
#[inline(always)]
pub(super) fn element_hash(key: u32, col: u32) -> u32 {
    let mut h = key ^ col.wrapping_add(1).wrapping_mul(0x9e37_79b9);
    h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}
