//! Between burn's CPU tensors and slices, and the memory of results.

use crate::matmul::Weights;
use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;
use std::ops::Range;

/// A tensor whose elements lie one behind the other, in row-major order: all of a buffer or a part of it.
pub(crate) struct Packed(FlexTensor);

impl Packed {
    /// Copies only where the elements of a view lie otherwise.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        Self(if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() })
    }

    /// Where they lie in the buffer.
    fn place(&self) -> Range<usize> {
        let (start, end) = self.0.layout().contiguous_offsets().expect("the elements lie one behind the other");
        start..end
    }

    /// The elements of an f32 tensor.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn f32(&self) -> &[f32] {
        &self.0.storage()[self.place()]
    }

    /// The elements of a frozen weight, f32 or bf16.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn weights(&self) -> Weights<'_> {
        match self.0.dtype() {
            DType::BF16 => Weights::Bf16(&self.0.storage()[self.place()]),
            _ => Weights::F32(&self.0.storage()[self.place()]),
        }
    }

    /// The elements of an i32 tensor.
    ///
    /// # Panics
    /// If the tensor has another dtype.
    pub(crate) fn i32(&self) -> &[i32] {
        &self.0.storage()[self.place()]
    }

    /// The sizes of the tensor.
    ///
    /// # Panics
    /// If it does not have `D` dimensions.
    pub(crate) fn dims<const D: usize>(&self) -> [usize; D] {
        self.0.layout().shape().dims()
    }
}

/// `tensor` as a buffer of exactly its elements, to be written to. What somebody else holds is copied by whoever writes.
pub(crate) fn writable(tensor: FlexTensor) -> FlexTensor {
    // Without another handle, where it is one already: that would be somebody else.
    let layout = tensor.layout();
    let whole = layout.is_contiguous() && layout.num_elements() * tensor.dtype().size() == tensor.bytes().len();
    if whole { tensor } else { tensor.to_contiguous() }
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
