//! f32 slices, tokens shared out over rayon.

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

/// Writes the rotation of `x [tokens, heads, head_dim]` to `y`; `cos` and `sin` are `[tokens, head_dim / 2]`.
pub fn rotate(x: &[f32], cos: &[f32], sin: &[f32], [heads, head_dim]: [usize; 2], direction: Direction, y: &mut [f32]) {
    let (token, pairs) = (heads * head_dim, head_dim / 2);
    let tokens = TASK_VALUES.div_ceil(token);
    let sign = match direction {
        Direction::Forward => 1.0,
        Direction::Backward => -1.0,
    };
    let tables = cos.par_chunks(tokens * pairs).zip(sin.par_chunks(tokens * pairs));
    y.par_chunks_mut(tokens * token).zip(x.par_chunks(tokens * token)).zip(tables).for_each(|((y, x), (cos, sin))| {
        let tables = cos.chunks(pairs).zip(sin.chunks(pairs));
        for ((y, x), (cos, sin)) in y.chunks_mut(token).zip(x.chunks(token)).zip(tables) {
            for (y, x) in y.chunks_mut(head_dim).zip(x.chunks(head_dim)) {
                let (y_a, y_b) = y.split_at_mut(pairs);
                let (x_a, x_b) = x.split_at(pairs);
                let halves = y_a.iter_mut().zip(y_b).zip(x_a.iter().zip(x_b));
                for (((y_a, y_b), (a, b)), (cos, sin)) in halves.zip(cos.iter().zip(sin)) {
                    *y_a = a * cos - b * (sign * sin);
                    *y_b = b * cos + a * (sign * sin);
                }
            }
        }
    });
}
