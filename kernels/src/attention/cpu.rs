//! f32 slices, cut into tiles by shape alone and shared out over rayon.
//!
//! Forward: one task per query head and tile of queries. Backward: the segment is a grid of blocks of keys by blocks
//! of queries. A task is one cell of the grid and one key head, and adds to the gradients of that cell's queries and
//! keys; the cells of one diagonal share neither, so they run side by side, and the diagonals follow each other. Every
//! sum therefore has one order, whatever the number of threads, and each score is recomputed once.

use std::ops::Range;

use rayon::prelude::*;

use super::buffer::{Buffer, gather, transpose};
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Kind, Portable, Simd};
use super::tile::{Band, Gemm, Hidden, KEYS, Left, NO_SCORE, OnlineSoftmax, Probabilities, QUERIES, Right, Write};
use super::{Attention, Heads, Isa};
use crate::simd::{self, vectorised};

/// Side of a cell of the backward pass's grid, in tokens.
const BLOCK: usize = 256;

/// What both directions read.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[tokens, query heads, dim]`.
    pub q: &'a [f32],
    /// `[tokens, kv heads, dim]`.
    pub k: &'a [f32],
    /// `[tokens, kv heads, dim]`.
    pub v: &'a [f32],
    /// Sizes of the heads.
    pub heads: Heads,
    /// Segments, window and scale.
    pub attention: &'a Attention,
}

/// What the backward pass reads besides the inputs.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    /// The forward pass's result.
    pub out: &'a [f32],
    /// The forward pass's base-2 log-sum-exp `[tokens, query heads]`.
    pub lse: &'a [f32],
    /// The gradient of the result.
    pub dout: &'a [f32],
}

/// What the backward pass adds to: shaped as the inputs.
pub struct Gradients<'a> {
    /// Of `q`.
    pub dq: &'a mut [f32],
    /// Of `k`.
    pub dk: &'a mut [f32],
    /// Of `v`.
    pub dv: &'a mut [f32],
}

/// Writes the result `[tokens, query heads, dim]` and the base-2 log-sum-exp `[tokens, query heads]`.
pub fn forward(isa: Isa, inputs: &Inputs, out: &mut [f32], lse: &mut [f32]) {
    inputs.check();
    assert_eq!(out.len(), inputs.q.len());
    assert_eq!(lse.len(), inputs.tokens() * inputs.heads.query);
    match isa.0 {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => forward_with::<Avx512>(inputs, out, lse),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => forward_with::<Avx2>(inputs, out, lse),
        Kind::Portable => forward_with::<Portable>(inputs, out, lse),
    }
}

/// Adds the gradients with respect to the inputs.
pub fn backward(isa: Isa, inputs: &Inputs, saved: &Saved, gradients: Gradients) {
    inputs.check();
    assert_eq!(saved.lse.len(), inputs.tokens() * inputs.heads.query);
    assert!([saved.out.len(), saved.dout.len(), gradients.dq.len()].iter().all(|&len| len == inputs.q.len()));
    assert!(gradients.dk.len() == inputs.k.len() && gradients.dv.len() == inputs.v.len());
    match isa.0 {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => backward_with::<Avx512>(inputs, saved, gradients),
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2 => backward_with::<Avx2>(inputs, saved, gradients),
        Kind::Portable => backward_with::<Portable>(inputs, saved, gradients),
    }
}

impl Inputs<'_> {
    fn check(&self) {
        let Heads { query, kv, dim } = self.heads;
        assert!(kv > 0 && query % kv == 0 && dim > 0);
        assert_eq!(self.q.len(), self.tokens() * query * dim);
        assert!(self.k.len() == self.tokens() * kv * dim && self.v.len() == self.k.len());
    }

    fn tokens(&self) -> usize {
        self.attention.segments.tokens()
    }

    fn scale(&self) -> f32 {
        self.attention.scale as f32
    }

    /// Scores are kept in base 2: this takes the place of the scale.
    fn scale_log2(&self) -> f32 {
        (self.attention.scale * std::f64::consts::LOG2_E) as f32
    }

    fn window(&self, segment: &Range<usize>) -> usize {
        self.attention.window.map_or(segment.len(), |window| window.min(segment.len()))
    }

    /// Where query head `head` of `token` starts.
    fn query_at(&self, token: usize, head: usize) -> usize {
        (token * self.heads.query + head) * self.heads.dim
    }

    /// Where key head `head` of `token` starts.
    fn key_at(&self, token: usize, head: usize) -> usize {
        (token * self.heads.kv + head) * self.heads.dim
    }

    fn query_stride(&self) -> usize {
        self.heads.query * self.heads.dim
    }

    fn key_stride(&self) -> usize {
        self.heads.kv * self.heads.dim
    }
}

/// A result that tasks write to at places of their own.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: the pointer is used inside one call that holds the only reference to the slice, and each task writes to
// (token, head) rows that no other task of the same parallel loop touches.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

fn forward_with<S: Simd>(inputs: &Inputs, out: &mut [f32], lse: &mut [f32]) {
    let tiles: Vec<(Range<usize>, usize)> = (inputs.attention.segments.ranges())
        .flat_map(|segment| (0..segment.len()).step_by(QUERIES).map(move |first| (segment.clone(), first)))
        .collect();
    let (out, lse) = (Shared(out.as_mut_ptr()), Shared(lse.as_mut_ptr()));
    (0..inputs.heads.query * tiles.len()).into_par_iter().for_each_init(
        || ForwardBuffers::new(inputs.heads.dim),
        |buffers, task| {
            let (segment, first) = &tiles[task / inputs.heads.query];
            forward_tile::<S>(inputs, segment, *first, task % inputs.heads.query, buffers, out, lse);
        },
    );
}

struct ForwardBuffers {
    q: Buffer,
    q_t: Buffer,
    scores: Buffer,
    out: Buffer,
}

impl ForwardBuffers {
    fn new(dim: usize) -> Self {
        Self {
            q: Buffer::new(dim * QUERIES),
            q_t: Buffer::new(dim * QUERIES),
            scores: Buffer::new(KEYS * QUERIES),
            out: Buffer::new(QUERIES * dim),
        }
    }
}

/// The queries of `segment` from `first` on (counted in the segment), for one head.
fn forward_tile<S: Simd>(
    inputs: &Inputs,
    segment: &Range<usize>,
    first: usize,
    head: usize,
    buffers: &mut ForwardBuffers,
    out: Shared,
    lse: Shared,
) {
    let Heads { query, kv, dim } = inputs.heads;
    let kv_head = head / (query / kv);
    let window = inputs.window(segment);
    let queries = QUERIES.min(segment.len() - first);
    let lanes = queries.next_multiple_of(S::LANES);
    let (q, q_t) = (buffers.q.values(), buffers.q_t.values());
    let (scores, sums) = (buffers.scores.values(), buffers.out.values());
    gather(&inputs.q[inputs.query_at(segment.start + first, head)..], inputs.query_stride(), queries, dim, q);
    transpose(q, queries, dim, inputs.scale_log2(), q_t);
    sums.fill(0.0);
    let (mut max, mut sum, mut rescale) = ([NO_SCORE; QUERIES], [0.0; QUERIES], [0.0; QUERIES]);

    let end = first + queries;
    for key in ((first + 1).saturating_sub(window)..end).step_by(KEYS) {
        let keys = KEYS.min(end - key);
        let band = Band { offset: first as isize - key as isize, window: window as isize };
        let at = inputs.key_at(segment.start + key, kv_head);
        let scores_of_keys = Gemm {
            a: Left { data: &inputs.k[at..], row_stride: inputs.key_stride(), depth_stride: 1 },
            b: Right { data: q_t, stride: QUERIES },
            c: scores.as_mut_ptr(),
            c_stride: QUERIES,
            rows: keys,
            cols: lanes,
            depth: dim,
            band,
            hidden: Hidden::Queries,
            write: Write::Set,
        };
        // SAFETY: `Isa` proves the instruction set; `scores` holds `KEYS` rows of `QUERIES`.
        unsafe { S::gemm(&scores_of_keys) };
        let mut softmax =
            OnlineSoftmax { scores, keys, queries: lanes, band, max: &mut max, sum: &mut sum, rescale: &mut rescale };
        // SAFETY: as above.
        unsafe { S::online_softmax(&mut softmax) };
        let weighted_values = Gemm {
            a: Left { data: scores, row_stride: 1, depth_stride: QUERIES },
            b: Right { data: &inputs.v[at..], stride: inputs.key_stride() },
            c: sums.as_mut_ptr(),
            c_stride: dim,
            rows: queries,
            cols: dim,
            depth: keys,
            band,
            hidden: Hidden::DepthKeys,
            write: Write::Rescale(&rescale),
        };
        // SAFETY: as above; `sums` holds `QUERIES` rows of `dim`.
        unsafe { S::gemm(&weighted_values) };
    }

    for (row, (max, sum)) in max.into_iter().zip(sum).take(queries).enumerate() {
        let token = segment.start + first + row;
        let factor = sum.recip();
        // SAFETY: this task alone writes the rows of its queries and head, which lie inside `out` and `lse`.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(inputs.query_at(token, head)), dim) };
        out.iter_mut().zip(&sums[row * dim..]).for_each(|(out, sum)| *out = sum * factor);
        // SAFETY: as above.
        unsafe { *lse.at(token * query + head) = max + sum.log2() };
    }
}

fn backward_with<S: Simd>(inputs: &Inputs, saved: &Saved, gradients: Gradients) {
    let delta = delta(inputs, saved);
    let segments: Vec<Range<usize>> = inputs.attention.segments.ranges().collect();
    let shared = SharedGradients {
        dq: Shared(gradients.dq.as_mut_ptr()),
        dk: Shared(gradients.dk.as_mut_ptr()),
        dv: Shared(gradients.dv.as_mut_ptr()),
    };
    for diagonal in 0.. {
        let cells: Vec<(Range<usize>, usize)> = (segments.iter())
            .filter(|segment| diagonal * BLOCK <= BLOCK + inputs.window(segment) - 2)
            .flat_map(|segment| {
                let blocks = segment.len().div_ceil(BLOCK).saturating_sub(diagonal);
                (0..blocks).map(|block| (segment.clone(), block * BLOCK))
            })
            .collect();
        if cells.is_empty() {
            break;
        }
        (0..inputs.heads.kv * cells.len()).into_par_iter().for_each_init(
            || BackwardBuffers::new(inputs.heads.dim),
            |buffers, task| {
                let (segment, keys) = &cells[task / inputs.heads.kv];
                let cell = Cell {
                    segment: segment.clone(),
                    keys: *keys..segment.len().min(keys + BLOCK),
                    queries: keys + diagonal * BLOCK..segment.len().min(keys + (diagonal + 1) * BLOCK),
                    kv_head: task % inputs.heads.kv,
                };
                backward_cell::<S>(inputs, saved, &delta, &cell, buffers, shared);
            },
        );
    }
}

/// `scale * dout . out` per query: `[tokens, query heads]`.
fn delta(inputs: &Inputs, saved: &Saved) -> Vec<f32> {
    let rows = saved.out.par_chunks(inputs.heads.dim).zip(saved.dout.par_chunks(inputs.heads.dim));
    let isa = simd::Isa::detect();
    rows.with_min_len(256).map(|(out, dout)| inputs.scale() * dot(isa, out, dout)).collect()
}

vectorised! {
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        simd::dot(a, b)
    }
}

#[derive(Clone, Copy)]
struct SharedGradients {
    dq: Shared,
    dk: Shared,
    dv: Shared,
}

/// A block of keys, a block of queries (both counted in their segment), and a key head with its query heads.
struct Cell {
    segment: Range<usize>,
    keys: Range<usize>,
    queries: Range<usize>,
    kv_head: usize,
}

struct BackwardBuffers {
    q: Buffer,
    q_t: Buffer,
    dout: Buffer,
    dout_t: Buffer,
    k: Buffer,
    v: Buffer,
    scores: Buffer,
    gradients: Buffer,
}

impl BackwardBuffers {
    fn new(dim: usize) -> Self {
        Self {
            q: Buffer::new(dim * QUERIES),
            q_t: Buffer::new(dim * QUERIES),
            dout: Buffer::new(dim * QUERIES),
            dout_t: Buffer::new(dim * QUERIES),
            k: Buffer::new(dim * BLOCK),
            v: Buffer::new(dim * BLOCK),
            scores: Buffer::new(KEYS * QUERIES),
            gradients: Buffer::new(KEYS * QUERIES),
        }
    }

    /// f32 values in all of them.
    fn values(dim: usize) -> usize {
        dim * (4 * QUERIES + 2 * BLOCK) + 2 * KEYS * QUERIES
    }
}

/// Bytes that [`backward`] takes beside inputs and results on `threads` threads: a value for each query, and each thread's
/// tiles. [`forward`] takes less.
pub(crate) fn workspace_bytes(tokens: usize, heads: Heads, threads: usize) -> usize {
    (tokens * heads.query + threads * BackwardBuffers::values(heads.dim)) * size_of::<f32>()
}

fn backward_cell<S: Simd>(
    inputs: &Inputs,
    saved: &Saved,
    delta: &[f32],
    cell: &Cell,
    buffers: &mut BackwardBuffers,
    shared: SharedGradients,
) {
    let Heads { query, kv, dim } = inputs.heads;
    let (group, at) = (query / kv, inputs.key_at(cell.segment.start + cell.keys.start, cell.kv_head));
    gather(&inputs.k[at..], inputs.key_stride(), cell.keys.len(), dim, buffers.k.values());
    gather(&inputs.v[at..], inputs.key_stride(), cell.keys.len(), dim, buffers.v.values());
    for head in cell.kv_head * group..(cell.kv_head + 1) * group {
        for first in cell.queries.clone().step_by(QUERIES) {
            let queries = QUERIES.min(cell.queries.end - first);
            backward_queries::<S>(inputs, saved, delta, cell, head, first..first + queries, buffers, shared);
        }
    }
}

/// One tile of queries of one head against the keys of its cell.
#[allow(clippy::too_many_arguments)]
fn backward_queries<S: Simd>(
    inputs: &Inputs,
    saved: &Saved,
    delta: &[f32],
    cell: &Cell,
    head: usize,
    queries: Range<usize>,
    buffers: &mut BackwardBuffers,
    shared: SharedGradients,
) {
    let dim = inputs.heads.dim;
    let window = inputs.window(&cell.segment) as isize;
    let start = cell.segment.start;
    let band_at = |key: usize| Band { offset: queries.start as isize - key as isize, window };
    let seen = band_at(cell.keys.start).keys_seen_by(0..queries.len(), cell.keys.len());
    if seen.is_empty() {
        return;
    }
    let lanes = queries.len().next_multiple_of(S::LANES);
    let (q, q_t) = (buffers.q.values(), buffers.q_t.values());
    let (dout, dout_t) = (buffers.dout.values(), buffers.dout_t.values());
    let (k_block, v_block) = (buffers.k.values(), buffers.v.values());
    let (scores, gradients) = (buffers.scores.values(), buffers.gradients.values());
    let at = inputs.query_at(start + queries.start, head);
    gather(&inputs.q[at..], inputs.query_stride(), queries.len(), dim, q);
    gather(&saved.dout[at..], inputs.query_stride(), queries.len(), dim, dout);
    transpose(q, queries.len(), dim, inputs.scale_log2(), q_t);
    transpose(dout, queries.len(), dim, inputs.scale(), dout_t);
    let (mut lse_of, mut delta_of) = ([0.0; QUERIES], [0.0; QUERIES]);
    for (query, (lse, delta_of)) in lse_of.iter_mut().zip(&mut delta_of).take(queries.len()).enumerate() {
        let at = (start + queries.start + query) * inputs.heads.query + head;
        (*lse, *delta_of) = (saved.lse[at], delta[at]);
    }

    for key in (cell.keys.start..cell.keys.start + seen.end).step_by(KEYS) {
        let keys = KEYS.min(cell.keys.end - key);
        let band = band_at(key);
        if band.keys_seen_by(0..queries.len(), keys).is_empty() {
            continue;
        }
        let key_at = inputs.key_at(start + key, cell.kv_head);
        let in_cell = (key - cell.keys.start) * dim;
        let (k, v) = (&k_block[in_cell..], &v_block[in_cell..]);
        // (keys x dim) by (dim x queries): scores from k and q, their probabilities' gradients from v and dout.
        let by_key = |left: &[f32], right: &[f32], c: *mut f32| {
            let gemm = Gemm {
                a: Left { data: left, row_stride: dim, depth_stride: 1 },
                b: Right { data: right, stride: QUERIES },
                c,
                c_stride: QUERIES,
                rows: keys,
                cols: lanes,
                depth: dim,
                band,
                hidden: Hidden::Queries,
                write: Write::Set,
            };
            // SAFETY: `Isa` proves the instruction set; `c` is a buffer of `KEYS` rows of `QUERIES`.
            unsafe { S::gemm(&gemm) }
        };
        by_key(k, q_t, scores.as_mut_ptr());
        by_key(v, dout_t, gradients.as_mut_ptr());
        let mut probabilities =
            Probabilities { scores, gradients, keys, queries: lanes, band, lse: &lse_of, delta: &delta_of };
        // SAFETY: as above.
        unsafe { S::probabilities(&mut probabilities) };

        // (keys x queries) by (queries x dim): dv from the probabilities and dout, dk from the scores' gradients and q.
        let to_keys = |left: &[f32], right: &[f32], c: *mut f32| {
            let gemm = Gemm {
                a: Left { data: left, row_stride: QUERIES, depth_stride: 1 },
                b: Right { data: right, stride: dim },
                c,
                c_stride: inputs.key_stride(),
                rows: keys,
                cols: dim,
                depth: queries.len(),
                band,
                hidden: Hidden::DepthQueries,
                write: Write::Add,
            };
            // SAFETY: as above; `c` points to the keys of this task's cell, which are its own in this diagonal.
            unsafe { S::gemm(&gemm) }
        };
        to_keys(scores, dout, shared.dv.at(key_at));
        to_keys(gradients, q, shared.dk.at(key_at));
        let to_queries = Gemm {
            a: Left { data: gradients, row_stride: 1, depth_stride: QUERIES },
            b: Right { data: k, stride: dim },
            c: shared.dq.at(at),
            c_stride: inputs.query_stride(),
            rows: queries.len(),
            cols: dim,
            depth: keys,
            band,
            hidden: Hidden::DepthKeys,
            write: Write::Add,
        };
        // SAFETY: as above; `c` points to the queries of this task's cell and head, which are its own too.
        unsafe { S::gemm(&to_queries) };
    }
}
