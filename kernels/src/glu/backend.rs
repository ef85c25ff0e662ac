//! The gated linear unit as operations of a burn backend.

use super::cpu;
use crate::flex::{Packed, float_tensor};
use crate::trace::{self, Work};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

/// Backend operations of [`geglu`](super::geglu).
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait GluOps: Backend {
    /// gelu_tanh(gate) * up.
    fn geglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Gradients to `gate` and `up`.
    fn geglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl GluOps for Flex {
    fn geglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let (gate, up) = (Packed::new(gate), Packed::new(up));
        float_tensor(cpu::geglu(gate.f32(), up.f32()), gate.dims::<2>())
    }

    fn geglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (gate, up, d_out) = (Packed::new(gate), Packed::new(up), Packed::new(d_out));
        let (d_gate, d_up) = cpu::geglu_backward(gate.f32(), up.f32(), d_out.f32());
        (float_tensor(d_gate, gate.dims::<2>()), float_tensor(d_up, gate.dims::<2>()))
    }
}

#[derive(Debug)]
struct GegluBackward;

impl<B: GluOps> Backward<B, 2> for GegluBackward {
    /// Gate and up.
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let (gate, up) = ops.state;
        let span = trace::kernel("geglu, backward", || Work::of(0, 5 * gate.shape().num_elements(), gate.dtype()));
        let (d_gate, d_up) = B::geglu_backward(gate, up, d_out);
        drop(span);
        for (parent, gradient) in ops.parents.into_iter().zip([d_gate, d_up]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: GluOps, C: CheckpointStrategy> GluOps for Autodiff<B, C> {
    fn geglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = GegluBackward.prepare::<C>([gate.node(), up.node()]).compute_bound().stateful();
        let (gate, up) = (gate.into_primitive(), up.into_primitive());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish((gate.clone(), up.clone()), B::geglu(gate, up)),
            OpsKind::UnTracked(prep) => prep.finish(B::geglu(gate, up)),
        }
    }

    fn geglu_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }
}
