//! AdamW as operations of a burn backend. They are not differentiable.

use super::{Step, Write, cpu};
use crate::flex::{Packed, writable};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, Flex, backend_extension};
use burn::tensor::TensorData;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_flex::FlexTensor;
use std::ops::Range;

/// Backend operations of [`adamw`](super::adamw()) and what goes with it; shapes as there.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait AdamWOps: Backend {
    /// Values and moments after the update.
    fn adamw(
        values: FloatTensor<Self>,
        m: FloatTensor<Self>,
        v: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        step: Step,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Sums of squares `[parts, blocks]`, of which the host makes a part's: it has as many blocks as the kernel likes, zero where there
    /// is none.
    fn sums_of_squares(flat: FloatTensor<Self>, parts: Vec<Range<usize>>) -> FloatTensor<Self>;

    /// See [`write`](super::write()).
    fn write_flat(flat: FloatTensor<Self>, start: usize, values: FloatTensor<Self>, write: Write) -> FloatTensor<Self>;
}

impl AdamWOps for Flex {
    fn adamw(
        values: FlexTensor,
        m: FlexTensor,
        v: FlexTensor,
        gradient: FlexTensor,
        step: Step,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [mut values, mut m, mut v] = [values, m, v].map(writable);
        let gradient = Packed::new(gradient);
        cpu::update(values.storage_mut(), m.storage_mut(), v.storage_mut(), gradient.f32(), step.scalars());
        (values, m, v)
    }

    fn sums_of_squares(flat: FlexTensor, parts: Vec<Range<usize>>) -> FlexTensor {
        let sums = cpu::squares(Packed::new(flat).f32(), &parts);
        FlexTensor::from_data(TensorData::new(sums, [parts.len(), 1]))
    }

    fn write_flat(flat: FlexTensor, start: usize, values: FlexTensor, write: Write) -> FlexTensor {
        let (mut flat, values) = (writable(flat), Packed::new(values));
        let values = values.f32();
        let place: &mut [f32] = &mut flat.storage_mut()[start..start + values.len()];
        match write {
            Write::Set => place.copy_from_slice(values),
            Write::Add => place.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
        }
        flat
    }
}

impl<B: AdamWOps, C: CheckpointStrategy> AdamWOps for Autodiff<B, C> {
    fn adamw(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Step,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        unreachable!("an update is not differentiated")
    }

    fn sums_of_squares(flat: FloatTensor<Self>, parts: Vec<Range<usize>>) -> FloatTensor<Self> {
        Self::from_inner(B::sums_of_squares(flat.into_primitive(), parts))
    }

    fn write_flat(_: FloatTensor<Self>, _: usize, _: FloatTensor<Self>, _: Write) -> FloatTensor<Self> {
        unreachable!("a gradient is not differentiated again")
    }
}
