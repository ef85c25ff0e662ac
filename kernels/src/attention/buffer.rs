//! A task's working memory, and copies into it.

use super::tile::QUERIES;

/// f32 values that start on a cache line.
pub(super) struct Buffer {
    lines: Vec<Line>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

impl Buffer {
    /// At least `values` zeros.
    pub fn new(values: usize) -> Self {
        Self { lines: vec![Line([0.0; 16]); values.div_ceil(16)] }
    }

    pub fn values(&mut self) -> &mut [f32] {
        // SAFETY: a `Line` is 16 f32 and nothing else: 64 bytes at an alignment of 64 leave no padding.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }
}

/// Copies `rows` rows of `dim` values to columns of `to` ([`QUERIES`] apart), times `factor`. What the columns past
/// `rows` hold does not matter: lanes do not mix, and theirs are not read.
pub(super) fn transpose(from: &[f32], rows: usize, dim: usize, factor: f32, to: &mut [f32]) {
    const SIDE: usize = 4;
    let whole = dim - dim % SIDE;
    for row in (0..rows).step_by(SIDE) {
        // Square blocks, so that the compiler can shuffle registers rather than move single values.
        let lines: [&[f32]; SIDE] = std::array::from_fn(|r| &from[(row + r).min(rows - 1) * dim..][..dim]);
        for d in (0..whole).step_by(SIDE) {
            let block: [[f32; SIDE]; SIDE] = std::array::from_fn(|r| {
                let values = &lines[r][d..d + SIDE];
                std::array::from_fn(|i| factor * values[i])
            });
            let columns = &mut to[d * QUERIES + row..][..(SIDE - 1) * QUERIES + SIDE];
            for i in 0..SIDE {
                columns[i * QUERIES..][..SIDE].copy_from_slice(&[block[0][i], block[1][i], block[2][i], block[3][i]]);
            }
        }
        for d in whole..dim {
            for (r, line) in lines.iter().enumerate() {
                to[d * QUERIES + row + r] = factor * line[d];
            }
        }
    }
}

/// Copies `rows` rows of `dim` values, `stride` apart, to rows that follow each other. A tile that is read many times is
/// worth that: its rows are a whole token apart in memory, where they compete for the same lines of the nearest cache.
pub(super) fn gather(from: &[f32], stride: usize, rows: usize, dim: usize, to: &mut [f32]) {
    for (row, to) in to.chunks_exact_mut(dim).take(rows).enumerate() {
        to.copy_from_slice(&from[row * stride..][..dim]);
    }
}
