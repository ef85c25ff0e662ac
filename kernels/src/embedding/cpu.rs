//! The rows of a table on slices, shared out over rayon.

use crate::flex::unwritten;
use crate::matmul::Weights;
use rayon::prelude::*;

/// Values of a task at least.
const TASK_VALUES: usize = 16 * 1024;

/// `scale` times the rows `ids` of `table`, each of `cols` values.
pub(crate) fn embedding(table: Weights, cols: usize, ids: &[u32], scale: f32) -> Vec<f32> {
    let mut y = unwritten(ids.len() * cols);
    let rows = TASK_VALUES.div_ceil(cols);
    y.par_chunks_mut(rows * cols).zip(ids.par_chunks(rows)).for_each(|(y, ids)| {
        for (y, id) in y.chunks_exact_mut(cols).zip(ids) {
            let row = *id as usize * cols..(*id as usize + 1) * cols;
            match table {
                Weights::F32(table) => y.iter_mut().zip(&table[row]).for_each(|(y, x)| *y = x * scale),
                Weights::Bf16(table) => y.iter_mut().zip(&table[row]).for_each(|(y, x)| *y = x.to_f32() * scale),
            }
        }
    });
    y
}
