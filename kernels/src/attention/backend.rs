//! How burn calls the attention: the dispatched operation, its kernels per backend, and its gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, Flex, TensorMetadata, backend_extension};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_flex::FlexTensor;

use super::{Attention, Heads, Isa, cpu, work};
use crate::flex::{float_tensor, unwritten, zeros};
use crate::trace;

/// The differentiable operation, dispatched at run time to the tensor's backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait AttentionOps: Backend {
    /// The result and the log-sum-exp, as [`Output`](super::Output) has them.
    fn windowed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        attention: Attention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The result, where it and the log-sum-exp are known.
    fn windowed_attention_known(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self>;
}

/// What the forward pass computed.
#[derive(Debug, Clone)]
pub struct Output<B: Backend> {
    /// The result, shaped as `q`.
    pub out: FloatTensor<B>,
    /// Base-2 logarithm of every query's sum of `2^(score * log2(e))`: `[tokens, query heads]`.
    pub lse: FloatTensor<B>,
}

/// What a backend implements: both directions, without automatic differentiation.
pub trait AttentionKernel: Backend {
    /// The result and the log-sum-exp.
    fn forward(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, attention: &Attention)
    -> Output<Self>;

    /// `(dq, dk, dv)` from the inputs, the output of [`forward`](Self::forward) and the gradient of the result.
    fn backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        output: Output<Self>,
        dout: FloatTensor<Self>,
        attention: &Attention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

fn heads(q: &FlexTensor, k: &FlexTensor) -> Heads {
    Heads { query: q.shape()[1], kv: k.shape()[1], dim: q.shape()[2] }
}

impl AttentionKernel for Flex {
    fn forward(q: FlexTensor, k: FlexTensor, v: FlexTensor, attention: &Attention) -> Output<Flex> {
        let heads = heads(&q, &k);
        let (q, k, v) = (q.to_contiguous(), k.to_contiguous(), v.to_contiguous());
        let mut out = unwritten(q.shape().num_elements());
        let mut lse = unwritten(q.shape()[0] * heads.query);
        let inputs = cpu::Inputs { q: q.storage(), k: k.storage(), v: v.storage(), heads, attention };
        cpu::forward(Isa::detect(), &inputs, &mut out, &mut lse);
        Output { out: float_tensor(out, q.shape()), lse: float_tensor(lse, [q.shape()[0], heads.query]) }
    }

    fn backward(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        output: Output<Flex>,
        dout: FlexTensor,
        attention: &Attention,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let heads = heads(&q, &k);
        let (q, k, v, dout) = (q.to_contiguous(), k.to_contiguous(), v.to_contiguous(), dout.to_contiguous());
        let output: Output<Flex> = Output { out: output.out.to_contiguous(), lse: output.lse.to_contiguous() };
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|input| zeros(input.shape().num_elements()));
        let inputs = cpu::Inputs { q: q.storage(), k: k.storage(), v: v.storage(), heads, attention };
        let saved = cpu::Saved { out: output.out.storage(), lse: output.lse.storage(), dout: dout.storage() };
        let gradients = cpu::Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        cpu::backward(Isa::detect(), &inputs, &saved, gradients);
        (float_tensor(dq, q.shape()), float_tensor(dk, k.shape()), float_tensor(dv, v.shape()))
    }
}

impl AttentionOps for Flex {
    fn windowed_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        attention: Attention,
    ) -> (FlexTensor, FlexTensor) {
        let Output { out, lse } = Self::forward(q, k, v, &attention);
        (out, lse)
    }

    fn windowed_attention_known(
        _: FlexTensor,
        _: FlexTensor,
        _: FlexTensor,
        out: FlexTensor,
        _: FlexTensor,
        _: Attention,
    ) -> FlexTensor {
        out
    }
}

#[derive(Debug, Clone)]
struct State<B: Backend> {
    q: NodeId,
    k: NodeId,
    v: NodeId,
    output: Output<B>,
    attention: Attention,
}

#[derive(Debug)]
struct AttentionBackward;

impl<B: AttentionKernel> Backward<B, 3> for AttentionBackward {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let State { q, k, v, output, attention } = ops.state;
        let q: FloatTensor<B> = checkpointer.retrieve_node_output(q);
        let k: FloatTensor<B> = checkpointer.retrieve_node_output(k);
        let v: FloatTensor<B> = checkpointer.retrieve_node_output(v);
        let span = trace::kernel("windowed_attention, backward", || {
            work(5, q.shape().dims(), k.shape().dims(), q.dtype(), &attention)
        });
        let (dq, dk, dv) = B::backward(q, k, v, output, dout, &attention);
        drop(span);
        for (parent, gradient) in ops.parents.into_iter().zip([dq, dk, dv]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: AttentionKernel, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn windowed_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        attention: Attention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [q_value, k_value, v_value] = [&q, &k, &v].map(|tensor| tensor.clone().into_primitive());
        let Output { out, lse } = B::forward(q_value, k_value, v_value, &attention);
        let (out, lse) = (Self::from_inner(out), Self::from_inner(lse));
        (Self::windowed_attention_known(q, k, v, out, lse.clone(), attention), lse)
    }

    fn windowed_attention_known(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self> {
        let (out, lse) = (out.into_primitive(), lse.into_primitive());
        match AttentionBackward.prepare::<C>([q.node(), k.node(), v.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let [q, k, v] = [&q, &k, &v].map(|input| prep.checkpoint(input));
                let output = Output { out: out.clone(), lse };
                prep.finish(State { q, k, v, output, attention }, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}
