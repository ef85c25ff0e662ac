//! The start of a backward pass where the gradient of a tensor is known: its vector-Jacobian product with no loss formed.

use crate::flex::float_tensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{Gradients as Tape, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

/// The tape after `output` was pulled back with its gradient `d_output`, of the same shape and dtype.
///
/// # Panics
/// If shapes or dtypes differ or `output` is not tracked.
pub fn pull_back(output: Tensor<2>, d_output: Tensor<2>) -> Tape {
    assert_eq!(output.dims(), d_output.dims(), "a gradient has the shape of its tensor");
    assert_eq!(output.dtype(), d_output.dtype(), "a gradient has the dtype of its tensor");
    let start = Dispatch::with_cotangent(output.into_dispatch(), d_output.into_dispatch());
    Tensor::<1>::from_dispatch(start).backward()
}

/// Backend operation of [`pull_back`].
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait CotangentOps: Backend {
    /// One value that means nothing, whose gradient to `output` is `d_output`.
    fn with_cotangent(output: FloatTensor<Self>, d_output: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl CotangentOps for Flex {
    fn with_cotangent(_: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        float_tensor(vec![0.0], [1])
    }
}

#[cfg(feature = "cubecl")]
impl CotangentOps for burn_cubecl::CubeBackend {
    fn with_cotangent(output: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        crate::cube::empty(&output, [1], burn::tensor::DType::F32)
    }
}

#[derive(Debug)]
struct Start;

impl<B: CotangentOps> Backward<B, 1> for Start {
    /// The gradient of the output.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        grads.consume::<B>(&ops.node);
        if let [Some(output)] = ops.parents {
            grads.register::<B>(output.id, ops.state);
        }
    }
}

impl<B: CotangentOps, C: CheckpointStrategy> CotangentOps for Autodiff<B, C> {
    fn with_cotangent(output: FloatTensor<Self>, d_output: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = Start.prepare::<C>([output.node()]).compute_bound().stateful();
        let d_output = d_output.into_primitive();
        let start = B::with_cotangent(output.into_primitive(), d_output.clone());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(d_output, start),
            OpsKind::UnTracked(prep) => prep.finish(start),
        }
    }
}
