//! Packing of a block of the right operand into panels that the register tile reads front to back.

use super::Matrix;
use crate::simd::Isa;
use half::bf16;

/// An element of the right operand.
pub(super) trait Value: Copy {
    /// Whether it is an f32 in memory.
    const IS_F32: bool;

    fn to_f32(self) -> f32;
}

impl Value for f32 {
    const IS_F32: bool = true;

    fn to_f32(self) -> f32 {
        self
    }
}

impl Value for bf16 {
    const IS_F32: bool = false;

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// Columns of a panel.
pub(super) const COLS: usize = 64;
/// Columns of a vector: the width of the last panel is rounded up to it.
pub(super) const LANES: usize = 16;
/// Depth of a packed block. It is part of the order of summation: changing it changes the last bits of every product.
pub(super) const DEPTH: usize = 512;
/// Columns of a packed block: with `DEPTH` it takes 256 KiB, which leaves the second-level cache room.
pub(super) const BLOCK_COLS: usize = 128;

/// One vector of packed values, aligned so that a load never straddles a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub(super) [f32; LANES]);

/// Panels of the current block. Panel p holds columns 64 p and on as `[depth][width / 16]` vectors, padded with zeros.
#[derive(Default)]
pub(super) struct PackBuffer {
    lanes: Vec<Lanes>,
    depth: usize,
}

/// Number of vectors across a panel of `cols` columns.
pub(super) fn vectors(cols: usize) -> usize {
    cols.div_ceil(LANES)
}

impl PackBuffer {
    /// Packs `block`, which has at most `BLOCK_COLS` columns and `DEPTH` rows.
    pub(super) fn pack<T: Value>(&mut self, isa: Isa, block: Matrix<T>) {
        self.depth = block.rows;
        if self.lanes.is_empty() {
            self.lanes.resize(DEPTH * BLOCK_COLS / LANES, Lanes([0.0; LANES]));
        }
        for first in (0..block.cols).step_by(COLS) {
            let cols = COLS.min(block.cols - first);
            let width = vectors(cols);
            let panel = &mut self.lanes[first / LANES * self.depth..][..self.depth * width];
            let source = block.col_range(first..first + cols);
            if source.transposed {
                pack_transposed(isa, source, panel, width);
            } else {
                pack_plain(source, panel, width);
            }
        }
    }

    /// The panel that starts at column `first` of the block, a multiple of `COLS`.
    pub(super) fn panel(&self, first: usize) -> &[f32] {
        let lanes = &self.lanes[first / LANES * self.depth..];
        // SAFETY: a `Lanes` is 16 f32 and nothing else: 64 bytes at an alignment of 64 leave no padding.
        unsafe { std::slice::from_raw_parts(lanes.as_ptr().cast(), lanes.len() * LANES) }
    }
}

fn pack_plain<T: Value>(source: Matrix<T>, panel: &mut [Lanes], width: usize) {
    for (row, lanes) in panel.chunks_exact_mut(width).enumerate() {
        let values = &source.data[row * source.stride..][..source.cols];
        for (lanes, values) in lanes.iter_mut().zip(values.chunks(LANES)) {
            lanes.0 = match <[T; LANES]>::try_from(values) {
                Ok(values) => values.map(T::to_f32),
                Err(_) => std::array::from_fn(|lane| values.get(lane).map_or(0.0, |value| value.to_f32())),
            };
        }
    }
}

/// Packs a transpose in blocks of 16 x 16, four of them down before the next vector, so that both what is read and what is
/// written stay in the first-level cache.
fn pack_transposed<T: Value>(isa: Isa, source: Matrix<T>, panel: &mut [Lanes], width: usize) {
    for strip in (0..source.rows).step_by(4 * LANES) {
        let strip_end = source.rows.min(strip + 4 * LANES);
        for vector in 0..width {
            for row in (strip..strip_end).step_by(LANES) {
                let (rows, cols) = (LANES.min(strip_end - row), LANES.min(source.cols - vector * LANES));
                let values = &source.data[vector * LANES * source.stride + row..];
                let lanes = &mut panel[row * width + vector..];
                match isa {
                    // SAFETY: `isa` was found on this CPU.
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 if T::IS_F32 && (rows, cols) == (LANES, LANES) => unsafe {
                        let length = (LANES - 1) * source.stride + LANES;
                        assert!(values.len() >= length);
                        transpose_avx512(values.as_ptr().cast(), source.stride, lanes, width)
                    },
                    _ => transpose_part(values, source.stride, lanes, width, [rows, cols]),
                }
            }
        }
    }
}

/// Lane c of `lanes[r * width]` = `values[c * stride + r]`, for `rows` r and `cols` c; the other lanes are 0.
fn transpose_part<T: Value>(values: &[T], stride: usize, lanes: &mut [Lanes], width: usize, [rows, cols]: [usize; 2]) {
    for row in 0..rows {
        let lanes = &mut lanes[row * width].0;
        for (col, lane) in lanes.iter_mut().enumerate() {
            *lane = if col < cols { values[col * stride + row].to_f32() } else { 0.0 };
        }
    }
}

/// [`transpose_part`] of 16 rows and columns, four rows at a time: quarter q of a register takes four values of each of
/// the columns 4 q to 4 q + 3, and is transposed in its place. What the four bytes of a value mean does not matter.
///
/// # Safety
/// Sixteen values can be read from `values` and from every `stride` values on after it, sixteen times; alignment does not
/// matter.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn transpose_avx512(values: *const f32, stride: usize, lanes: &mut [Lanes], width: usize) {
    use std::arch::x86_64::*;
    assert!(lanes.len() > (LANES - 1) * width);
    // How many values ahead to prefetch: sixteen streams are more than the hardware follows.
    const AHEAD: usize = 128;
    for col in 0..LANES {
        _mm_prefetch::<_MM_HINT_T0>(values.wrapping_add(col * stride + AHEAD).cast());
    }
    for row in (0..LANES).step_by(4) {
        // SAFETY: four values from row `row` <= 12 on in column `col` <= 15, by the caller's promise.
        let quarter = |col: usize| unsafe { _mm_loadu_ps(values.add(col * stride + row)) };
        let columns: [__m512; 4] = std::array::from_fn(|col| {
            let columns = _mm512_castps128_ps512(quarter(col));
            let columns = _mm512_insertf32x4::<1>(columns, quarter(col + 4));
            let columns = _mm512_insertf32x4::<2>(columns, quarter(col + 8));
            _mm512_insertf32x4::<3>(columns, quarter(col + 12))
        });
        let low = [(0, 1), (2, 3)].map(|(a, b)| _mm512_castps_pd(_mm512_unpacklo_ps(columns[a], columns[b])));
        let high = [(0, 1), (2, 3)].map(|(a, b)| _mm512_castps_pd(_mm512_unpackhi_ps(columns[a], columns[b])));
        let rows = [
            _mm512_unpacklo_pd(low[0], low[1]),
            _mm512_unpackhi_pd(low[0], low[1]),
            _mm512_unpacklo_pd(high[0], high[1]),
            _mm512_unpackhi_pd(high[0], high[1]),
        ];
        for (offset, values) in rows.into_iter().enumerate() {
            // SAFETY: a vector of `lanes` (asserted), which is 16 values aligned to 64 bytes.
            unsafe { _mm512_store_pd(lanes.as_mut_ptr().add((row + offset) * width).cast(), values) };
        }
    }
}
