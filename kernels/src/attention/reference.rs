//! The definition, in f64, one query at a time.

use std::ops::RangeInclusive;

use super::{Attention, Heads};

/// The result `[tokens, query heads, dim]` from `q` (same shape) and `k`, `v` `[tokens, kv heads, dim]`.
pub fn forward(q: &[f64], k: &[f64], v: &[f64], heads: Heads, attention: &Attention) -> Vec<f64> {
    let mut out = vec![0.0; q.len()];
    for_each_query(heads, attention, |query, keys| {
        let weights = softmax(&scores(q, k, heads, attention.scale, query, keys.clone()));
        for (key, p) in keys.zip(weights) {
            axpy(p, &v[row(heads.kv, heads, key, query.kv_head)], &mut out[query.row(heads)]);
        }
    });
    out
}

/// The gradients with respect to `q`, `k` and `v`, given that of the result.
///
/// With `p` the softmax of a query and `dp = dout . v`: `ds = p * (dp - sum(p * dp))`, the gradient of its scores.
pub fn backward(q: &[f64], k: &[f64], v: &[f64], dout: &[f64], heads: Heads, attention: &Attention) -> [Vec<f64>; 3] {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for_each_query(heads, attention, |query, keys| {
        let weights = softmax(&scores(q, k, heads, attention.scale, query, keys.clone()));
        let query_row = query.row(heads);
        let key_row = |key| row(heads.kv, heads, key, query.kv_head);
        let dp: Vec<f64> = keys.clone().map(|key| dot(&dout[query_row.clone()], &v[key_row(key)])).collect();
        let mean: f64 = weights.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for ((key, p), dp) in keys.zip(weights).zip(dp) {
            let ds = attention.scale * p * (dp - mean);
            axpy(p, &dout[query_row.clone()], &mut dv[key_row(key)]);
            axpy(ds, &q[query_row.clone()], &mut dk[key_row(key)]);
            axpy(ds, &k[key_row(key)], &mut dq[query_row.clone()]);
        }
    });
    [dq, dk, dv]
}

#[derive(Clone, Copy)]
struct Query {
    token: usize,
    head: usize,
    kv_head: usize,
}

impl Query {
    fn row(&self, heads: Heads) -> std::ops::Range<usize> {
        row(heads.query, heads, self.token, self.head)
    }
}

/// Calls `visit` with every query and the keys that it sees.
fn for_each_query(heads: Heads, attention: &Attention, mut visit: impl FnMut(Query, RangeInclusive<usize>)) {
    for segment in attention.segments.ranges() {
        for token in segment.clone() {
            let first = match attention.window {
                Some(window) => segment.start.max((token + 1).saturating_sub(window)),
                None => segment.start,
            };
            for head in 0..heads.query {
                let kv_head = head / (heads.query / heads.kv);
                visit(Query { token, head, kv_head }, first..=token);
            }
        }
    }
}

fn scores(q: &[f64], k: &[f64], heads: Heads, scale: f64, query: Query, keys: RangeInclusive<usize>) -> Vec<f64> {
    let q = &q[query.row(heads)];
    keys.map(|key| scale * dot(q, &k[row(heads.kv, heads, key, query.kv_head)])).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    scores.iter().map(|s| (s - max).exp() / sum).collect()
}

fn row(count: usize, heads: Heads, token: usize, head: usize) -> std::ops::Range<usize> {
    let start = (token * count + head) * heads.dim;
    start..start + heads.dim
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn axpy(factor: f64, x: &[f64], y: &mut [f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}
