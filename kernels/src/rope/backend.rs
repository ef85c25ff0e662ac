//! How burn calls the rotation: the dispatched operation, its kernels per backend, and its gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DType, Flex, TensorMetadata, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_flex::FlexTensor;

use super::cpu::{self, Direction};

/// The differentiable operation, dispatched at run time to the tensor's backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait RopeOps: Backend {
    /// See [`rope`](super::rope); `cos` and `sin` are `[tokens, head_dim / 2]`.
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// What a backend implements, without automatic differentiation.
pub trait RopeKernel: Backend {
    /// Rotates `x [tokens, heads, head_dim]` by the angles of the table or, for the gradient, by their negatives.
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: Direction,
    ) -> FloatTensor<Self>;
}

impl RopeKernel for Flex {
    fn rotate(x: FlexTensor, cos: FlexTensor, sin: FlexTensor, direction: Direction) -> FlexTensor {
        let (x, cos, sin) = (x.to_contiguous(), cos.to_contiguous(), sin.to_contiguous());
        let mut y = FlexTensor::empty(x.shape(), DType::F32);
        let [heads, head_dim] = [x.shape()[1], x.shape()[2]];
        cpu::rotate(x.storage(), cos.storage(), sin.storage(), [heads, head_dim], direction, y.storage_mut());
        y
    }
}

impl RopeOps for Flex {
    fn rope(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        Self::rotate(x, cos, sin, Direction::Forward)
    }
}

#[derive(Debug)]
struct RopeBackward;

impl<B: RopeKernel> Backward<B, 1> for RopeBackward {
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (cos, sin) = ops.state;
        if let [Some(parent)] = ops.parents {
            grads.register::<B>(parent.id, B::rotate(dy, cos, sin, Direction::Backward));
        }
    }
}

impl<B: RopeKernel, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        let (x, node) = x.into_parts();
        let prepared = RopeBackward.prepare::<C>([node]).compute_bound().stateful();
        let y = B::rotate(x, cos.clone(), sin.clone(), Direction::Forward);
        match prepared {
            OpsKind::Tracked(prep) => prep.finish((cos, sin), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
