//! The linear layer as operations of a burn backend.

use super::{Dropout, cpu, work};
use crate::flex::{Packed, float_tensor};
use crate::trace;
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, Flex, TensorMetadata, backend_extension};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

/// Backend operations of [`lora_linear`](super::lora_linear); shapes as there.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait LinearOps: Backend {
    /// x W^T.
    fn frozen_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// [`frozen_linear`](Self::frozen_linear) whose output `y` is known.
    fn frozen_linear_known(x: FloatTensor<Self>, weight: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Gradient of [`frozen_linear`](Self::frozen_linear) to `x`.
    fn frozen_linear_backward(weight: FloatTensor<Self>, d_y: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The output `[n, out]` and the adapter's inner product `[n, rank]`, which the backward pass needs again.
    fn lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// `y`, where it and `inner` are known from [`lora_linear`](Self::lora_linear).
    #[allow(clippy::too_many_arguments)]
    fn lora_linear_known(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        y: FloatTensor<Self>,
        inner: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> FloatTensor<Self>;

    /// Gradients to `x`, `a` and `b`.
    #[allow(clippy::too_many_arguments)]
    fn lora_linear_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        inner: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// The slices of an adapter as the CPU kernels take them.
fn adapter<'a>(a: &'a Packed, b: &'a Packed, scale: f64, dropout: Option<Dropout>) -> cpu::Adapter<'a> {
    let [rank, _] = a.dims();
    cpu::Adapter { a: a.f32(), b: b.f32(), rank, scale: scale as f32, dropout }
}

impl LinearOps for Flex {
    fn frozen_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, weight) = (Packed::new(x), Packed::new(weight));
        let ([n, input], [output, _]) = (x.dims(), weight.dims());
        let shape = cpu::Shape { n, input, output };
        let y = cpu::linear(x.f32(), weight.weights(), shape);
        float_tensor(y, [n, output])
    }

    fn frozen_linear_known(_: FloatTensor<Self>, _: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        y
    }

    fn frozen_linear_backward(weight: FloatTensor<Self>, d_y: FloatTensor<Self>) -> FloatTensor<Self> {
        let (weight, d_y) = (Packed::new(weight), Packed::new(d_y));
        let ([n, output], [_, input]) = (d_y.dims(), weight.dims());
        let shape = cpu::Shape { n, input, output };
        let d_x = cpu::linear_backward(weight.weights(), d_y.f32(), shape);
        float_tensor(d_x, [n, input])
    }

    fn lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, weight, a, b) = (Packed::new(x), Packed::new(weight), Packed::new(a), Packed::new(b));
        let ([n, input], [output, _]) = (x.dims(), weight.dims());
        let adapter = adapter(&a, &b, scale, dropout);
        let shape = cpu::Shape { n, input, output };
        let (y, inner) = cpu::lora_linear(x.f32(), weight.weights(), &adapter, shape);
        (float_tensor(y, [n, output]), float_tensor(inner, [n, adapter.rank]))
    }

    fn lora_linear_known(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        y: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: f64,
        _: Option<Dropout>,
    ) -> FloatTensor<Self> {
        y
    }

    fn lora_linear_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        inner: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (x, weight, a, b) = (Packed::new(x), Packed::new(weight), Packed::new(a), Packed::new(b));
        let (inner, d_y) = (Packed::new(inner), Packed::new(d_y));
        let ([n, input], [output, _]) = (x.dims(), weight.dims());
        let adapter = adapter(&a, &b, scale, dropout);
        let rank = adapter.rank;
        let shape = cpu::Shape { n, input, output };
        let (d_x, d_a, d_b) =
            cpu::lora_linear_backward(x.f32(), weight.weights(), &adapter, inner.f32(), d_y.f32(), shape);
        (float_tensor(d_x, [n, input]), float_tensor(d_a, [rank, input]), float_tensor(d_b, [output, rank]))
    }
}

#[derive(Debug)]
struct LinearBackward;

impl<B: LinearOps> Backward<B, 1> for LinearBackward {
    /// The weight.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_y = grads.consume::<B>(&ops.node);
        if let [Some(x)] = ops.parents {
            let weight = ops.state;
            let span = trace::kernel("lora_linear without adapter, backward", || {
                work(d_y.shape()[0], weight.shape().dims(), [d_y.dtype(), weight.dtype()], 0, 0)
            });
            let d_x = B::frozen_linear_backward(weight, d_y);
            drop(span);
            grads.register::<B>(x.id, d_x);
        }
    }
}

#[derive(Debug)]
struct LoraLinearBackward;

#[derive(Clone, Debug)]
struct LoraLinearState<B: Backend> {
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    inner: FloatTensor<B>,
    scale: f64,
    dropout: Option<Dropout>,
}

impl<B: LinearOps> Backward<B, 3> for LoraLinearBackward {
    type State = LoraLinearState<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_y = grads.consume::<B>(&ops.node);
        let LoraLinearState { x, weight, a, b, inner, scale, dropout } = ops.state;
        let span = trace::kernel("lora_linear, backward", || {
            work(d_y.shape()[0], weight.shape().dims(), [x.dtype(), weight.dtype()], a.shape()[0], 2)
        });
        let (d_x, d_a, d_b) = B::lora_linear_backward(x, weight, a, b, inner, d_y, scale, dropout);
        drop(span);
        for (parent, gradient) in ops.parents.into_iter().zip([d_x, d_a, d_b]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn frozen_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let y = B::frozen_linear(x.clone().into_primitive(), weight.clone().into_primitive());
        Self::frozen_linear_known(x, weight, Self::from_inner(y))
    }

    fn frozen_linear_known(x: FloatTensor<Self>, weight: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        let y = y.into_primitive();
        match LinearBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(weight.into_primitive(), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn frozen_linear_backward(_: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }

    fn lora_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [x_value, weight_value, a_value, b_value] = [&x, &weight, &a, &b].map(|t| t.clone().into_primitive());
        let (y, inner) = B::lora_linear(x_value, weight_value, a_value, b_value, scale, dropout);
        let inner = Self::from_inner(inner);
        let y = Self::lora_linear_known(x, weight, a, b, Self::from_inner(y), inner.clone(), scale, dropout);
        (y, inner)
    }

    fn lora_linear_known(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        y: FloatTensor<Self>,
        inner: FloatTensor<Self>,
        scale: f64,
        dropout: Option<Dropout>,
    ) -> FloatTensor<Self> {
        let prepared = LoraLinearBackward.prepare::<C>([x.node(), a.node(), b.node()]).compute_bound().stateful();
        let [x, weight, a, b, y, inner] = [x, weight, a, b, y, inner].map(|tensor| tensor.into_primitive());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(LoraLinearState { x, weight, a, b, inner, scale, dropout }, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn lora_linear_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: f64,
        _: Option<Dropout>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        unreachable!("first derivatives only: a gradient is not differentiated again")
    }
}
