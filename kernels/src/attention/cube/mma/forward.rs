//! The forward pass on matrix instructions.
//!
//! A cube has 64 queries of one head and eight groups of 32 lanes. Two groups share 16 queries: each has half of a tile's
//! keys in the scores, and half of a chunk's columns in the result, so that the sums of a head of 512 values stay in
//! registers. Queries stay in shared memory; keys and values pass through it in chunks of the head, in two stages: while
//! one is multiplied, the next is on its way. With 512 values a cube takes 96,256 bytes of it.

use super::super::tile::{Head, MASKED, first_key, rows_of, sees};
use super::{CHUNK, copy_rows, multiply_add_pair, no_sums};
use crate::mma::{COPIED, LANES, SCRATCH, Unit, end_copies, load_left, load_right, place_of_sums, wait_for_copies};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// What each row's eight lanes, four in each of two groups, tell each other.
const PARTIALS: usize = 8;

/// Which of the kernel's variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Forward {
    /// Values of a head.
    dim: usize,
    /// Queries of a cube.
    pub(super) queries: usize,
    unit: Unit,
}

impl Forward {
    /// The variant for heads of `dim` values. The emulation has fewer queries: its devices may have 32 KiB of shared memory.
    pub(super) fn new(dim: usize, unit: Unit) -> Self {
        let queries = match unit {
            Unit::Native => 64,
            Unit::Emulated => 16,
        };
        Self { dim, queries, unit }
    }

    /// Units of a cube.
    pub(super) fn units(&self) -> usize {
        self.queries / 16 * 2 * LANES
    }

    fn chunks(&self) -> usize {
        self.dim.div_ceil(CHUNK)
    }

    /// Whether queries stay in shared memory. In the emulation those of many values pass through it, a chunk at a time.
    fn resident(&self) -> bool {
        self.unit == Unit::Native || self.dim <= 256
    }

    fn scratch(&self) -> usize {
        match self.unit {
            Unit::Native => 1,
            Unit::Emulated => self.units() / LANES * SCRATCH,
        }
    }
}

/// Tells the other lanes of both of this lane's rows `values`, and gives what all of a row told: the largest, or the sum. All
/// units come to a barrier between two calls.
#[cube]
fn over_row(values: &Array<f32>, partial: &mut Shared<[f32]>, #[comptime] largest: bool) -> Array<f32> {
    let warp = UNIT_POS as usize / LANES;
    let own = warp % 2 * 4 + UNIT_POS as usize % 4;
    let mut results = Array::<f32>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let (row, _) = place_of_sums(i);
        partial[(warp / 2 * 16 + row) * PARTIALS + own] = values[i];
    }
    sync_cube();
    #[unroll]
    for i in 0..2usize {
        let (row, _) = place_of_sums(i);
        let first = (warp / 2 * 16 + row) * PARTIALS;
        let mut result = partial[first];
        #[unroll]
        for j in 1..8usize {
            let other = partial[first + j];
            result = if comptime!(largest) { f32::max(result, other) } else { result + other };
        }
        results[i] = result;
    }
    results
}

/// Two groups of lanes have 16 rows of the result, and a row's log-sum-exp.
#[cube(launch_unchecked)]
pub(super) fn mma_forward<E: Float, T: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    tiles: &[u32],
    out: &mut [T],
    lse: &mut [f32],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] plan: Forward,
    #[define(E, T)] _dtypes: [ElemType; 2],
) {
    let (unit, dim, chunk, units) = comptime!((plan.unit, plan.dim, CHUNK, plan.units()));
    let (chunks, keys, half) = comptime!((plan.chunks(), chunk, chunk / 2));
    let width = comptime!(if plan.resident() { chunks * chunk } else { chunk });
    let (query_pitch, pitch) = comptime!((width + COPIED, chunk + COPIED));
    let stage = comptime!(keys * pitch);
    // Where sums are in registers; the emulation takes less code instead.
    let unroll = comptime!(unit == Unit::Native);
    let mut queries = Shared::<[E]>::new_aligned_slice(comptime!(plan.queries * query_pitch), 16usize);
    let mut ring = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut weights = Shared::<[E]>::new_aligned_slice(comptime!(plan.queries * pitch), 16usize);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.queries * PARTIALS));
    let mut scratch = Shared::<[E]>::new_slice(comptime!(plan.scratch()));
    let rows = rows_of(tiles);
    let head = CUBE_POS_Y as usize;
    let own = Head { start: rows.start, end: rows.end, head, heads };
    let kv_head = head / (heads / kv_heads);
    let warp = UNIT_POS as usize / LANES;
    let (warp_row, warp_half) = (warp / 2 * 16, warp % 2 * half);

    let mut sums = no_sums(comptime!(chunks * half / 8));
    let mut largest = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        largest[i] = f32::new(-1e38);
        total[i] = 0.0f32;
    }

    let mut key0 = first_key(rows.start, rows.seg_start, window);
    let begin = Head { start: key0, end: rows.end, head: kv_head, heads: kv_heads };
    copy_rows::<E>(q, &own, 0usize, &mut queries, 0usize, comptime!(plan.queries), width, dim, units, unit);
    copy_rows::<E>(k, &begin, 0usize, &mut ring, 0usize, keys, chunk, dim, units, unit);
    end_copies(unit);
    while key0 < rows.end {
        // Chunks of keys and then of values take the two stages in turn. Behind a barrier the stage of the chunk before is free.
        let at = Head { start: key0, end: rows.end, head: kv_head, heads: kv_heads };
        let mut scores = no_sums(comptime!(half / 8));
        for c in 0..chunks {
            wait_for_copies(unit);
            sync_cube();
            let mut d0 = c * chunk;
            if comptime!(!plan.resident()) {
                // What the emulation copies is there when it returns, and behind a barrier for all.
                copy_rows::<E>(q, &own, d0, &mut queries, 0usize, comptime!(plan.queries), width, dim, units, unit);
                sync_cube();
                d0 = 0usize;
            }
            let next = (c + 1) % 2 * stage;
            if c + 1 < chunks {
                copy_rows::<E>(k, &at, (c + 1) * chunk, &mut ring, next, keys, chunk, dim, units, unit);
            } else {
                copy_rows::<E>(v, &at, 0usize, &mut ring, next, keys, chunk, dim, units, unit);
            }
            end_copies(unit);
            for step in 0..comptime!(chunk / 16) {
                let k0 = step * 16;
                let left = load_left::<E>(&queries, 0usize, warp_row, d0 + k0, query_pitch, false, unit);
                #[unroll(unroll)]
                for j in 0..comptime!(half / 16) {
                    let col = warp_half + j * 16;
                    let right = load_right::<E>(&ring, c % 2 * stage, col, k0, pitch, true, unit);
                    multiply_add_pair::<E>(&left, &right, &mut scores, j * 2, &mut scratch, unit);
                }
            }
        }

        let mut tops = Array::<f32>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            let (row, col) = place_of_sums(i);
            let query = rows.start + warp_row + row;
            let mut top = f32::new(-1e38);
            #[unroll(unroll)]
            for j in 0..comptime!(half / 8) {
                let mut two = scores[j * 2 + i];
                #[unroll]
                for e in 0..2usize {
                    let key = key0 + warp_half + j * 8 + e + col;
                    let score = select(sees(query, key, window), two.extract(e) * scale, MASKED);
                    two.insert(e, score);
                    top = f32::max(top, score);
                }
                scores[j * 2 + i] = two;
            }
            tops[i] = top;
        }
        let tops = over_row(&tops, &mut partial, true);
        #[unroll]
        for i in 0..2usize {
            let (row, col) = place_of_sums(i);
            let now = f32::max(largest[i], tops[i]);
            let correction = f32::exp(largest[i] - now);
            largest[i] = now;
            let mut sum = total[i] * correction;
            #[unroll(unroll)]
            for j in 0..comptime!(half / 8) {
                let two = scores[j * 2 + i];
                #[unroll]
                for e in 0..2usize {
                    let score = two.extract(e);
                    let weight = select(score > MASKED, f32::exp(score - now), 0.0f32);
                    sum += weight;
                    let place = (warp_row + row) * pitch + warp_half + j * 8 + e + col;
                    weights[place] = E::cast_from(weight);
                }
            }
            total[i] = sum;
            #[unroll(unroll)]
            for j in 0..comptime!(chunks * half / 8) {
                let two = sums[j * 2 + i] * Vector::new(correction);
                sums[j * 2 + i] = two;
            }
        }

        let following = Head { start: key0 + keys, end: rows.end, head: kv_head, heads: kv_heads };
        #[unroll(unroll)]
        for c in 0..chunks {
            wait_for_copies(unit);
            sync_cube();
            let (now, next) = ((chunks + c) % 2 * stage, (chunks + c + 1) % 2 * stage);
            if c + 1 < chunks {
                copy_rows::<E>(v, &at, (c + 1) * chunk, &mut ring, next, keys, chunk, dim, units, unit);
            } else {
                copy_rows::<E>(k, &following, 0usize, &mut ring, next, keys, chunk, dim, units, unit);
            }
            end_copies(unit);
            for step in 0..comptime!(keys / 16) {
                let k0 = step * 16;
                let left = load_left::<E>(&weights, 0usize, warp_row, k0, pitch, false, unit);
                #[unroll(unroll)]
                for j in 0..comptime!(half / 16) {
                    let (col, first) = (warp_half + j * 16, c * comptime!(half / 8) + j * 2);
                    let right = load_right::<E>(&ring, now, col, k0, pitch, false, unit);
                    multiply_add_pair::<E>(&left, &right, &mut sums, first, &mut scratch, unit);
                }
            }
        }
        key0 += keys;
    }

    let total = over_row(&total, &mut partial, false);
    #[unroll]
    for i in 0..2usize {
        let (row, col) = place_of_sums(i);
        let query = rows.start + warp_row + row;
        if query < rows.end {
            let (start, factor) = ((query * heads + head) * dim, 1.0f32 / total[i]);
            #[unroll(unroll)]
            for j in 0..comptime!(chunks * half / 8) {
                let two = sums[j * 2 + i];
                let d = j / comptime!(half / 8) * chunk + j % comptime!(half / 8) * 8 + warp_half + col;
                #[unroll]
                for e in 0..2usize {
                    if d + e < dim {
                        out[start + d + e] = T::cast_from(two.extract(e) * factor);
                    }
                }
            }
            if warp_half == 0 && col == 0 {
                lse[query * heads + head] = (largest[i] + f32::ln(total[i])) * LOG2_E;
            }
        }
    }
}
