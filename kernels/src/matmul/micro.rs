//! The register tile: up to 6 rows times up to 64 columns, summed down the depth of one panel.

use super::pack::{COLS, LANES, vectors};
use crate::simd::Isa;

/// Rows of a full tile: 6 x 4 sums of 16 lanes fill 24 of the 32 AVX-512 registers.
pub(super) const ROWS: usize = 6;

/// One tile of a product.
pub(super) struct Tile<'a> {
    /// Left operand from the tile's first row and the block's first depth on.
    pub(super) lhs: &'a [f32],
    /// How far apart its rows are.
    pub(super) lhs_stride: usize,
    /// How far apart its depths are.
    pub(super) lhs_step: usize,
    /// Right operand: `vectors(cols)` vectors per step of depth.
    pub(super) panel: &'a [f32],
    /// How far apart its depths are.
    pub(super) panel_step: usize,
    pub(super) depth: usize,
    /// 1 to `ROWS`.
    pub(super) rows: usize,
    /// 1 to `COLS`.
    pub(super) cols: usize,
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    /// Whether to add to what `out` holds.
    pub(super) accumulate: bool,
}

/// Calls `$run::<ROWS, VECTORS>` with the tile's own sizes as constants.
macro_rules! with_constant_size {
    ($tile:expr, $run:ident, [$($rows:literal),*], $vectors:tt) => {
        match $tile.rows {
            $($rows => with_constant_size!(@cols $tile, $run, $rows, $vectors),)*
            rows => unreachable!("a tile has 1 to {ROWS} rows, not {rows}"),
        }
    };
    (@cols $tile:expr, $run:ident, $rows:literal, [$($vectors:literal),*]) => {
        match vectors($tile.cols) {
            $($vectors => $run::<$rows, $vectors>($tile),)*
            vectors => unreachable!("a tile has 1 to {} vectors, not {vectors}", COLS / LANES),
        }
    };
}

impl Tile<'_> {
    /// Computes the tile.
    ///
    /// # Safety
    /// `out` must be valid for reads and writes of `rows` rows of `cols` values, `out_stride` apart, and the CPU must
    /// have the instructions of `isa`.
    pub(super) unsafe fn run(&self, isa: Isa) {
        let last_depth = self.depth - 1;
        assert!(self.lhs.len() > (self.rows - 1) * self.lhs_stride + last_depth * self.lhs_step);
        assert!(self.panel.len() >= last_depth * self.panel_step + vectors(self.cols) * LANES);
        // SAFETY: the operands are long enough (asserted); the output and the CPU are the caller's promise.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => with_constant_size!(self, avx512, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => with_constant_size!(self, avx2, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]),
                _ => with_constant_size!(self, portable, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]),
            }
        }
    }
}

/// # Safety
/// See [`Tile::run`]; `R` rows, `V` vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const R: usize, const V: usize>(tile: &Tile) {
    use std::arch::x86_64::*;
    // SAFETY: `Tile::run` checked the lengths of both operands; masked lanes of the output are not accessed.
    unsafe {
        let (mut lhs, mut panel) = (tile.lhs.as_ptr(), tile.panel.as_ptr());
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for _ in 0..tile.depth {
            let mut right = [_mm512_setzero_ps(); V];
            for (v, right) in right.iter_mut().enumerate() {
                *right = _mm512_loadu_ps(panel.add(v * LANES));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let left = _mm512_set1_ps(*lhs.add(row * tile.lhs_stride));
                for v in 0..V {
                    sums[v] = _mm512_fmadd_ps(left, right[v], sums[v]);
                }
            }
            // The last step leaves them past the end, where nothing is read.
            lhs = lhs.wrapping_add(tile.lhs_step);
            panel = panel.wrapping_add(tile.panel_step);
        }
        let last: __mmask16 = u16::MAX >> (V * LANES - tile.cols);
        for (row, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let mask = if v + 1 == V { last } else { u16::MAX };
                let out = tile.out.add(row * tile.out_stride + v * LANES);
                let sum = if tile.accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum) } else { sum };
                _mm512_mask_storeu_ps(out, mask, sum);
            }
        }
    }
}

/// # Safety
/// See [`Tile::run`]; `R` rows, `V` vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const R: usize, const V: usize>(tile: &Tile) {
    // SAFETY: passed on.
    unsafe { scalar::<R, V>(tile, f32::mul_add) }
}

/// # Safety
/// See [`Tile::run`]; `R` rows, `V` vectors.
unsafe fn portable<const R: usize, const V: usize>(tile: &Tile) {
    // SAFETY: passed on.
    unsafe { scalar::<R, V>(tile, |a, b, c| a * b + c) }
}

/// The tile in plain Rust, one vector of columns at a time; `multiply_add(a, b, c)` is a * b + c.
///
/// # Safety
/// See [`Tile::run`]; `R` rows, `V` vectors.
#[inline(always)]
unsafe fn scalar<const R: usize, const V: usize>(tile: &Tile, multiply_add: impl Fn(f32, f32, f32) -> f32) {
    for v in 0..V {
        let mut sums = [[0f32; LANES]; R];
        for step in 0..tile.depth {
            let right = &tile.panel[step * tile.panel_step + v * LANES..][..LANES];
            for (row, sums) in sums.iter_mut().enumerate() {
                let left = tile.lhs[row * tile.lhs_stride + step * tile.lhs_step];
                for lane in 0..LANES {
                    sums[lane] = multiply_add(left, right[lane], sums[lane]);
                }
            }
        }
        let cols = LANES.min(tile.cols - v * LANES);
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: `cols` values of a row of the output, by the caller's promise.
            let out = unsafe { std::slice::from_raw_parts_mut(tile.out.add(row * tile.out_stride + v * LANES), cols) };
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = if tile.accumulate { *out + sum } else { *sum };
            }
        }
    }
}
