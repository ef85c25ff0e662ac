//! The rows of a frozen table for the tokens of a micro-batch.

mod backend;
mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

pub use backend::EmbeddingOps;

use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// The rows of `table` `[v, h]`, f32 or bf16, for `ids`, times `scale`: `[ids, h]`, f32, in one pass.
///
/// The table is frozen: nothing is differentiated, and the result is cut off from any autodiff graph.
///
/// # Panics
/// If an id is no row of the table.
pub fn embedding(table: Tensor<2>, ids: &[u32], scale: f32) -> Tensor<2> {
    let [rows, cols] = table.dims();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
        panic!("embedding: id {id} is none of the {rows} rows of the table");
    }
    let values = ids.len() * cols;
    let _span =
        trace::kernel("embedding", || Work::f32(0, values + ids.len()).with_weight(values, table.dtype().size()));
    Tensor::from_dispatch(Dispatch::scaled_embedding(table.into_dispatch(), ids.to_vec(), scale))
}

#[cfg(test)]
mod tests;
