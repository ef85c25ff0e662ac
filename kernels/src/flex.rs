//! Between burn's CPU tensors and slices, and the memory of results.

use crate::matmul::Weights;
use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

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

/// `len` values of whatever the memory held, for a kernel that writes every one before anything reads it: zeroing a result
/// first would take the calling thread as long as the threads of a pool take to compute many of them. In unit tests they are
/// NaN, so that one left out is seen.
pub(crate) fn unwritten(len: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(len);
    #[allow(clippy::uninit_vec)]
    // SAFETY: the capacity is `len`, and by this function's contract no value is read before a kernel has written it; f32 has
    // no destructor and no bit pattern that is invalid once written.
    unsafe {
        values.set_len(len);
    }
    if cfg!(test) {
        values.fill(f32::NAN);
    }
    values
}

/// `len` zeros, written by all threads of the current pool.
pub(crate) fn zeros(len: usize) -> Vec<f32> {
    let mut values = unwritten(len);
    values.par_chunks_mut(1 << 16).for_each(|values| values.fill(0.0));
    values
}
