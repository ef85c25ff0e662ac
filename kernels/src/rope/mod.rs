//! Rotary position embedding (Su et al., arXiv 2104.09864) in its half-split form: dimension `j` is paired with
//! `j + head_dim / 2`.

mod backend;
pub mod cpu;
#[cfg(feature = "cubecl")]
mod cube;
pub mod reference;

use std::fmt;

use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor, TensorData};

pub use backend::{RopeKernel, RopeOps};

/// Which pairs of a head rotate, and how fast: one value per pair, from fastest to slowest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeKind {
    /// Every pair rotates: frequency `theta^(-2j / head_dim)`.
    Default,
    /// Only the first `floor(partial_rotary_factor * head_dim / 2)` pairs rotate, at the frequencies the default kind
    /// gives them, divided by `factor`; the others pass through.
    Proportional {
        /// Share of the pairs that rotate, in 0..=1.
        partial_rotary_factor: f64,
        /// Divisor of the frequencies; 1 where the model's configuration has none.
        factor: f64,
    },
}

/// The rotation of a layer kind: head size, base and kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Size of a head, even.
    pub head_dim: usize,
    /// Base of the frequencies, positive.
    pub theta: f64,
    /// Which pairs rotate.
    pub kind: RopeKind,
}

impl RopeSpec {
    /// The angle per position of each of the `head_dim / 2` pairs, in radians.
    ///
    /// # Errors
    /// [`RopeError`] when a field is out of its range.
    pub fn frequencies(&self) -> Result<Vec<f64>, RopeError> {
        let pairs = self.head_dim / 2;
        let (rotating, factor) = match self.kind {
            RopeKind::Default => (pairs, 1.0),
            RopeKind::Proportional { partial_rotary_factor, factor } => {
                if !(0.0..=1.0).contains(&partial_rotary_factor) {
                    return Err(RopeError::PartialRotaryFactor(partial_rotary_factor));
                }
                ((partial_rotary_factor * self.head_dim as f64 / 2.0) as usize, factor)
            }
        };
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(RopeError::HeadDim(self.head_dim));
        }
        if !(self.theta > 0.0 && self.theta.is_finite()) {
            return Err(RopeError::Theta(self.theta));
        }
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(RopeError::Factor(factor));
        }
        let frequency = |pair: usize| match pair < rotating {
            true => self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64) / factor,
            false => 0.0,
        };
        Ok((0..pairs).map(frequency).collect())
    }
}

/// A rotation that cannot be built.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeError {
    /// The head size is zero or odd.
    HeadDim(usize),
    /// The base is not a positive number.
    Theta(f64),
    /// The share of rotating pairs is outside 0..=1.
    PartialRotaryFactor(f64),
    /// The divisor of the frequencies is not a positive number.
    Factor(f64),
}

impl fmt::Display for RopeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadDim(dim) => write!(f, "rope needs an even, non-zero head size, not {dim}"),
            Self::Theta(theta) => write!(f, "rope needs a positive base (rope_theta), not {theta}"),
            Self::PartialRotaryFactor(share) => write!(f, "partial_rotary_factor lies in 0..=1, not {share}"),
            Self::Factor(factor) => write!(f, "rope needs a positive factor, not {factor}"),
        }
    }
}

impl std::error::Error for RopeError {}

/// Cosines and sines for the tokens of one micro-batch: `[tokens, head_dim / 2]` each. A clone shares them.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl RopeTable {
    /// Computes the table on the host, in f64, and places it on `device` as f32; `positions` has one id per token.
    ///
    /// # Errors
    /// [`RopeError`] when a field of `spec` is out of its range.
    pub fn new(spec: &RopeSpec, positions: &[u32], device: &Device) -> Result<Self, RopeError> {
        let frequencies = spec.frequencies()?;
        // The angle is rounded to f32 before its cosine is taken, as in the models' own training code.
        let frequencies: Vec<f32> = frequencies.iter().map(|&f| f as f32).collect();
        let angles = || positions.iter().flat_map(|&p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
        let cos: Vec<f32> = angles().map(|angle| angle.cos() as f32).collect();
        let sin: Vec<f32> = angles().map(|angle| angle.sin() as f32).collect();
        let shape = [positions.len(), frequencies.len()];
        Ok(Self {
            cos: Tensor::from_data(TensorData::new(cos, shape), device),
            sin: Tensor::from_data(TensorData::new(sin, shape), device),
        })
    }

    /// Number of tokens and of pairs per head: `[tokens, head_dim / 2]`.
    pub fn dims(&self) -> [usize; 2] {
        self.cos.dims()
    }
}

/// Rotates every head of `x [tokens, heads, head_dim]` (f32, f16 or bf16) by its token's angles:
/// `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair. The result and the gradient have the dtype of `x`. Nothing but the table is
/// kept for the backward pass, which rotates the other way.
///
/// # Panics
/// If the table was built for another number of tokens or another head size, or on another dtype; on the CPU on any but f32.
pub fn rope(x: Tensor<3>, table: &RopeTable) -> Tensor<3> {
    let [tokens, _, head_dim] = x.dims();
    assert_eq!(table.dims(), [tokens, head_dim / 2], "rope: the table does not fit x [{tokens}, _, {head_dim}]");
    let (cos, sin) = (table.cos.clone().into_dispatch(), table.sin.clone().into_dispatch());
    let _span = trace::kernel("rope", || Work::of(0, 2 * x.shape().num_elements(), x.dtype()));
    Tensor::from_dispatch(Dispatch::rope(x.into_dispatch(), cos, sin))
}

/// [`rope`] of the [`rms_norm`](crate::norm::rms_norm) of every head, in one pass; `weight` is `[head_dim]`, f32.
///
/// Gradients flow to `x` alone, and `x` is all that is kept.
///
/// # Panics
/// As [`rope`], and if the weight's length is not `head_dim`.
pub fn rms_norm_rope(x: Tensor<3>, weight: Tensor<1>, eps: f64, table: &RopeTable) -> Tensor<3> {
    let [tokens, _, head_dim] = x.dims();
    assert_eq!(table.dims(), [tokens, head_dim / 2], "rope: the table does not fit x [{tokens}, _, {head_dim}]");
    assert_eq!(weight.dims(), [head_dim], "rms_norm_rope: the weight has one value per column of a head");
    let (cos, sin) = (table.cos.clone().into_dispatch(), table.sin.clone().into_dispatch());
    let _span = trace::kernel("rope with rms_norm", || Work::of(0, 2 * x.shape().num_elements(), x.dtype()));
    Tensor::from_dispatch(Dispatch::rms_norm_rope(x.into_dispatch(), weight.into_dispatch(), cos, sin, eps))
}
