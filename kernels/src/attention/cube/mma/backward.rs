//! The backward pass on matrix instructions: one kernel, whose cubes have queries or keys.
//!
//! A cube has its own rows and their partners (queries and the gradient of their result, or keys and values) in shared memory, and walks
//! tiles of 32 rows of the other side that see or are seen, twice each: for the scores and the gradients of the weights, and,
//! once these are known, for the sums. Several groups of 32 lanes share 16 rows: in the first pass half of them have scores, the
//! others gradients of weights; in the second each has a part of a chunk's columns. With 256 values a head a cube has 64 rows and
//! takes 96,256 bytes of shared memory, with 512 it has 32 rows, twice as many groups to each, and takes 90,112 bytes.

use super::super::tile::{Head, MASKED, first_key, rows_of, sees};
use super::{CHUNK, copy_rows, multiply_add_pair, no_sums};
use crate::mma::{COPIED, LANES, SCRATCH, Unit, end_copies, load_left, load_right, place_of_sums, wait_for_copies};
use cubecl::prelude::*;
use std::f32::consts::LN_2;

/// Rows of a tile of the other side.
const OTHERS: usize = 32;

/// Which of the kernel's variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Backward {
    /// Values of a head.
    pub(super) dim: usize,
    /// Whether the cube's rows are keys.
    pub(super) keys: bool,
    /// Rows of a cube.
    pub(super) rows: usize,
    /// Groups of lanes that share 16 rows: two or four.
    pub(super) sharing: usize,
    pub(super) unit: Unit,
}

impl Backward {
    /// The variants for heads of `dim` values, for queries and for keys. The emulation has fewer rows: its devices may have 32 KiB
    /// of shared memory.
    pub(super) fn both(dim: usize, unit: Unit) -> [Self; 2] {
        let sharing = if dim > 256 { 4 } else { 2 };
        let rows = match unit {
            Unit::Native => 128 / sharing,
            Unit::Emulated => 16,
        };
        [false, true].map(|keys| Self { dim, keys, rows, sharing, unit })
    }

    /// Units of a cube.
    pub(super) fn units(&self) -> usize {
        self.rows / 16 * self.sharing * LANES
    }

    fn chunks(&self) -> usize {
        self.dim.div_ceil(CHUNK)
    }

    /// Whether a cube's own rows stay in shared memory. In the emulation those of many values pass through it, a chunk at a time.
    fn resident(&self) -> bool {
        self.unit == Unit::Native || self.dim <= 128
    }

    fn scratch(&self) -> usize {
        match self.unit {
            Unit::Native => 1,
            Unit::Emulated => self.units() / LANES * SCRATCH,
        }
    }
}

/// The tiles of the other side that a cube walks: `per` for each of its heads, from row `first`.
#[derive(CubeType, Clone, Copy)]
struct Walk {
    first: usize,
    end: usize,
    per: usize,
    count: usize,
    head: usize,
    heads: usize,
}

/// Tile `i`; none of its rows is there if it is beyond the last.
#[cube]
fn tile_of(walk: &Walk, i: usize) -> Head {
    let start = walk.first + i % walk.per * OTHERS;
    Head { start, end: select(i < walk.count, walk.end, start), head: walk.head + i / walk.per, heads: walk.heads }
}

/// `own` and `d_own` are q and the gradient of the result, or k and v; `other` and `d_other` those of the other side. `d_first` is
/// the gradient of `own`, and for keys `d_second` that of `d_own`.
#[cube(launch_unchecked)]
pub(super) fn mma_backward<E: Float, T: Float>(
    own: &[E],
    d_own: &[E],
    other: &[E],
    d_other: &[E],
    lse: &[f32],
    delta: &[f32],
    tiles: &[u32],
    d_first: &mut [T],
    d_second: &mut [T],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] plan: Backward,
    #[define(E, T)] _dtypes: [ElemType; 2],
) {
    let (unit, dim, chunk, units) = comptime!((plan.unit, plan.dim, CHUNK, plan.units()));
    let (own_rows, chunks, sharing) = comptime!((plan.rows, plan.chunks(), plan.sharing));
    let width = comptime!(if plan.resident() { chunks * chunk } else { chunk });
    let (own_pitch, pitch, weight_pitch) = comptime!((width + COPIED, chunk + COPIED, OTHERS + COPIED));
    let (own_tile, part, stage) = comptime!((own_rows * own_pitch, OTHERS * pitch, 2 * OTHERS * pitch));
    // Where sums are in registers; the emulation takes less code instead.
    let unroll = comptime!(unit == Unit::Native);
    let mut owns = Shared::<[E]>::new_aligned_slice(comptime!(2 * own_tile), 16usize);
    let mut ring = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut weights = Shared::<[E]>::new_aligned_slice(comptime!(own_rows * weight_pitch), 16usize);
    let mut d_scores = Shared::<[E]>::new_aligned_slice(comptime!(own_rows * weight_pitch), 16usize);
    let mut scratch = Shared::<[E]>::new_slice(comptime!(plan.scratch()));

    let rows = rows_of(tiles);
    let group = heads / kv_heads;
    let own_head = CUBE_POS_Y as usize;
    let own_heads = if comptime!(plan.keys) { kv_heads } else { heads };
    let at = Head { start: rows.start, end: rows.end, head: own_head, heads: own_heads };
    let walk = if comptime!(plan.keys) {
        // No query from here on sees the tile's last key.
        let end = usize::min(rows.seg_end, rows.end - 1 + window);
        let per = (end - rows.start).div_ceil(OTHERS);
        Walk { first: rows.start, end, per, count: per * group, head: own_head * group, heads }
    } else {
        let first = first_key(rows.start, rows.seg_start, window);
        let per = (rows.end - first).div_ceil(OTHERS);
        Walk { first, end: rows.end, per, count: per, head: own_head / group, heads: kv_heads }
    };

    let warp = UNIT_POS as usize / LANES;
    let (warp_row, share) = (warp / sharing * 16, warp % sharing);
    // In the first pass: which of the two products, and which columns of it.
    let product = share / comptime!(sharing / 2);
    let pairs = comptime!(OTHERS / 16 / (sharing / 2));
    let warp_col = share % comptime!(sharing / 2) * comptime!(pairs * 16);
    // In the second: which columns of a chunk.
    let col_pairs = comptime!(chunk / sharing / 16);
    let chunk_col = share * comptime!(col_pairs * 16);
    let mut first = no_sums(comptime!(chunks * col_pairs * 2));
    // Queries have none, but no array is empty.
    let mut second = no_sums(comptime!(if plan.keys { chunks * col_pairs * 2 } else { 1 }));

    copy_rows::<E>(own, &at, 0usize, &mut owns, 0usize, own_rows, width, dim, units, unit);
    copy_rows::<E>(d_own, &at, 0usize, &mut owns, own_tile, own_rows, width, dim, units, unit);
    let begin = tile_of(&walk, 0usize);
    copy_rows::<E>(other, &begin, 0usize, &mut ring, 0usize, OTHERS, chunk, dim, units, unit);
    copy_rows::<E>(d_other, &begin, 0usize, &mut ring, part, OTHERS, chunk, dim, units, unit);
    end_copies(unit);
    for i in 0..walk.count {
        let others = tile_of(&walk, i);
        let mut products = no_sums(comptime!(pairs * 2));
        // Chunks take the two stages in turn. Behind a barrier the stage of the chunk before is free.
        for c in 0..chunks {
            wait_for_copies(unit);
            sync_cube();
            let mut own_d0 = c * chunk;
            if comptime!(!plan.resident()) {
                // What the emulation copies is there when it returns, and behind a barrier for all.
                copy_rows::<E>(own, &at, own_d0, &mut owns, 0usize, own_rows, width, dim, units, unit);
                copy_rows::<E>(d_own, &at, own_d0, &mut owns, own_tile, own_rows, width, dim, units, unit);
                sync_cube();
                own_d0 = 0usize;
            }
            // After the last chunk the first comes again, for the sums.
            let (next, d0) = ((c + 1) % 2 * stage, (c + 1) % chunks * chunk);
            copy_rows::<E>(other, &others, d0, &mut ring, next, OTHERS, chunk, dim, units, unit);
            if c + 1 < comptime!(chunks + plan.keys as usize) {
                copy_rows::<E>(d_other, &others, d0, &mut ring, next + part, OTHERS, chunk, dim, units, unit);
            }
            end_copies(unit);
            for step in 0..comptime!(chunk / 16) {
                let k0 = step * 16;
                let left = load_left::<E>(&owns, product * own_tile, warp_row, own_d0 + k0, own_pitch, false, unit);
                #[unroll(unroll)]
                for j in 0..pairs {
                    let (base, col) = (c % 2 * stage + product * part, warp_col + j * 16);
                    let right = load_right::<E>(&ring, base, col, k0, pitch, true, unit);
                    multiply_add_pair::<E>(&left, &right, &mut products, j * 2, &mut scratch, unit);
                }
            }
        }

        // The groups with scores tell the softmax's weights to those with the gradients of weights.
        #[unroll]
        for turn in 0..2usize {
            if product == turn {
                #[unroll]
                for i in 0..2usize {
                    let (row, col) = place_of_sums(i);
                    let own_row = rows.start + warp_row + row;
                    #[unroll(unroll)]
                    for j in 0..comptime!(pairs * 2) {
                        let two = products[j * 2 + i];
                        #[unroll]
                        for e in 0..2usize {
                            let col = warp_col + j * 8 + e + col;
                            let other_row = others.start + col;
                            let (query, key) =
                                if comptime!(plan.keys) { (other_row, own_row) } else { (own_row, other_row) };
                            let seen = own_row < rows.end && other_row < others.end && sees(query, key, window);
                            let query_head = if comptime!(plan.keys) { others.head } else { own_head };
                            let saved = select(seen, query, rows.start) * heads + query_head;
                            let place = (warp_row + row) * weight_pitch + col;
                            if comptime!(turn == 0) {
                                let score = select(seen, two.extract(e) * scale - lse[saved] * LN_2, MASKED);
                                weights[place] = E::cast_from(f32::exp(score));
                            } else {
                                let d_score = f32::cast_from(weights[place]) * (two.extract(e) - delta[saved]);
                                d_scores[place] = E::cast_from(d_score);
                            }
                        }
                    }
                }
            }
            if comptime!(turn == 0) {
                sync_cube();
            }
        }

        #[unroll(unroll)]
        for c in 0..chunks {
            wait_for_copies(unit);
            sync_cube();
            let (now, next) = ((chunks + c) % 2 * stage, (chunks + c + 1) % 2 * stage);
            // After the last chunk the first of the next tile comes.
            let (tile, d0) = (tile_of(&walk, i + (c + 1) / chunks), (c + 1) % chunks * chunk);
            copy_rows::<E>(other, &tile, d0, &mut ring, next, OTHERS, chunk, dim, units, unit);
            if c + comptime!(1 + plan.keys as usize * chunks) >= chunks {
                copy_rows::<E>(d_other, &tile, d0, &mut ring, next + part, OTHERS, chunk, dim, units, unit);
            }
            end_copies(unit);
            for step in 0..comptime!(OTHERS / 16) {
                let k0 = step * 16;
                let left = load_left::<E>(&d_scores, 0usize, warp_row, k0, weight_pitch, false, unit);
                #[unroll(unroll)]
                for j in 0..col_pairs {
                    let (col, at) = (chunk_col + j * 16, (c * col_pairs + j) * 2);
                    let right = load_right::<E>(&ring, now, col, k0, pitch, false, unit);
                    multiply_add_pair::<E>(&left, &right, &mut first, at, &mut scratch, unit);
                }
                if comptime!(plan.keys) {
                    let left = load_left::<E>(&weights, 0usize, warp_row, k0, weight_pitch, false, unit);
                    #[unroll(unroll)]
                    for j in 0..col_pairs {
                        let (col, at) = (chunk_col + j * 16, (c * col_pairs + j) * 2);
                        let right = load_right::<E>(&ring, now + part, col, k0, pitch, false, unit);
                        multiply_add_pair::<E>(&left, &right, &mut second, at, &mut scratch, unit);
                    }
                }
            }
        }
    }

    #[unroll]
    for i in 0..2usize {
        let (row, col) = place_of_sums(i);
        let row = rows.start + warp_row + row;
        if row < rows.end {
            let start = (row * own_heads + own_head) * dim;
            #[unroll(unroll)]
            for j in 0..comptime!(chunks * col_pairs * 2) {
                let d = j / comptime!(col_pairs * 2) * chunk + j % comptime!(col_pairs * 2) * 8 + chunk_col + col;
                #[unroll]
                for e in 0..2usize {
                    if d + e < dim {
                        d_first[start + d + e] = T::cast_from(first[j * 2 + i].extract(e) * scale);
                        if comptime!(plan.keys) {
                            d_second[start + d + e] = T::cast_from(second[j * 2 + i].extract(e));
                        }
                    }
                }
            }
        }
    }
}
