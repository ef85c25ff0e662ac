//! Router and experts as operations of a burn backend.

use super::{cpu, work};
use crate::flex::{Packed, float_tensor, int_tensor};
use crate::trace::{self, Work};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{AutodiffBackend, Backend, Flex, TensorMetadata, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

/// Backend operations of [`route`](super::route) and [`experts`](super::experts); shapes as there.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait MoeOps: Backend {
    /// Weights and experts, `[n, k]` each.
    fn moe_route(
        logits: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        top_k: usize,
    ) -> (FloatTensor<Self>, IntTensor<Self>);

    /// Gradient of the weights to the logits.
    fn moe_route_backward(
        logits: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        experts: IntTensor<Self>,
        d_weights: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The weighted sum of the experts' outputs.
    fn moe_experts(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// [`moe_experts`](Self::moe_experts) whose output `out` is known.
    fn moe_experts_known(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        out: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Gradients to `x` and `weights`.
    fn moe_experts_backward(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// The experts' weights as the CPU kernels take them.
fn bank<'a>(gate_up: &'a Packed, down: &'a Packed) -> cpu::Bank<'a> {
    let [count, hidden, intermediate] = down.dims();
    cpu::Bank { gate_up: gate_up.weights(), down: down.weights(), count, hidden, intermediate }
}

impl MoeOps for Flex {
    fn moe_route(
        logits: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        top_k: usize,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let (logits, scale) = (Packed::new(logits), Packed::new(per_expert_scale));
        let [n, _] = logits.dims();
        let (weights, experts) = cpu::route(logits.f32(), scale.f32(), top_k);
        (float_tensor(weights, [n, top_k]), int_tensor(experts, [n, top_k]))
    }

    fn moe_route_backward(
        logits: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        experts: IntTensor<Self>,
        d_weights: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (logits, scale) = (Packed::new(logits), Packed::new(per_expert_scale));
        let (experts, d_weights) = (Packed::new(experts), Packed::new(d_weights));
        let [_, top_k] = experts.dims();
        let d_logits = cpu::route_backward(logits.f32(), scale.f32(), experts.i32(), d_weights.f32(), top_k);
        float_tensor(d_logits, logits.dims::<2>())
    }

    fn moe_experts(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, weights, experts) = (Packed::new(x), Packed::new(weights), Packed::new(experts));
        let (gate_up, down) = (Packed::new(gate_up), Packed::new(down));
        let [_, top_k] = experts.dims();
        let choice = cpu::Choice { weights: weights.f32(), experts: experts.i32(), top_k };
        let bank = bank(&gate_up, &down);
        float_tensor(cpu::experts(x.f32(), choice, bank), x.dims::<2>())
    }

    fn moe_experts_known(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        out: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        out
    }

    fn moe_experts_backward(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, weights, experts) = (Packed::new(x), Packed::new(weights), Packed::new(experts));
        let (gate_up, down, d_out) = (Packed::new(gate_up), Packed::new(down), Packed::new(d_out));
        let [_, top_k] = experts.dims();
        let choice = cpu::Choice { weights: weights.f32(), experts: experts.i32(), top_k };
        let bank = bank(&gate_up, &down);
        let (d_x, d_weights) = cpu::experts_backward(x.f32(), choice, bank, d_out.f32());
        (float_tensor(d_x, x.dims::<2>()), float_tensor(d_weights, weights.dims::<2>()))
    }
}

#[derive(Debug)]
struct RouteBackward;

#[derive(Clone, Debug)]
struct RouteState<B: Backend> {
    logits: FloatTensor<B>,
    per_expert_scale: FloatTensor<B>,
    experts: IntTensor<B>,
}

impl<B: MoeOps> Backward<B, 1> for RouteBackward {
    type State = RouteState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_weights = grads.consume::<B>(&ops.node);
        let RouteState { logits, per_expert_scale, experts } = ops.state;
        if let [Some(parent)] = ops.parents {
            let span = trace::kernel("moe_experts, routing, backward", || {
                let ([n, count], [_, top_k]) = (logits.shape().dims(), experts.shape().dims());
                Work::f32(0, n * (2 * count + 2 * top_k))
            });
            let d_logits = B::moe_route_backward(logits, per_expert_scale, experts, d_weights);
            drop(span);
            grads.register::<B>(parent.id, d_logits);
        }
    }
}

#[derive(Debug)]
struct ExpertsBackward;

#[derive(Clone, Debug)]
struct ExpertsState<B: Backend> {
    x: FloatTensor<B>,
    weights: FloatTensor<B>,
    experts: IntTensor<B>,
    gate_up: FloatTensor<B>,
    down: FloatTensor<B>,
}

impl<B: MoeOps> Backward<B, 2> for ExpertsBackward {
    type State = ExpertsState<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let ExpertsState { x, weights, experts, gate_up, down } = ops.state;
        // gate and up are computed again
        let span = trace::kernel("moe_experts, backward", || {
            work(5, 3, experts.shape().dims(), down.shape().dims(), [x.dtype(), down.dtype()])
        });
        let (d_x, d_weights) = B::moe_experts_backward(x, weights, experts, gate_up, down, d_out);
        drop(span);
        for (parent, gradient) in ops.parents.into_iter().zip([d_x, d_weights]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: MoeOps, C: CheckpointStrategy> MoeOps for Autodiff<B, C> {
    fn moe_route(
        logits: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        top_k: usize,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let prepared = RouteBackward.prepare::<C>([logits.node()]).compute_bound().stateful();
        let (logits, per_expert_scale) = (logits.into_primitive(), per_expert_scale.into_primitive());
        let (weights, experts) = B::moe_route(logits.clone(), per_expert_scale.clone(), top_k);
        let weights = match prepared {
            OpsKind::Tracked(prep) => {
                prep.finish(RouteState { logits, per_expert_scale, experts: experts.clone() }, weights)
            }
            OpsKind::UnTracked(prep) => prep.finish(weights),
        };
        (weights, experts)
    }

    fn moe_route_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }

    fn moe_experts(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [x_value, weights_value] = [&x, &weights].map(|tensor| tensor.clone().into_primitive());
        let [gate_up_value, down_value] = [&gate_up, &down].map(|tensor| tensor.clone().into_primitive());
        let out = B::moe_experts(x_value, weights_value, experts.clone(), gate_up_value, down_value);
        Self::moe_experts_known(x, weights, experts, gate_up, down, Self::from_inner(out))
    }

    fn moe_experts_known(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        experts: IntTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        out: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let prepared = ExpertsBackward.prepare::<C>([x.node(), weights.node()]).compute_bound().stateful();
        let [x, weights, gate_up, down, out] = [x, weights, gate_up, down, out].map(|tensor| tensor.into_primitive());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(ExpertsState { x, weights, experts, gate_up, down }, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn moe_experts_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }
}
