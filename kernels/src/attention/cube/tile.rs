//! Tiles of 32 rows in shared memory, what eight units make of a row of one, and which rows a cube has.

use cubecl::prelude::*;

/// Rows of a tile, columns of a tile of scores, and depth of a chunk of the head dimension.
pub(super) const TILE: usize = 32;
/// Distance of rows in shared memory: one more than a tile, so that a column is spread over the banks.
pub(super) const PITCH: usize = TILE + 1;
/// Elements of a tile in shared memory.
pub(super) const SHARED: usize = TILE * PITCH;
/// Below every score, and far enough above the least f32 that differences stay finite.
pub(super) const MASKED: f32 = -1e38;

/// The rows of a cube, `start..end` of the segment `seg_start..seg_end`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rows {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) seg_start: usize,
    pub(super) seg_end: usize,
}

#[cube]
pub(super) fn rows_of(tiles: &[u32]) -> Rows {
    let tile = CUBE_POS_X as usize * 4;
    Rows {
        start: tiles[tile] as usize,
        end: tiles[tile + 1] as usize,
        seg_start: tiles[tile + 2] as usize,
        seg_end: tiles[tile + 3] as usize,
    }
}

/// Rows `start..end` of one head among `heads`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Head {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) head: usize,
    pub(super) heads: usize,
}

/// The first tile of `at`, its chunk from dimension `d0`, zero beyond its rows and beyond the head.
#[cube]
pub(super) fn load<T: Float>(x: &[T], tile: &mut Shared<[f32]>, at: &Head, d0: usize, #[comptime] dim: usize) {
    let (row, d) = (UNIT_POS as usize / TILE, UNIT_POS as usize % TILE);
    // One place and a distance: a place for each row would take more registers.
    let first = ((at.start + row) * at.heads + at.head) * dim + d0 + d;
    #[unroll]
    for l in 0..4usize {
        let mut inside = at.start + row + l * 8 < at.end;
        if comptime!(!dim.is_multiple_of(TILE)) {
            inside = inside && d0 + d < dim;
        }
        let mut value = 0.0f32;
        if inside {
            value = f32::cast_from(x[first + l * 8 * at.heads * dim]);
        }
        tile[(row + l * 8) * PITCH + d] = value;
    }
}

/// Adds to the unit's four products of its row of `left` with rows of `right`.
#[cube]
pub(super) fn dot_rows(left: &Shared<[f32]>, right: &Shared<[f32]>, sums: &mut Array<f32>) {
    let row = UNIT_POS as usize / 8 * PITCH;
    let col = UNIT_POS as usize % 8 * PITCH;
    for d in 0..TILE {
        let value = left[row + d];
        #[unroll]
        for j in 0..4usize {
            sums[j] += value * right[col + j * 8 * PITCH + d];
        }
    }
}

/// Adds to four of the unit's sums, from `first`, the product of its row of `weights` with `rows`.
#[cube]
pub(super) fn weigh_rows(
    weights: &Shared<[f32]>,
    rows: &Shared<[f32]>,
    sums: &mut Array<f32>,
    #[comptime] first: usize,
) {
    let row = UNIT_POS as usize / 8 * PITCH;
    let col = UNIT_POS as usize % 8;
    for i in 0..TILE {
        let weight = weights[row + i];
        #[unroll]
        for j in 0..4usize {
            sums[first + j] += weight * rows[i * PITCH + col + j * 8];
        }
    }
}

#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        sums[i] = 0.0f32;
    }
    sums
}

/// Writes the unit's sums times `factor` to its row of `at`.
#[cube]
pub(super) fn store<T: Float>(sums: &Array<f32>, x: &mut [T], at: &Head, factor: f32, #[comptime] dim: usize) {
    let row = at.start + UNIT_POS as usize / 8;
    #[unroll]
    for i in 0..comptime!(dim.div_ceil(TILE) * 4) {
        let d = UNIT_POS as usize % 8 + i * 8;
        if row < at.end && d < dim {
            x[(row * at.heads + at.head) * dim + d] = T::cast_from(sums[i] * factor);
        }
    }
}

/// The first key that any of the queries from `start` on sees.
#[cube]
pub(super) fn first_key(start: usize, seg_start: usize, window: usize) -> usize {
    let reach = start + 1;
    let mut first = seg_start;
    if reach > seg_start + window {
        first = reach - window;
    }
    first
}

/// Whether a query sees a key of its tiles. A query beyond them may see any: what becomes of it is not stored.
#[cube]
pub(super) fn sees(query: usize, key: usize, window: usize) -> bool {
    key <= query && query < key + window
}
