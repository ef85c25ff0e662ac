//! The rows of a table as an operation of a burn backend.

use super::cpu;
use crate::flex::{Packed, float_tensor};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, Flex, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;

/// Backend operation of [`embedding`](super::embedding()). It is not differentiable.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait EmbeddingOps: Backend {
    /// `scale` times the rows `ids` of `table`.
    fn scaled_embedding(table: FloatTensor<Self>, ids: Vec<u32>, scale: f32) -> FloatTensor<Self>;
}

impl EmbeddingOps for Flex {
    fn scaled_embedding(table: FloatTensor<Self>, ids: Vec<u32>, scale: f32) -> FloatTensor<Self> {
        let table = Packed::new(table);
        let [_, cols] = table.dims();
        float_tensor(cpu::embedding(table.weights(), cols, &ids, scale), [ids.len(), cols])
    }
}

impl<B: EmbeddingOps, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn scaled_embedding(table: FloatTensor<Self>, ids: Vec<u32>, scale: f32) -> FloatTensor<Self> {
        Self::from_inner(B::scaled_embedding(table.into_primitive(), ids, scale))
    }
}
