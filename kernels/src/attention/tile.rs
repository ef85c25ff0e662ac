//! The arithmetic of one tile: small matrix products that skip what the window hides, and the softmax.
//!
//! A tile of scores is stored by key: element (key, query) at `key * QUERIES + query`. Queries lie along the lanes, so
//! the softmax over keys needs no sum across a vector.

use std::ops::Range;

use super::simd::{Simd, exp2};

/// Queries of a tile of scores, and the distance between its keys.
pub(super) const QUERIES: usize = 64;
/// Keys of a tile of scores.
pub(super) const KEYS: usize = 64;

/// Rows of the matrix kernel.
const PANEL: usize = 6;

/// What a query with no key yet has as its largest score: finite, so that no difference is NaN.
pub(super) const NO_SCORE: f32 = -1e30;

/// Which (query, key) pairs of a tile are visible: those with `0 <= query + offset - key < window`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Band {
    /// Position of the tile's first query minus that of its first key.
    pub offset: isize,
    /// Keys that a query sees.
    pub window: isize,
}

impl Band {
    /// The queries, of `count`, that see at least one of `keys`.
    #[inline(always)]
    pub fn queries_seeing(self, keys: Range<usize>, count: usize) -> Range<usize> {
        clip(keys.start as isize - self.offset, keys.end as isize - 1 - self.offset + self.window, count)
    }

    /// The keys, of `count`, that at least one of `queries` sees.
    #[inline(always)]
    pub fn keys_seen_by(self, queries: Range<usize>, count: usize) -> Range<usize> {
        clip(queries.start as isize + self.offset - self.window + 1, queries.end as isize + self.offset, count)
    }

    /// The keys, of `count`, that all of `queries` see.
    #[inline(always)]
    fn keys_seen_by_all(self, queries: Range<usize>, count: usize) -> Range<usize> {
        let start = queries.end as isize + self.offset - self.window;
        clip(start, queries.start as isize + self.offset + 1, count)
    }
}

#[inline(always)]
fn clip(start: isize, end: isize, count: usize) -> Range<usize> {
    let start = start.clamp(0, count as isize);
    start as usize..end.clamp(start, count as isize) as usize
}

/// A matrix with any strides: element (row, depth) at `row * row_stride + depth * depth_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub data: &'a [f32],
    pub row_stride: usize,
    pub depth_stride: usize,
}

/// A matrix with contiguous rows: element (depth, column) at `depth * stride + column`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

/// How a product meets what its place held.
#[derive(Clone, Copy)]
pub(super) enum Write<'a> {
    /// Replaces it.
    Set,
    /// Is added to it.
    Add,
    /// Is added to it, each row first multiplied by its factor.
    Rescale(&'a [f32]),
}

/// Which products a band hides.
#[derive(Clone, Copy)]
pub(super) enum Hidden {
    /// Rows are keys and columns are queries: hidden columns, in whole vectors, are left as they were.
    Queries,
    /// Rows are queries and the depth is over keys: hidden keys are left out of the sum.
    DepthKeys,
    /// Rows are keys and the depth is over queries: hidden queries are left out of the sum.
    DepthQueries,
}

/// One product `c = a b`, `rows x depth` by `depth x cols`.
pub(super) struct Gemm<'a> {
    pub a: Left<'a>,
    pub b: Right<'a>,
    /// `rows` rows of `cols` values, `c_stride` apart, that nothing else reads or writes meanwhile.
    pub c: *mut f32,
    pub c_stride: usize,
    pub rows: usize,
    pub cols: usize,
    pub depth: usize,
    pub band: Band,
    pub hidden: Hidden,
    pub write: Write<'a>,
}

impl Gemm<'_> {
    fn check(&self) {
        let (last_row, last_depth, last_col) = (self.rows - 1, self.depth - 1, self.cols - 1);
        assert!(last_row * self.a.row_stride + last_depth * self.a.depth_stride < self.a.data.len());
        assert!(last_depth * self.b.stride + last_col < self.b.data.len());
        if let Write::Rescale(factors) = self.write {
            assert!(factors.len() >= self.rows);
        }
    }

    /// The columns and the depths that `rows` need.
    #[inline(always)]
    fn visible(&self, rows: Range<usize>) -> (Range<usize>, Range<usize>) {
        match self.hidden {
            Hidden::Queries => (self.band.queries_seeing(rows, self.cols), 0..self.depth),
            Hidden::DepthKeys => (0..self.cols, self.band.keys_seen_by(rows, self.depth)),
            Hidden::DepthQueries => (0..self.cols, self.band.queries_seeing(rows, self.depth)),
        }
    }
}

/// Runs a product, panel of rows by panel, column block by column block. Columns past the last whole vector are done
/// one by one.
///
/// # Safety
/// The CPU has the instruction set; `c` is as [`Gemm`] says.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd>(g: &Gemm) {
    if g.rows == 0 || g.cols == 0 || g.depth == 0 {
        return;
    }
    g.check();
    let whole = g.cols - g.cols % S::LANES;
    let mut block = 0;
    while block < whole {
        let block_end = whole.min(block + S::WIDTH * S::LANES);
        let mut row = 0;
        while row < g.rows {
            let rows = PANEL.min(g.rows - row);
            let (cols, depth) = g.visible(row..row + rows);
            let start = (cols.start - cols.start % S::LANES).max(block);
            let vectors = cols.end.next_multiple_of(S::LANES).min(block_end).saturating_sub(start) / S::LANES;
            // SAFETY: `check` holds for all rows, depths and columns, of which these are a part.
            unsafe { panel::<S>(g, row, rows, start, vectors, depth) };
            row += rows;
        }
        block = block_end;
    }
    if whole < g.cols {
        // SAFETY: as above.
        unsafe { last_columns(g, whole) };
    }
}

/// Picks the kernel for a panel of `rows` rows and `vectors` vectors.
#[inline(always)]
unsafe fn panel<S: Simd>(g: &Gemm, row: usize, rows: usize, col: usize, vectors: usize, depth: Range<usize>) {
    macro_rules! kernels {
        ($($rows:literal)*) => {
            match (rows, vectors) {
                $(
                    // SAFETY: passed on from the caller.
                    ($rows, 1) => unsafe { kernel::<S, $rows, 1>(g, row, col, depth) },
                    ($rows, 2) => unsafe { kernel::<S, $rows, 2>(g, row, col, depth) },
                    ($rows, 3) if S::WIDTH > 2 => unsafe { kernel::<S, $rows, 3>(g, row, col, depth) },
                    ($rows, 4) if S::WIDTH > 2 => unsafe { kernel::<S, $rows, 4>(g, row, col, depth) },
                )*
                _ => {}
            }
        };
    }
    kernels!(1 2 3 4 5 6)
}

/// `R` rows by `V` vectors, summed over `depth` in order, in registers.
#[inline(always)]
unsafe fn kernel<S: Simd, const R: usize, const V: usize>(g: &Gemm, row: usize, col: usize, depth: Range<usize>) {
    // SAFETY: the caller's panel lies inside the matrices that `Gemm::check` measured, and inside `c`.
    unsafe {
        let mut a = g.a.data.as_ptr().add(row * g.a.row_stride + depth.start * g.a.depth_stride);
        let mut b = g.b.data.as_ptr().add(depth.start * g.b.stride + col);
        let mut sums = [[S::splat(0.0); V]; R];
        for _ in depth {
            let mut right = [S::splat(0.0); V];
            for (v, right) in right.iter_mut().enumerate() {
                *right = S::load(b.add(v * S::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let left = S::splat(*a.add(r * g.a.row_stride));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = S::mul_add(left, right, *sum);
                }
            }
            a = a.wrapping_add(g.a.depth_stride);
            b = b.wrapping_add(g.b.stride);
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                let c = g.c.add((row + r) * g.c_stride + col + v * S::LANES);
                S::store(
                    c,
                    match g.write {
                        Write::Set => sum,
                        Write::Add => S::add(S::load(c), sum),
                        Write::Rescale(factors) => {
                            S::mul_add(S::load(c), S::splat(*factors.get_unchecked(row + r)), sum)
                        }
                    },
                );
            }
        }
    }
}

/// Columns `from..` one by one, for head sizes that are no multiple of the vector.
unsafe fn last_columns(g: &Gemm, from: usize) {
    for row in 0..g.rows {
        let (cols, depth) = g.visible(row..row + 1);
        for col in from.max(cols.start)..cols.end {
            let mut sum = 0.0;
            for d in depth.clone() {
                sum += g.a.data[row * g.a.row_stride + d * g.a.depth_stride] * g.b.data[d * g.b.stride + col];
            }
            // SAFETY: inside `c`, as the caller promises.
            unsafe {
                let c = g.c.add(row * g.c_stride + col);
                *c = match g.write {
                    Write::Set => sum,
                    Write::Add => *c + sum,
                    Write::Rescale(factors) => *c * factors[row] + sum,
                };
            }
        }
    }
}

/// The forward softmax of a tile: running maximum and sum per query, in base 2.
pub(super) struct OnlineSoftmax<'a> {
    /// Scores times `log2(e)` in, `2^(score - max)` out, 0 for hidden pairs; `keys` rows of [`QUERIES`].
    pub scores: &'a mut [f32],
    pub keys: usize,
    /// Queries, up to a multiple of the lanes.
    pub queries: usize,
    pub band: Band,
    pub max: &'a mut [f32; QUERIES],
    pub sum: &'a mut [f32; QUERIES],
    /// What earlier tiles' results are to be multiplied by, out.
    pub rescale: &'a mut [f32; QUERIES],
}

/// Takes one more tile of scores into the softmax.
///
/// # Safety
/// The CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn online_softmax<S: Simd>(softmax: &mut OnlineSoftmax) {
    let OnlineSoftmax { scores, keys, queries, band, max, sum, rescale } = softmax;
    let (keys, band) = (*keys, *band);
    assert!(scores.len() >= keys * QUERIES && *queries <= QUERIES && queries.is_multiple_of(S::LANES));
    for first in (0..*queries).step_by(S::LANES) {
        let lanes = first..first + S::LANES;
        let seen = band.keys_seen_by(lanes.clone(), keys);
        let seen_by_all = band.keys_seen_by_all(lanes, keys);
        // SAFETY: rows below `keys` and lanes below `QUERIES`, as asserted.
        unsafe {
            let column = scores.as_mut_ptr().add(first);
            let old_max = S::load(max.as_ptr().add(first));
            let mut new_max = old_max;
            for key in seen.clone() {
                let mut score = S::load(column.add(key * QUERIES));
                if !seen_by_all.contains(&key) {
                    score = keep_visible::<S>(score, band, key, first, f32::NEG_INFINITY);
                    S::store(column.add(key * QUERIES), score);
                }
                new_max = S::max(new_max, score);
            }
            let factor = exp2::<S>(S::sub(old_max, new_max));
            let mut new_sum = S::mul(S::load(sum.as_ptr().add(first)), factor);
            for key in 0..keys {
                let mut p = S::splat(0.0);
                if seen.contains(&key) {
                    p = exp2::<S>(S::sub(S::load(column.add(key * QUERIES)), new_max));
                    new_sum = S::add(new_sum, p);
                }
                S::store(column.add(key * QUERIES), p);
            }
            S::store(max.as_mut_ptr().add(first), new_max);
            S::store(sum.as_mut_ptr().add(first), new_sum);
            S::store(rescale.as_mut_ptr().add(first), factor);
        }
    }
}

/// The backward softmax of a tile.
pub(super) struct Probabilities<'a> {
    /// Scores times `log2(e)` in, probabilities out, 0 for hidden pairs; `keys` rows of [`QUERIES`].
    pub scores: &'a mut [f32],
    /// `scale * dout . v` in, the gradient of the unscaled score out.
    pub gradients: &'a mut [f32],
    pub keys: usize,
    /// Queries, up to a multiple of the lanes.
    pub queries: usize,
    pub band: Band,
    /// Base-2 log-sum-exp per query.
    pub lse: &'a [f32; QUERIES],
    /// `scale * dout . out` per query.
    pub delta: &'a [f32; QUERIES],
}

/// Turns scores into probabilities, and the gradients of probabilities into those of scores.
///
/// # Safety
/// The CPU has the instruction set.
#[inline(always)]
pub(super) unsafe fn probabilities<S: Simd>(tile: &mut Probabilities) {
    let Probabilities { scores, gradients, keys, queries, band, lse, delta } = tile;
    let (keys, band) = (*keys, *band);
    assert!(scores.len() >= keys * QUERIES && gradients.len() >= keys * QUERIES);
    assert!(*queries <= QUERIES && queries.is_multiple_of(S::LANES));
    for first in (0..*queries).step_by(S::LANES) {
        let lanes = first..first + S::LANES;
        let seen = band.keys_seen_by(lanes.clone(), keys);
        let seen_by_all = band.keys_seen_by_all(lanes, keys);
        // SAFETY: rows below `keys` and lanes below `QUERIES`, as asserted.
        unsafe {
            let lse = S::load(lse.as_ptr().add(first));
            let delta = S::load(delta.as_ptr().add(first));
            for key in 0..keys {
                let p_at = scores.as_mut_ptr().add(key * QUERIES + first);
                let ds_at = gradients.as_mut_ptr().add(key * QUERIES + first);
                let (mut p, mut ds) = (S::splat(0.0), S::splat(0.0));
                if seen.contains(&key) {
                    p = exp2::<S>(S::sub(S::load(p_at), lse));
                    ds = S::mul(p, S::sub(S::load(ds_at), delta));
                    if !seen_by_all.contains(&key) {
                        p = keep_visible::<S>(p, band, key, first, 0.0);
                        ds = keep_visible::<S>(ds, band, key, first, 0.0);
                    }
                }
                S::store(p_at, p);
                S::store(ds_at, ds);
            }
        }
    }
}

/// Of a vector of queries from `first`, keeps those that see `key`.
#[inline(always)]
unsafe fn keep_visible<S: Simd>(x: S::V, band: Band, key: usize, first: usize, fill: f32) -> S::V {
    let moved = Band { offset: band.offset + first as isize, ..band };
    let lanes = moved.queries_seeing(key..key + 1, S::LANES);
    // SAFETY: passed on from the caller.
    unsafe { S::keep(x, lanes.start, lanes.end, fill) }
}
