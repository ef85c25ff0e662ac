//! Attention on cubecl: FlashAttention-2's tiles in f32, without matrix instructions.
//!
//! A cube has 32 queries (or, for the gradients of keys and values, 32 keys) of one head and segment, and walks the tiles
//! of 32 on the other side that the window and the segment let it see; no other tile is loaded. Eight units share a row
//! and each has every eighth column of the scores and of the result. The head dimension is split into chunks of 32, so
//! that shared memory does not grow with it: at most 25,344 bytes. Tiles are cut at segments, so a segment's result is
//! the same whatever stands beside it.

use super::backend::{AttentionKernel, AttentionOps, Output};
use super::{Attention, Segments};
use crate::cube::{UNITS, empty, line, packed, sum_units, units, upload};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows of a tile, columns of a tile of scores, and depth of a chunk of the head dimension.
const TILE: usize = 32;
/// Distance of rows in shared memory: one more than a tile, so that a column is spread over the banks.
const PITCH: usize = TILE + 1;
/// Elements of a tile in shared memory.
const SHARED: usize = TILE * PITCH;
/// The largest head dimension whose sums stay in registers.
pub const MAX_DIM: usize = 512;
/// Below every score, and far enough above the least f32 that differences stay finite.
const MASKED: f32 = -1e38;
/// log2(e): the log-sum-exp is kept to base 2.
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Sizes that every kernel takes, and the tile of a cube: rows `start..end` of the segment `seg_start..seg_end`.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    start: usize,
    end: usize,
    seg_start: usize,
    seg_end: usize,
}

#[cube]
fn rows_of(tiles: &[u32]) -> Rows {
    let tile = CUBE_POS_X as usize * 4;
    Rows {
        start: tiles[tile] as usize,
        end: tiles[tile + 1] as usize,
        seg_start: tiles[tile + 2] as usize,
        seg_end: tiles[tile + 3] as usize,
    }
}

/// The chunk from dimension `d0` of rows `row0..` of a head, zero from `rows_end` on and beyond the head.
#[cube]
fn load(
    x: &[f32],
    tile: &mut Shared<[f32]>,
    row0: usize,
    rows_end: usize,
    head: usize,
    heads: usize,
    d0: usize,
    #[comptime] dim: usize,
) {
    #[unroll]
    for l in 0..4usize {
        let i = UNIT_POS as usize + l * 256;
        let row = i / TILE;
        let d = i % TILE;
        let mut value = 0.0f32;
        if row0 + row < rows_end && d0 + d < dim {
            value = x[((row0 + row) * heads + head) * dim + d0 + d];
        }
        tile[row * PITCH + d] = value;
    }
}

/// Adds to the unit's four products of its row of `left` with rows of `right`.
#[cube]
fn dot_rows(left: &Shared<[f32]>, right: &Shared<[f32]>, sums: &mut Array<f32>) {
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
fn weigh_rows(weights: &Shared<[f32]>, rows: &Shared<[f32]>, sums: &mut Array<f32>, #[comptime] first: usize) {
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
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut sums = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        sums[i] = 0.0f32;
    }
    sums
}

/// Writes the unit's sums times `factor` to its row of a head.
#[cube]
fn store(
    sums: &Array<f32>,
    x: &mut [f32],
    row: usize,
    rows_end: usize,
    head: usize,
    heads: usize,
    factor: f32,
    #[comptime] dim: usize,
) {
    #[unroll]
    for i in 0..comptime!(dim.div_ceil(TILE) * 4) {
        let d = UNIT_POS as usize % 8 + i * 8;
        if row < rows_end && d < dim {
            x[(row * heads + head) * dim + d] = sums[i] * factor;
        }
    }
}

/// The first key that any of the queries from `start` on sees.
#[cube]
fn first_key(start: usize, seg_start: usize, window: usize) -> usize {
    let reach = start + 1;
    let mut first = seg_start;
    if reach > seg_start + window {
        first = reach - window;
    }
    first
}

#[cube]
fn sees(query: usize, key: usize, window: usize) -> bool {
    key <= query && query < key + window
}

#[cube(launch)]
fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    tiles: &[u32],
    out: &mut [f32],
    lse: &mut [f32],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let mut weights = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let head = CUBE_POS_Y as usize;
    let kv_head = head / (heads / kv_heads);
    let (row, col) = (UNIT_POS as usize / 8, UNIT_POS as usize % 8);
    let query = rows.start + row;
    let mut sums = zeros(comptime!(chunks * 4));
    let mut largest = f32::new(-1e38);
    let mut total = 0.0f32;

    let mut key0 = first_key(rows.start, rows.seg_start, window);
    while key0 < rows.end {
        let mut scores = zeros(4usize);
        for chunk in 0..chunks {
            load(q, &mut left, rows.start, rows.end, head, heads, chunk * TILE, dim);
            load(k, &mut right, key0, rows.end, kv_head, kv_heads, chunk * TILE, dim);
            sync_cube();
            dot_rows(&left, &right, &mut scores);
            sync_cube();
        }
        #[unroll]
        for j in 0..4usize {
            let key = key0 + col + j * 8;
            let seen = query < rows.end && sees(query, key, window);
            scores[j] = select(seen, scores[j] * scale, MASKED);
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
            load(v, &mut right, key0, rows.end, kv_head, kv_heads, comptime!(chunk * TILE), dim);
            sync_cube();
            weigh_rows(&weights, &right, &mut sums, comptime!(chunk * 4));
            sync_cube();
        }
        key0 += TILE;
    }
    store(&sums, out, query, rows.end, head, heads, 1.0f32 / total, dim);
    if col == 0 && query < rows.end {
        lse[query * heads + head] = (largest + f32::ln(total)) * LOG2_E;
    }
}

/// `delta`: the dot of every head's result and its gradient, one cube a head and token.
#[cube(launch)]
fn row_dots(a: &[f32], b: &[f32], dots: &mut [f32], dim: usize) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = (CUBE_POS as usize) < dots.len();
    let row = select(wanted, CUBE_POS as usize, 0usize);
    let mut dot = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < dim {
        dot += a[row * dim + i] * b[row * dim + i];
        i += UNITS;
    }
    let dot = sum_units(dot, &mut partial);
    if wanted && UNIT_POS == 0u32 {
        dots[row] = dot;
    }
}

#[cube(launch)]
fn backward_queries(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dout: &[f32],
    lse: &[f32],
    delta: &[f32],
    tiles: &[u32],
    dq: &mut [f32],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let mut d_left = Shared::<[f32]>::new_slice(SHARED);
    let mut d_right = Shared::<[f32]>::new_slice(SHARED);
    let mut d_scores = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let head = CUBE_POS_Y as usize;
    let kv_head = head / (heads / kv_heads);
    let (row, col) = (UNIT_POS as usize / 8, UNIT_POS as usize % 8);
    let query = rows.start + row;
    let place = usize::min(query, rows.end - 1) * heads + head;
    let (row_lse, row_delta) = (lse[place] / LOG2_E, delta[place]);
    let mut sums = zeros(comptime!(chunks * 4));

    let mut key0 = first_key(rows.start, rows.seg_start, window);
    while key0 < rows.end {
        let mut scores = zeros(4usize);
        let mut d_weights = zeros(4usize);
        for chunk in 0..chunks {
            load(q, &mut left, rows.start, rows.end, head, heads, chunk * TILE, dim);
            load(dout, &mut d_left, rows.start, rows.end, head, heads, chunk * TILE, dim);
            load(k, &mut right, key0, rows.end, kv_head, kv_heads, chunk * TILE, dim);
            load(v, &mut d_right, key0, rows.end, kv_head, kv_heads, chunk * TILE, dim);
            sync_cube();
            dot_rows(&left, &right, &mut scores);
            dot_rows(&d_left, &d_right, &mut d_weights);
            sync_cube();
        }
        #[unroll]
        for j in 0..4usize {
            let key = key0 + col + j * 8;
            let seen = query < rows.end && sees(query, key, window);
            let weight = f32::exp(select(seen, scores[j] * scale - row_lse, 0.0f32));
            d_scores[row * PITCH + col + j * 8] = select(seen, weight * (d_weights[j] - row_delta), 0.0f32);
        }
        #[unroll]
        for chunk in 0..chunks {
            load(k, &mut right, key0, rows.end, kv_head, kv_heads, comptime!(chunk * TILE), dim);
            sync_cube();
            weigh_rows(&d_scores, &right, &mut sums, comptime!(chunk * 4));
            sync_cube();
        }
        key0 += TILE;
    }
    store(&sums, dq, query, rows.end, head, heads, scale, dim);
}

/// Rows are keys here and columns queries; the query heads that share the keys follow each other.
#[cube(launch)]
fn backward_keys(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dout: &[f32],
    lse: &[f32],
    delta: &[f32],
    tiles: &[u32],
    dk: &mut [f32],
    dv: &mut [f32],
    heads: usize,
    kv_heads: usize,
    window: usize,
    scale: f32,
    #[comptime] dim: usize,
) {
    let chunks = comptime!(dim.div_ceil(TILE));
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let mut d_left = Shared::<[f32]>::new_slice(SHARED);
    let mut d_right = Shared::<[f32]>::new_slice(SHARED);
    let mut weights = Shared::<[f32]>::new_slice(SHARED);
    let mut d_scores = Shared::<[f32]>::new_slice(SHARED);
    let rows = rows_of(tiles);
    let kv_head = CUBE_POS_Y as usize;
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
            let mut scores = zeros(4usize);
            let mut d_weights = zeros(4usize);
            for chunk in 0..chunks {
                load(k, &mut left, rows.start, rows.end, kv_head, kv_heads, chunk * TILE, dim);
                load(v, &mut d_left, rows.start, rows.end, kv_head, kv_heads, chunk * TILE, dim);
                load(q, &mut right, query0, queries_end, head, heads, chunk * TILE, dim);
                load(dout, &mut d_right, query0, queries_end, head, heads, chunk * TILE, dim);
                sync_cube();
                dot_rows(&left, &right, &mut scores);
                dot_rows(&d_left, &d_right, &mut d_weights);
                sync_cube();
            }
            #[unroll]
            for j in 0..4usize {
                let query = query0 + col + j * 8;
                let seen = query < queries_end && key < rows.end && sees(query, key, window);
                let place = usize::min(query, queries_end - 1) * heads + head;
                let weight = f32::exp(select(seen, scores[j] * scale - lse[place] / LOG2_E, 0.0f32));
                weights[row * PITCH + col + j * 8] = select(seen, weight, 0.0f32);
                d_scores[row * PITCH + col + j * 8] = select(seen, weight * (d_weights[j] - delta[place]), 0.0f32);
            }
            #[unroll]
            for chunk in 0..chunks {
                load(q, &mut right, query0, queries_end, head, heads, comptime!(chunk * TILE), dim);
                load(dout, &mut d_right, query0, queries_end, head, heads, comptime!(chunk * TILE), dim);
                sync_cube();
                weigh_rows(&weights, &d_right, &mut dv_sums, comptime!(chunk * 4));
                weigh_rows(&d_scores, &right, &mut dk_sums, comptime!(chunk * 4));
                sync_cube();
            }
            query0 += TILE;
        }
    }
    store(&dk_sums, dk, key, rows.end, kv_head, kv_heads, scale, dim);
    store(&dv_sums, dv, key, rows.end, kv_head, kv_heads, 1.0f32, dim);
}

/// `[tiles, 4]`: rows and segment of each tile, none across segments.
fn tiles(segments: &Segments) -> Vec<u32> {
    let of_segment = |segment: std::ops::Range<usize>| {
        let (start, end) = (segment.start as u32, segment.end as u32);
        segment.step_by(TILE).flat_map(move |row| [row as u32, (row as u32 + TILE as u32).min(end), start, end])
    };
    segments.ranges().flat_map(of_segment).collect()
}

/// Operands as the kernels take them.
struct Inputs {
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    tiles: CubeTensor,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: usize,
    scale: f32,
}

impl Inputs {
    fn new(q: CubeTensor, k: CubeTensor, v: CubeTensor, attention: &Attention) -> Self {
        let [q, k, v] = [q, k, v].map(|tensor| packed("windowed_attention", tensor));
        let ([tokens, heads, dim], [_, kv_heads, _]) = (q.shape().dims(), k.shape().dims());
        assert!(
            dim <= MAX_DIM,
            "windowed_attention: the cubecl kernel takes head dimensions up to {MAX_DIM}, not {dim}"
        );
        let window = attention.window.unwrap_or(tokens).min(tokens);
        let tiles = upload(&q, &tiles(&attention.segments));
        Self { q, k, v, tiles, heads, kv_heads, dim, window, scale: attention.scale as f32 }
    }

    fn cubes(&self, heads: usize) -> CubeCount {
        CubeCount::Static((self.tiles.shape().num_elements() / 4) as u32, heads as u32, 1)
    }
}

impl AttentionKernel for CubeBackend {
    fn forward(q: CubeTensor, k: CubeTensor, v: CubeTensor, attention: &Attention) -> Output<CubeBackend> {
        let inputs = Inputs::new(q, k, v, attention);
        let cubes = inputs.cubes(inputs.heads);
        let Inputs { q, k, v, tiles, heads, kv_heads, dim, window, scale } = inputs;
        let out = empty(&q, q.shape(), DType::F32);
        let lse = empty(&q, [q.shape()[0], heads], DType::F32);
        forward::launch(
            &q.client.clone(),
            cubes,
            units(),
            q.into_buffer_arg(),
            k.into_buffer_arg(),
            v.into_buffer_arg(),
            tiles.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            heads,
            kv_heads,
            window,
            scale,
            dim,
        );
        Output { out, lse }
    }

    fn backward(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        output: Output<CubeBackend>,
        dout: CubeTensor,
        attention: &Attention,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let inputs = Inputs::new(q, k, v, attention);
        let (query_cubes, key_cubes) = (inputs.cubes(inputs.heads), inputs.cubes(inputs.kv_heads));
        let Inputs { q, k, v, tiles, heads, kv_heads, dim, window, scale } = inputs;
        let [out, lse, dout] = [output.out, output.lse, dout].map(|tensor| packed("windowed_attention", tensor));
        let client = q.client.clone();
        let delta = empty(&q, lse.shape(), DType::F32);
        row_dots::launch(
            &client,
            line(delta.shape().num_elements()),
            units(),
            out.into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            dim,
        );
        let [dq, dk, dv] = [&q, &k, &v].map(|x| empty(x, x.shape(), DType::F32));
        backward_queries::launch(
            &client,
            query_cubes,
            units(),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            dout.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            tiles.clone().into_buffer_arg(),
            dq.clone().into_buffer_arg(),
            heads,
            kv_heads,
            window,
            scale,
            dim,
        );
        backward_keys::launch(
            &client,
            key_cubes,
            units(),
            q.into_buffer_arg(),
            k.into_buffer_arg(),
            v.into_buffer_arg(),
            dout.into_buffer_arg(),
            lse.into_buffer_arg(),
            delta.into_buffer_arg(),
            tiles.into_buffer_arg(),
            dk.clone().into_buffer_arg(),
            dv.clone().into_buffer_arg(),
            heads,
            kv_heads,
            window,
            scale,
            dim,
        );
        (dq, dk, dv)
    }
}

impl AttentionOps for CubeBackend {
    fn windowed_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        attention: Attention,
    ) -> (CubeTensor, CubeTensor) {
        let Output { out, lse } = Self::forward(q, k, v, &attention);
        (out, lse)
    }

    fn windowed_attention_known(
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        out: CubeTensor,
        _: CubeTensor,
        _: Attention,
    ) -> CubeTensor {
        out
    }
}
