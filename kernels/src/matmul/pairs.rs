//! Products with a bf16 right operand by `vdpbf16ps` (AVX-512 BF16): each 32-bit lane multiplies two pairs of bf16 and adds
//! both products to an f32.
//!
//! Panels are those of the f32 path with a pair of depths in place of one: lane c of a vector holds depths 2 d (low half)
//! and 2 d + 1 of column c. Rows of the left operand are rounded to bf16, a block of depths at a time.

use super::pack::{BLOCK_COLS, COLS, DEPTH, LANES, Lanes, vectors};
use super::{Matrix, Write, micro};
use half::bf16;

const PAIRS: usize = DEPTH / 2;

/// Panels of the current block, and the left operand's rows for its depths.
#[derive(Default)]
pub(super) struct PairBuffer {
    panels: Vec<Lanes>,
    pairs: usize,
    /// `[rows, PAIRS]`.
    left: Vec<u32>,
}

impl PairBuffer {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn pack(&mut self, block: Matrix<bf16>) {
        self.pairs = block.rows.div_ceil(2);
        self.panels.resize(PAIRS * BLOCK_COLS / LANES, Lanes([0.0; LANES]));
        for first in (0..block.cols).step_by(COLS) {
            let cols = COLS.min(block.cols - first);
            let width = vectors(cols);
            let panel = &mut self.panels[first / LANES * self.pairs..][..self.pairs * width];
            let source = block.col_range(first..first + cols);
            match source.transposed {
                true => pack_transposed(source, panel, width),
                false => pack_plain(source, panel, width),
            }
        }
    }
}

fn pair(low: bf16, high: bf16) -> f32 {
    f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
}

/// Two rows of the source become one vector of pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn pack_plain(source: Matrix<bf16>, panel: &mut [Lanes], width: usize) {
    for (row, lanes) in panel.chunks_exact_mut(width).enumerate() {
        let low = &source.data[2 * row * source.stride..][..source.cols];
        let high = match 2 * row + 1 < source.rows {
            true => &source.data[(2 * row + 1) * source.stride..][..source.cols],
            false => &[],
        };
        let (whole_low, whole_high) = (low.as_chunks::<LANES>().0, high.as_chunks::<LANES>().0);
        let whole = whole_low.len().min(whole_high.len());
        for (lanes, (low, high)) in lanes.iter_mut().zip(whole_low.iter().zip(whole_high)) {
            lanes.0 = std::array::from_fn(|lane| pair(low[lane], high[lane]));
        }
        for (vector, lanes) in lanes.iter_mut().enumerate().skip(whole) {
            let of = |values: &[bf16], lane: usize| values.get(vector * LANES + lane).copied().unwrap_or(bf16::ZERO);
            lanes.0 = std::array::from_fn(|lane| pair(of(low, lane), of(high, lane)));
        }
    }
}

/// A column of the product is a row of the source, where a pair is four neighbouring bytes: the transposition of 32-bit
/// values that the f32 path has.
fn pack_transposed(source: Matrix<bf16>, panel: &mut [Lanes], width: usize) {
    let pairs = source.rows.div_ceil(2);
    for vector in 0..width {
        let cols = LANES.min(source.cols - vector * LANES);
        for first in (0..pairs).step_by(LANES) {
            let values = &source.data[vector * LANES * source.stride + 2 * first..];
            let lanes = &mut panel[first * width + vector..];
            let whole = source.rows >= 2 * (first + LANES) && cols == LANES && source.stride.is_multiple_of(2);
            if whole {
                assert!(values.len() >= (LANES - 1) * source.stride + 2 * LANES);
                // SAFETY: sixteen pairs in each of sixteen rows of the source (asserted); this path runs on AVX-512 alone.
                unsafe {
                    super::pack::transpose_avx512(values.as_ptr().cast(), source.stride / 2, lanes, width);
                }
                continue;
            }
            for row in 0..LANES.min(pairs - first) {
                let depth = 2 * (first + row);
                lanes[row * width].0 = std::array::from_fn(|col| {
                    let of = |offset: usize| match col < cols && depth + offset < source.rows {
                        true => values[col * source.stride + 2 * row + offset],
                        false => bf16::ZERO,
                    };
                    pair(of(0), of(1))
                });
            }
        }
    }
}

/// The serial product, as [`super::product`].
///
/// # Safety
/// As there; and the CPU must have AVX-512 F, BW, DQ, VL and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn product(
    buffer: &mut PairBuffer,
    lhs: Matrix,
    rhs: Matrix<bf16>,
    out: *mut f32,
    out_stride: usize,
    write: Write,
) {
    for first_depth in (0..lhs.cols).step_by(DEPTH) {
        let depth = DEPTH.min(lhs.cols - first_depth);
        buffer.left.resize(buffer.left.len().max(lhs.rows * PAIRS), 0);
        for row in 0..lhs.rows {
            let values = &lhs.data[row * lhs.stride + first_depth..][..depth];
            round_row(values, &mut buffer.left[row * PAIRS..][..depth.div_ceil(2)]);
        }
        let accumulate = write == Write::Add || first_depth > 0;
        for first_col in (0..rhs.cols).step_by(BLOCK_COLS) {
            let cols = BLOCK_COLS.min(rhs.cols - first_col);
            buffer.pack(rhs.col_range(first_col..first_col + cols).row_range(first_depth..first_depth + depth));
            for first_row in (0..lhs.rows).step_by(micro::ROWS) {
                let rows = micro::ROWS.min(lhs.rows - first_row);
                for panel_col in (0..cols).step_by(COLS) {
                    let tile = Tile {
                        left: &buffer.left[first_row * PAIRS..],
                        panel: &buffer.panels[panel_col / LANES * buffer.pairs..],
                        pairs: buffer.pairs,
                        cols: COLS.min(cols - panel_col),
                        // SAFETY: inside the output, by the caller's promise.
                        out: unsafe { out.add(first_row * out_stride + first_col + panel_col) },
                        out_stride,
                        accumulate,
                    };
                    // SAFETY: the tile lies inside the output.
                    unsafe { tile.run(rows) };
                }
            }
        }
    }
}

/// Rounds a row to bf16, to nearest even, as pairs; a last value alone is paired with zero.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn round_row(values: &[f32], pairs: &mut [u32]) {
    use std::arch::x86_64::*;
    assert_eq!(pairs.len(), values.len().div_ceil(2));
    let (blocks, rest) = values.as_chunks::<{ 2 * LANES }>();
    for (block, pairs) in blocks.iter().zip(pairs.chunks_exact_mut(LANES)) {
        // SAFETY: 32 values are read and 16 pairs written, both unaligned.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(block.as_ptr()), _mm512_loadu_ps(block.as_ptr().add(LANES)));
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(pairs.as_mut_ptr().cast(), rounded);
        }
    }
    let bits = |value: f32| u32::from(half::bf16::from_f32(value).to_bits());
    for (values, pair) in rest.chunks(2).zip(&mut pairs[blocks.len() * LANES..]) {
        *pair = bits(values[0]) | values.get(1).map_or(0, |&high| bits(high) << 16);
    }
}

/// Up to 6 rows times up to 64 columns.
struct Tile<'a> {
    /// Rows `PAIRS` apart.
    left: &'a [u32],
    panel: &'a [Lanes],
    pairs: usize,
    cols: usize,
    out: *mut f32,
    out_stride: usize,
    accumulate: bool,
}

impl Tile<'_> {
    /// # Safety
    /// `out` must be valid for reads and writes of `rows` rows of `cols` values, `out_stride` apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(&self, rows: usize) {
        macro_rules! dispatch {
            ($($rows:literal)*) => {
                match (rows, vectors(self.cols)) {
                    $(
                        ($rows, 1) => unsafe { self.sized::<$rows, 1>() },
                        ($rows, 2) => unsafe { self.sized::<$rows, 2>() },
                        ($rows, 3) => unsafe { self.sized::<$rows, 3>() },
                        ($rows, 4) => unsafe { self.sized::<$rows, 4>() },
                    )*
                    size => unreachable!("a tile has 1 to 6 rows and 1 to 4 vectors, not {size:?}"),
                }
            };
        }
        // SAFETY (of every arm): passed on.
        dispatch!(1 2 3 4 5 6)
    }

    /// # Safety
    /// See [`Tile::run`]; `R` rows, `V` vectors.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn sized<const R: usize, const V: usize>(&self) {
        use std::arch::x86_64::*;
        assert!(self.panel.len() >= self.pairs * V && self.left.len() >= (R - 1) * PAIRS + self.pairs);
        let (left, panel) = (self.left.as_ptr(), self.panel.as_ptr());
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        // SAFETY: both operands are long enough (asserted); masked lanes of the output are not accessed. The transmutes are
        // between types of 64 bytes of which every bit pattern is valid.
        unsafe {
            for step in 0..self.pairs {
                let mut right = [_mm512_setzero_si512(); V];
                for (v, right) in right.iter_mut().enumerate() {
                    *right = _mm512_load_si512(panel.add(step * V + v).cast());
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let left: __m512bh = std::mem::transmute(_mm512_set1_epi32(*left.add(row * PAIRS + step) as i32));
                    for v in 0..V {
                        sums[v] = _mm512_dpbf16_ps(sums[v], left, std::mem::transmute::<__m512i, __m512bh>(right[v]));
                    }
                }
            }
            let last: __mmask16 = u16::MAX >> (V * LANES - self.cols);
            for (row, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    let mask = if v + 1 == V { last } else { u16::MAX };
                    let out = self.out.add(row * self.out_stride + v * LANES);
                    let sum = if self.accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum) } else { sum };
                    _mm512_mask_storeu_ps(out, mask, sum);
                }
            }
        }
    }
}
