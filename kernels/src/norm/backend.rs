//! How burn calls the normalisation: the dispatched operation, its kernels per backend, and its gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::DType;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_flex::FlexTensor;

use super::cpu::{self, Residual};
use crate::flex::{float_tensor, unwritten};
use crate::trace::{self, Work};

/// The differentiable operations, dispatched at run time to the tensor's backend.
#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cubecl"))]
pub trait RmsNormOps: Backend {
    /// See [`rms_norm`](super::rms_norm).
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64, out: DType) -> FloatTensor<Self>;

    /// The same without a weight: the dispatch takes no optional tensors.
    fn rms_norm_weightless(x: FloatTensor<Self>, eps: f64, out: DType) -> FloatTensor<Self>;

    /// See [`rms_norm_residual`](super::rms_norm_residual).
    fn rms_norm_residual(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        eps: f64,
        scale: f32,
    ) -> FloatTensor<Self>;
}

/// What is made of a normalised row before it is written.
pub enum Epilogue<T> {
    /// Nothing: the result is of this dtype.
    Write(DType),
    /// `(values + norm) * scale`, in the dtype of `values`.
    Residual {
        /// Shaped as the norm.
        values: T,
        /// Of the sum.
        scale: f32,
    },
}

/// What a backend implements: both directions, without automatic differentiation.
pub trait RmsNormKernel: Backend {
    /// What `epilogue` makes of the norm of `x [rows, dim]` with `weight [dim]`, shaped as `x`.
    fn forward(
        x: FloatTensor<Self>,
        weight: Option<FloatTensor<Self>>,
        eps: f64,
        epilogue: Epilogue<FloatTensor<Self>>,
    ) -> FloatTensor<Self>;

    /// `scale` times `dx [rows, dim]`, in the dtype of `x`, from `x`, `weight` and `dy [rows, dim]`.
    fn backward(
        x: FloatTensor<Self>,
        weight: Option<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        eps: f64,
        scale: f32,
    ) -> FloatTensor<Self>;
}

impl RmsNormKernel for Flex {
    fn forward(x: FlexTensor, weight: Option<FlexTensor>, eps: f64, epilogue: Epilogue<FlexTensor>) -> FlexTensor {
        let (x, weight) = (x.to_contiguous(), weight.map(|w| w.to_contiguous()));
        let residual = match epilogue {
            Epilogue::Residual { values, scale } => Some((values.to_contiguous(), scale)),
            Epilogue::Write(out) => {
                assert_eq!(out, DType::F32, "rms_norm: the CPU kernel gives f32, not {out:?}");
                None
            }
        };
        let residual = residual.as_ref().map(|(values, scale)| Residual { values: values.storage(), scale: *scale });
        let mut y = unwritten(x.shape().num_elements());
        cpu::forward(x.storage(), weight.as_ref().map(|w| w.storage()), x.shape()[1], eps, residual, &mut y);
        float_tensor(y, x.shape())
    }

    fn backward(x: FlexTensor, weight: Option<FlexTensor>, dy: FlexTensor, eps: f64, scale: f32) -> FlexTensor {
        let (x, weight) = (x.to_contiguous(), weight.map(|w| w.to_contiguous()));
        let dy = dy.to_contiguous();
        let mut dx = unwritten(x.shape().num_elements());
        let weight = weight.as_ref().map(|w| w.storage());
        cpu::backward(x.storage(), weight, dy.storage(), x.shape()[1], eps, scale, &mut dx);
        float_tensor(dx, x.shape())
    }
}

impl RmsNormOps for Flex {
    fn rms_norm(x: FlexTensor, weight: FlexTensor, eps: f64, out: DType) -> FlexTensor {
        Self::forward(x, Some(weight), eps, Epilogue::Write(out))
    }

    fn rms_norm_weightless(x: FlexTensor, eps: f64, out: DType) -> FlexTensor {
        Self::forward(x, None, eps, Epilogue::Write(out))
    }

    fn rms_norm_residual(x: FlexTensor, weight: FlexTensor, values: FlexTensor, eps: f64, scale: f32) -> FlexTensor {
        Self::forward(x, Some(weight), eps, Epilogue::Residual { values, scale })
    }
}

fn pulled_back<B: RmsNormKernel>(
    x: FloatTensor<B>,
    weight: Option<FloatTensor<B>>,
    dy: FloatTensor<B>,
    eps: f64,
    scale: f32,
) -> FloatTensor<B> {
    let _span = trace::kernel("rms_norm, backward", || Work {
        flop: 0,
        bytes: x.shape().num_elements() * (2 * x.dtype().size() + dy.dtype().size()),
    });
    B::backward(x, weight, dy, eps, scale)
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
            grads.register::<B>(parent.id, pulled_back::<B>(x, weight, dy, eps, 1.0));
        }
    }
}

#[derive(Debug)]
struct RmsNormResidualBackward;

impl<B: RmsNormKernel> Backward<B, 2> for RmsNormResidualBackward {
    type State = (NodeId, FloatTensor<B>, f64, f32);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (x, weight, eps, scale) = ops.state;
        let x: FloatTensor<B> = checkpointer.retrieve_node_output(x);
        let [x_parent, residual] = ops.parents;
        if let Some(parent) = x_parent {
            grads.register::<B>(parent.id, pulled_back::<B>(x, Some(weight), dy.clone(), eps, scale));
        }
        if let Some(parent) = residual {
            let d_residual = if scale == 1.0 { dy } else { B::float_mul_scalar(dy, scale.into()) };
            grads.register::<B>(parent.id, d_residual);
        }
    }
}

impl<B: RmsNormKernel, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64, out: DType) -> FloatTensor<Self> {
        tracked::<B, C>(x, Some(weight.into_primitive()), eps, out)
    }

    fn rms_norm_weightless(x: FloatTensor<Self>, eps: f64, out: DType) -> FloatTensor<Self> {
        tracked::<B, C>(x, None, eps, out)
    }

    fn rms_norm_residual(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        eps: f64,
        scale: f32,
    ) -> FloatTensor<Self> {
        let weight = weight.into_primitive();
        let run = |x: FloatTensor<Self>, weight, residual: FloatTensor<Self>| {
            let epilogue = Epilogue::Residual { values: residual.into_primitive(), scale };
            B::forward(x.into_primitive(), Some(weight), eps, epilogue)
        };
        match RmsNormResidualBackward.prepare::<C>([x.node(), residual.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&x), weight.clone(), eps, scale);
                prep.finish(state, run(x, weight, residual))
            }
            OpsKind::UnTracked(prep) => prep.finish(run(x, weight, residual)),
        }
    }
}

fn tracked<B: RmsNormKernel, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    weight: Option<FloatTensor<B>>,
    eps: f64,
    out: DType,
) -> FloatTensor<Autodiff<B, C>> {
    let epilogue = Epilogue::Write(out);
    match RmsNormBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let state = (prep.checkpoint(&x), weight.clone(), eps);
            let y = B::forward(x.into_primitive(), weight, eps, epilogue);
            prep.finish(state, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::forward(x.into_primitive(), weight, eps, epilogue)),
    }
}
