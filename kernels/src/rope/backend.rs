//! How burn calls the rotation: the dispatched operation, its kernels per backend, and its gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_flex::FlexTensor;

use super::cpu::{self, Angles, Direction, Norm};
use crate::flex::{float_tensor, unwritten};
use crate::trace::{self, Work};

/// The differentiable operation, dispatched at run time to the tensor's backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait RopeOps: Backend {
    /// See [`rope`](super::rope); `cos` and `sin` are `[tokens, head_dim / 2]`.
    fn rope(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`rms_norm_rope`](super::rms_norm_rope).
    fn rms_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;

    /// Gradient of [`rms_norm_rope`](Self::rms_norm_rope) to `x`.
    fn rms_norm_rope_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
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
        let mut y = unwritten(x.shape().num_elements());
        cpu::rotate(x.storage(), angles(&x, &cos, &sin), direction, &mut y);
        float_tensor(y, x.shape())
    }
}

fn angles<'a>(x: &FlexTensor, cos: &'a FlexTensor, sin: &'a FlexTensor) -> Angles<'a> {
    Angles { cos: cos.storage(), sin: sin.storage(), heads: x.shape()[1], head_dim: x.shape()[2] }
}

impl RopeOps for Flex {
    fn rope(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        Self::rotate(x, cos, sin, Direction::Forward)
    }

    fn rms_norm_rope(x: FlexTensor, weight: FlexTensor, cos: FlexTensor, sin: FlexTensor, eps: f64) -> FlexTensor {
        let [x, weight, cos, sin] = [x, weight, cos, sin].map(|tensor| tensor.to_contiguous());
        let mut y = unwritten(x.shape().num_elements());
        let norm = Norm { weight: weight.storage(), eps };
        cpu::norm_rotate(x.storage(), norm, angles(&x, &cos, &sin), &mut y);
        float_tensor(y, x.shape())
    }

    fn rms_norm_rope_backward(
        x: FlexTensor,
        weight: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        dy: FlexTensor,
        eps: f64,
    ) -> FlexTensor {
        let [x, weight, cos, sin, dy] = [x, weight, cos, sin, dy].map(|tensor| tensor.to_contiguous());
        let mut dx = unwritten(x.shape().num_elements());
        let norm = Norm { weight: weight.storage(), eps };
        cpu::norm_rotate_backward(x.storage(), norm, angles(&x, &cos, &sin), dy.storage(), &mut dx);
        float_tensor(dx, x.shape())
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
            let span = trace::kernel("rope, backward", || Work::of(0, 2 * dy.shape().num_elements(), dy.dtype()));
            let dx = B::rotate(dy, cos, sin, Direction::Backward);
            drop(span);
            grads.register::<B>(parent.id, dx);
        }
    }
}

#[derive(Debug)]
struct NormRopeBackward;

#[derive(Clone, Debug)]
struct NormRopeState<B: Backend> {
    x: NodeId,
    weight: FloatTensor<B>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    eps: f64,
}

impl<B: RopeOps> Backward<B, 1> for NormRopeBackward {
    type State = NormRopeState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let NormRopeState { x, weight, cos, sin, eps } = ops.state;
        let x: FloatTensor<B> = checkpointer.retrieve_node_output(x);
        if let [Some(parent)] = ops.parents {
            let span = trace::kernel("rope with rms_norm, backward", || {
                Work::of(0, 3 * dy.shape().num_elements(), dy.dtype())
            });
            let dx = B::rms_norm_rope_backward(x, weight, cos, sin, dy, eps);
            drop(span);
            grads.register::<B>(parent.id, dx);
        }
    }
}

impl<B: RopeKernel + RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
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

    fn rms_norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let [weight, cos, sin] = [weight, cos, sin].map(|tensor| tensor.into_primitive());
        let run =
            |x: FloatTensor<Self>| B::rms_norm_rope(x.into_primitive(), weight.clone(), cos.clone(), sin.clone(), eps);
        match NormRopeBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let node = prep.checkpoint(&x);
                let y = run(x);
                prep.finish(NormRopeState { x: node, weight, cos, sin, eps }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(run(x)),
        }
    }

    fn rms_norm_rope_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: f64,
    ) -> FloatTensor<Self> {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }
}
