//! Head and loss as operations of a burn backend.

use super::{Head, cpu};
use crate::flex::{Packed, float_tensor, zeros};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, Flex, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;

/// Backend operations of [`linear_cross_entropy`](super::linear_cross_entropy) and [`logits`](super::logits); shapes as
/// there. None of them is differentiable.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait CrossEntropyOps: Backend {
    /// The loss of each row, `[n]`.
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
    ) -> FloatTensor<Self>;

    /// The loss of each row, `[n]`, and the gradient of the hidden states, `[n, h]`.
    fn linear_cross_entropy_grad(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
        grad_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The logits, `[n, v]`.
    fn head_logits(hidden: FloatTensor<Self>, weight: FloatTensor<Self>, softcap: Option<f64>) -> FloatTensor<Self>;
}

impl CrossEntropyOps for Flex {
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
    ) -> FloatTensor<Self> {
        let (hidden, weight) = (Packed::new(hidden), Packed::new(weight));
        let loss = cpu::linear_cross_entropy(hidden.f32(), weight.weights(), &targets, head, None);
        float_tensor(loss, [targets.len()])
    }

    fn linear_cross_entropy_grad(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
        grad_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (hidden, weight) = (Packed::new(hidden), Packed::new(weight));
        let mut d_hidden = zeros(hidden.f32().len());
        let gradient = cpu::Gradient { d_hidden: &mut d_hidden, scale: grad_scale as f32 };
        let loss = cpu::linear_cross_entropy(hidden.f32(), weight.weights(), &targets, head, Some(gradient));
        (float_tensor(loss, [targets.len()]), float_tensor(d_hidden, hidden.dims::<2>()))
    }

    fn head_logits(hidden: FloatTensor<Self>, weight: FloatTensor<Self>, softcap: Option<f64>) -> FloatTensor<Self> {
        let (hidden, weight) = (Packed::new(hidden), Packed::new(weight));
        let ([n, h], [classes, _]) = (hidden.dims(), weight.dims());
        float_tensor(cpu::logits(hidden.f32(), weight.weights(), h, softcap), [n, classes])
    }
}

impl<B: CrossEntropyOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::linear_cross_entropy(hidden.into_primitive(), weight.into_primitive(), targets, head))
    }

    fn linear_cross_entropy_grad(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: Vec<i32>,
        head: Head,
        grad_scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (hidden, weight) = (hidden.into_primitive(), weight.into_primitive());
        let (loss, d_hidden) = B::linear_cross_entropy_grad(hidden, weight, targets, head, grad_scale);
        (Self::from_inner(loss), Self::from_inner(d_hidden))
    }

    fn head_logits(hidden: FloatTensor<Self>, weight: FloatTensor<Self>, softcap: Option<f64>) -> FloatTensor<Self> {
        Self::from_inner(B::head_logits(hidden.into_primitive(), weight.into_primitive(), softcap))
    }
}
