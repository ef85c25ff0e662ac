//! How burn calls the normalisation: the dispatched operation, its kernels per backend, and its gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DType, Flex, TensorMetadata, backend_extension};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_flex::FlexTensor;

use super::cpu;

/// The differentiable operation, dispatched at run time to the tensor's backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait RmsNormOps: Backend {
    /// See [`rms_norm`](super::rms_norm).
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;

    /// The same without a weight: the dispatch takes no optional tensors.
    fn rms_norm_weightless(x: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
}

/// What a backend implements: both directions, without automatic differentiation.
pub trait RmsNormKernel: Backend {
    /// `y [rows, dim]` from `x [rows, dim]` and `weight [dim]`.
    fn forward(x: FloatTensor<Self>, weight: Option<FloatTensor<Self>>, eps: f64) -> FloatTensor<Self>;

    /// `dx [rows, dim]` from `x`, `weight` and `dy [rows, dim]`.
    fn backward(
        x: FloatTensor<Self>,
        weight: Option<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
}

impl RmsNormKernel for Flex {
    fn forward(x: FlexTensor, weight: Option<FlexTensor>, eps: f64) -> FlexTensor {
        let (x, weight) = (x.to_contiguous(), weight.map(|w| w.to_contiguous()));
        let mut y = FlexTensor::empty(x.shape(), DType::F32);
        cpu::forward(x.storage(), weight.as_ref().map(|w| w.storage()), x.shape()[1], eps, y.storage_mut());
        y
    }

    fn backward(x: FlexTensor, weight: Option<FlexTensor>, dy: FlexTensor, eps: f64) -> FlexTensor {
        let (x, weight) = (x.to_contiguous(), weight.map(|w| w.to_contiguous()));
        let dy = dy.to_contiguous();
        let mut dx = FlexTensor::empty(x.shape(), DType::F32);
        let weight = weight.as_ref().map(|w| w.storage());
        cpu::backward(x.storage(), weight, dy.storage(), x.shape()[1], eps, dx.storage_mut());
        dx
    }
}

impl RmsNormOps for Flex {
    fn rms_norm(x: FlexTensor, weight: FlexTensor, eps: f64) -> FlexTensor {
        Self::forward(x, Some(weight), eps)
    }

    fn rms_norm_weightless(x: FlexTensor, eps: f64) -> FlexTensor {
        Self::forward(x, None, eps)
    }
}

#[derive(Debug)]
struct RmsNormBackward;

impl<B: RmsNormKernel> Backward<B, 1> for RmsNormBackward {
    type State = (NodeId, Option<FloatTensor<B>>, f64);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (x, weight, eps) = ops.state;
        let x: FloatTensor<B> = checkpointer.retrieve_node_output(x);
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::backward(x, weight, dy, eps));
        }
    }
}

impl<B: RmsNormKernel, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        tracked::<B, C>(x, Some(weight.into_primitive()), eps)
    }

    fn rms_norm_weightless(x: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        tracked::<B, C>(x, None, eps)
    }
}

fn tracked<B: RmsNormKernel, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: Option<FloatTensor<B>>,
    eps: f64,
) -> FloatTensor<Autodiff<B, C>> {
    match RmsNormBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let state = (prep.checkpoint(&x), weight.clone(), eps);
            let y = B::forward(x.into_primitive(), weight, eps);
            prep.finish(state, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::forward(x.into_primitive(), weight, eps)),
    }
}
