//! f32 slices, tokens shared out over rayon.

use crate::norm::cpu::{gradient, normalise};
use crate::simd::{Isa, vectorised};
use rayon::prelude::*;

/// Values per task: below this, handing work to another thread costs more than the work.
const TASK_VALUES: usize = 16 * 1024;

/// Which way to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// By the table's angles.
    Forward,
    /// By their negatives, as the gradient is.
    Backward,
}

/// The angles, `[tokens, head_dim / 2]` each, and the heads of a token.
#[derive(Clone, Copy)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Heads of a token.
    pub heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

/// The norm of each head that comes before the rotation.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[head_dim]`.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f64,
}

/// Writes the rotation of `x [tokens, heads, head_dim]` to `y`.
pub fn rotate(x: &[f32], angles: Angles, direction: Direction, y: &mut [f32]) {
    let isa = Isa::detect();
    for_each_head(x, angles, y, |x, cos, sin, y| {
        y.copy_from_slice(x);
        rotate_head(isa, y, cos, sin, direction);
    });
}

/// Writes the rotation of the normed heads of `x` to `y`.
pub fn norm_rotate(x: &[f32], norm: Norm, angles: Angles, y: &mut [f32]) {
    let isa = Isa::detect();
    for_each_head(x, angles, y, |x, cos, sin, y| {
        normalise(isa, x, Some(norm.weight), norm.eps, y);
        rotate_head(isa, y, cos, sin, Direction::Forward);
    });
}

/// Writes the gradient of [`norm_rotate`] with respect to `x`.
pub fn norm_rotate_backward(x: &[f32], norm: Norm, angles: Angles, dy: &[f32], dx: &mut [f32]) {
    let isa = Isa::detect();
    let (token, dim) = (angles.heads * angles.head_dim, angles.head_dim);
    let task = TASK_VALUES.div_ceil(token) * token;
    dx.par_chunks_mut(task).zip(x.par_chunks(task)).zip(dy.par_chunks(task)).enumerate().for_each(
        |(index, ((dx, x), dy))| {
            let mut turned_back = vec![0f32; dim];
            let first_head = index * task / dim;
            let heads = dx.chunks_mut(dim).zip(x.chunks(dim)).zip(dy.chunks(dim));
            for (head, ((dx, x), dy)) in heads.enumerate() {
                let (cos, sin) = angles.of_head(first_head + head);
                turned_back.copy_from_slice(dy);
                rotate_head(isa, &mut turned_back, cos, sin, Direction::Backward);
                gradient(isa, x, Some(norm.weight), &turned_back, norm.eps, 1.0, dx);
            }
        },
    );
}

impl<'a> Angles<'a> {
    fn of_head(&self, head: usize) -> (&'a [f32], &'a [f32]) {
        let pairs = self.head_dim / 2;
        let start = head / self.heads * pairs;
        (&self.cos[start..start + pairs], &self.sin[start..start + pairs])
    }
}

/// Calls `f` with each head of `x`, its angles and its head of `y`.
fn for_each_head(
    x: &[f32],
    angles: Angles,
    y: &mut [f32],
    f: impl Fn(&[f32], &[f32], &[f32], &mut [f32]) + Send + Sync,
) {
    let (token, dim) = (angles.heads * angles.head_dim, angles.head_dim);
    let task = TASK_VALUES.div_ceil(token) * token;
    y.par_chunks_mut(task).zip(x.par_chunks(task)).enumerate().for_each(|(index, (y, x))| {
        let first_head = index * task / dim;
        for (head, (y, x)) in y.chunks_mut(dim).zip(x.chunks(dim)).enumerate() {
            let (cos, sin) = angles.of_head(first_head + head);
            f(x, cos, sin, y);
        }
    });
}

vectorised! {
    fn rotate_head(head: &mut [f32], cos: &[f32], sin: &[f32], direction: Direction) {
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Backward => -1.0,
        };
        let (first, second) = head.split_at_mut(cos.len());
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
            (*a, *b) = (*a * cos - *b * (sign * sin), *b * cos + *a * (sign * sin));
        }
    }
}
