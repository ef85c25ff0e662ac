//! The backward pass, from the log-sum-exp: one kernel whose cubes have queries, one whose cubes have keys.

use super::tile::{Head, PITCH, SHARED, TILE, dot_rows, first_key, load, rows_of, sees, store, weigh_rows, zeros};
use crate::cube::{UNITS, sum_units};
use cubecl::prelude::*;
use std::f32::consts::LN_2;

/// The dot of every head's result and its gradient, one cube a head and token.
#[cube(launch)]
pub(super) fn row_dots<T: Float>(a: &[T], b: &[T], dots: &mut [f32], dim: usize, #[define(T)] _dtype: ElemType) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = (CUBE_POS as usize) < dots.len();
    let row = select(wanted, CUBE_POS as usize, 0usize);
    let mut dot = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < dim {
        dot += f32::cast_from(a[row * dim + i]) * f32::cast_from(b[row * dim + i]);
        i += UNITS;
    }
    let dot = sum_units(dot, &mut partial);
    if wanted && UNIT_POS == 0u32 {
        dots[row] = dot;
    }
}

/// The tiles of both sides, and of their gradients, that two products of one chunk need.
#[derive(CubeType)]
struct Tiles {
    left: Shared<[f32]>,
    right: Shared<[f32]>,
    d_left: Shared<[f32]>,
    d_right: Shared<[f32]>,
}

#[cube]
fn new_tiles() -> Tiles {
    Tiles {
        left: Shared::<[f32]>::new_slice(SHARED),
        right: Shared::<[f32]>::new_slice(SHARED),
        d_left: Shared::<[f32]>::new_slice(SHARED),
        d_right: Shared::<[f32]>::new_slice(SHARED),
    }
}

/// The unit's four products of rows of `left` with rows of `right`, and of `d_left` with `d_right`, over the whole head.
#[cube]
fn two_products<T: Float>(
    left: &[T],
    d_left: &[T],
    own: &Head,
    right: &[T],
    d_right: &[T],
    others: &Head,
    tiles: &mut Tiles,
    #[comptime] dim: usize,
) -> (Array<f32>, Array<f32>) {
    let mut products = zeros(4usize);
    let mut d_products = zeros(4usize);
    for chunk in 0..comptime!(dim.div_ceil(TILE)) {
        load::<T>(left, &mut tiles.left, own, chunk * TILE, dim);
        load::<T>(d_left, &mut tiles.d_left, own, chunk * TILE, dim);
        load::<T>(right, &mut tiles.right, others, chunk * TILE, dim);
        load::<T>(d_right, &mut tiles.d_right, others, chunk * TILE, dim);
        sync_cube();
        dot_rows(&tiles.left, &tiles.right, &mut products);
        dot_rows(&tiles.d_left, &tiles.d_right, &mut d_products);
        sync_cube();
    }
    (products, d_products)
}

/// The weight of a key for a query that sees it, else 0.
#[cube]
fn weight_of(seen: bool, score: f32, lse: f32) -> f32 {
    select(seen, f32::exp(select(seen, score - lse * LN_2, 0.0f32)), 0.0f32)
}

#[cube(launch)]
pub(super) fn backward_queries<T: Float>(
    q: &[T],
    k: &[T],
    v: &[T],
    dout: &[T],
    lse: &[f32],
    delta: &[f32],
    tiles: &[u32],
    dq: &mut [T],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
    #[define(T)] _dtype: ElemType,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut shared = new_tiles();
    let mut d_scores = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let head = CUBE_POS_Y as usize;
    let own = Head { start: rows.start, end: rows.end, head, heads };
    let kv_head = head / (heads / kv_heads);
    let (row, col) = (UNIT_POS as usize / 8, UNIT_POS as usize % 8);
    let query = rows.start + row;
    let place = usize::min(query, rows.end - 1) * heads + head;
    let (row_lse, row_delta) = (lse[place], delta[place]);
    let mut sums = zeros(comptime!(chunks * 4));

    let mut key0 = first_key(rows.start, rows.seg_start, window);
    while key0 < rows.end {
        let keys = Head { start: key0, end: rows.end, head: kv_head, heads: kv_heads };
        let (scores, d_weights) = two_products::<T>(q, dout, &own, k, v, &keys, &mut shared, dim);
        #[unroll]
        for j in 0..4usize {
            let seen = query < rows.end && sees(query, key0 + col + j * 8, window);
            let weight = weight_of(seen, scores[j] * scale, row_lse);
            d_scores[row * PITCH + col + j * 8] = select(seen, weight * (d_weights[j] - row_delta), 0.0f32);
        }
        #[unroll]
        for chunk in 0..chunks {
            load::<T>(k, &mut shared.right, &keys, comptime!(chunk * TILE), dim);
            sync_cube();
            weigh_rows(&d_scores, &shared.right, &mut sums, comptime!(chunk * 4));
            sync_cube();
        }
        key0 += TILE;
    }
    store::<T>(&sums, dq, &own, scale, dim);
}

/// Rows are keys here and columns queries; the query heads that share the keys follow each other.
#[cube(launch)]
pub(super) fn backward_keys<T: Float>(
    q: &[T],
    k: &[T],
    v: &[T],
    dout: &[T],
    lse: &[f32],
    delta: &[f32],
    tiles: &[u32],
    dk: &mut [T],
    dv: &mut [T],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
    #[define(T)] _dtype: ElemType,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut shared = new_tiles();
    let mut weights = Shared::<[f32]>::new_slice(SHARED);
    let mut d_scores = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let kv_head = CUBE_POS_Y as usize;
    let own = Head { start: rows.start, end: rows.end, head: kv_head, heads: kv_heads };
    let group = heads / kv_heads;
    let (row, col) = (UNIT_POS as usize / 8, UNIT_POS as usize % 8);
    let key = rows.start + row;
    let mut dk_sums = zeros(comptime!(chunks * 4));
    let mut dv_sums = zeros(comptime!(chunks * 4));
    // No query from here on sees the tile's last key.
    let queries_end = usize::min(rows.seg_end, rows.end - 1 + window);

    for member in 0..group {
        let head = kv_head * group + member;
        let mut query0 = rows.start;
        while query0 < queries_end {
            let queries = Head { start: query0, end: queries_end, head, heads };
            let (scores, d_weights) = two_products::<T>(k, v, &own, q, dout, &queries, &mut shared, dim);
            #[unroll]
            for j in 0..4usize {
                let query = query0 + col + j * 8;
                let seen = query < queries_end && sees(query, key, window);
                let place = usize::min(query, queries_end - 1) * heads + head;
                let weight = weight_of(seen, scores[j] * scale, lse[place]);
                weights[row * PITCH + col + j * 8] = weight;
                d_scores[row * PITCH + col + j * 8] = select(seen, weight * (d_weights[j] - delta[place]), 0.0f32);
            }
            #[unroll]
            for chunk in 0..chunks {
                load::<T>(q, &mut shared.right, &queries, comptime!(chunk * TILE), dim);
                load::<T>(dout, &mut shared.d_right, &queries, comptime!(chunk * TILE), dim);
                sync_cube();
                weigh_rows(&weights, &shared.d_right, &mut dv_sums, comptime!(chunk * 4));
                weigh_rows(&d_scores, &shared.right, &mut dk_sums, comptime!(chunk * 4));
                sync_cube();
            }
            query0 += TILE;
        }
    }
    store::<T>(&dk_sums, dk, &own, scale, dim);
    store::<T>(&dv_sums, dv, &own, 1.0f32, dim);
}
