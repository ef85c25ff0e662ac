//! The forward pass: an online softmax over the tiles of keys.

use super::tile::{
    Head, MASKED, PITCH, SHARED, TILE, dot_rows, first_key, load, rows_of, sees, store, weigh_rows, zeros,
};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

#[cube(launch)]
pub(super) fn forward<T: Float>(
    q: &[T],
    k: &[T],
    v: &[T],
    tiles: &[u32],
    out: &mut [T],
    lse: &mut [f32],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
    #[define(T)] _dtype: ElemType,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let mut weights = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let head = CUBE_POS_Y as usize;
    let own = Head { start: rows.start, end: rows.end, head, heads };
    let kv_head = head / (heads / kv_heads);
    let (row, col) = (UNIT_POS as usize / 8, UNIT_POS as usize % 8);
    let query = rows.start + row;
    let mut sums = zeros(comptime!(chunks * 4));
    let mut largest = f32::new(-1e38);
    let mut total = 0.0f32;

    let mut key0 = first_key(rows.start, rows.seg_start, window);
    while key0 < rows.end {
        let keys = Head { start: key0, end: rows.end, head: kv_head, heads: kv_heads };
        let mut scores = zeros(4usize);
        for chunk in 0..chunks {
            load::<T>(q, &mut left, &own, chunk * TILE, dim);
            load::<T>(k, &mut right, &keys, chunk * TILE, dim);
            sync_cube();
            dot_rows(&left, &right, &mut scores);
            sync_cube();
        }
        #[unroll]
        for j in 0..4usize {
            let key = key0 + col + j * 8;
            scores[j] = select(sees(query, key, window), scores[j] * scale, MASKED);
            weights[row * PITCH + col + j * 8] = scores[j];
        }
        sync_cube();
        let before = largest;
        for i in 0..TILE {
            largest = f32::max(largest, weights[row * PITCH + i]);
        }
        sync_cube();
        #[unroll]
        for j in 0..4usize {
            let weight = f32::exp(scores[j] - largest);
            weights[row * PITCH + col + j * 8] = select(scores[j] > MASKED, weight, 0.0f32);
        }
        sync_cube();
        let correction = f32::exp(before - largest);
        total *= correction;
        for i in 0..TILE {
            total += weights[row * PITCH + i];
        }
        #[unroll]
        for i in 0..comptime!(chunks * 4) {
            sums[i] = sums[i] * correction;
        }
        #[unroll]
        for chunk in 0..chunks {
            load::<T>(v, &mut right, &keys, comptime!(chunk * TILE), dim);
            sync_cube();
            weigh_rows(&weights, &right, &mut sums, comptime!(chunk * 4));
            sync_cube();
        }
        key0 += TILE;
    }
    store::<T>(&sums, out, &own, 1.0f32 / total, dim);
    if col == 0 && query < rows.end {
        lse[query * heads + head] = (largest + f32::ln(total)) * LOG2_E;
    }
}
