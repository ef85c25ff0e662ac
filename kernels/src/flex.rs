//! Between burn's CPU tensors and slices.

use crate::matmul::Weights;
use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;

/// A tensor whose storage is exactly its elements in row-major order.
pub(crate) struct Packed(FlexTensor);

impl Packed {
    /// Copies only where the tensor is a view.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        Self(tensor.to_contiguous())
    }

    /// The elements of an f32 tensor.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn f32(&self) -> &[f32] {
        self.0.storage()
    }

    /// The elements of a frozen weight, f32 or bf16.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn weights(&self) -> Weights<'_> {
        match self.0.dtype() {
            DType::BF16 => Weights::Bf16(self.0.storage()),
            _ => Weights::F32(self.0.storage()),
        }
    }

    /// The elements of an i32 tensor.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn i32(&self) -> &[i32] {
        self.0.storage()
    }

    /// The sizes of the tensor.
    ///
    /// # Panics
    /// If it does not have `D` dimensions.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.layout().shape().dims()
    }
}

/// A float tensor that takes over `values`, row-major.
pub(crate) fn float_tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// An integer tensor that takes over `values`, row-major.
pub(crate) fn int_tensor(values: Vec<i32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}
