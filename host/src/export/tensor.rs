//! The tensors of an export, each made while it is written, so that memory stays near the largest one.

use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::model::checkpoint::{Checkpoint, TensorEntry, to_f32};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::HashMap;

/// Shape and values of A and B of a module.
pub(super) type Factors = [([usize; 2], Vec<f32>); 2];

/// A and B of every module, read from the device.
pub(super) fn factors(adapter: &Adapter) -> Vec<Factors> {
    adapter.modules.iter().map(|pair| [&pair.a, &pair.b].map(|t| (t.dims(), values(t)))).collect()
}

/// The update of a module: scale B A, with A `[rank, input]` and B `[output, rank]`.
pub(super) struct Update<'a> {
    scale: f64,
    a: &'a [f32],
    b: &'a [f32],
    rank: usize,
    input: usize,
}

/// The update of each adapted tensor, by the tensor's name; `factors` are those of the adapter.
///
/// # Errors
/// `model::missing_tensor` for a module without a weight in the base.
pub(super) fn updates<'a>(
    checkpoint: &Checkpoint,
    adapter: &Adapter,
    factors: &'a [Factors],
) -> Result<HashMap<String, Update<'a>>> {
    let modules = adapter.plan.modules.iter().zip(factors);
    modules
        .map(|(m, [(_, a), (_, b)])| {
            let name = format!("{}.weight", m.path);
            checkpoint.bytes(&name)?;
            Ok((name, Update { scale: adapter.plan.scale, a, b, rank: adapter.plan.rank, input: m.input }))
        })
        .collect()
}

/// A tensor as safetensors writes it.
pub(super) struct ExportTensor<'a> {
    content: Content<'a>,
    dtype: Dtype,
    shape: Vec<usize>,
}

enum Content<'a> {
    /// A tensor of the base, with this much of an update.
    Stored { bytes: &'a [u8], dtype: Dtype, update: Option<(&'a Update<'a>, f64)> },
    /// A or B.
    Values(&'a [f32]),
}

impl<'a> ExportTensor<'a> {
    /// The base's tensor `name`, stored as `dtype` (its own where there is none), with `strength` times its update.
    ///
    /// # Errors
    /// `model::missing_tensor`; `export::dtype` where its own dtype cannot be computed with.
    pub fn stored(
        checkpoint: &'a Checkpoint,
        name: &str,
        entry: &TensorEntry,
        dtype: Option<Dtype>,
        update: Option<(&'a Update<'a>, f64)>,
    ) -> Result<Self> {
        let bytes = checkpoint.bytes(name)?;
        let to = dtype.unwrap_or(entry.dtype);
        if (update.is_some() || to != entry.dtype) && !is_float(entry.dtype) {
            let message = format!("tensor {name} is stored as {:?} and cannot be converted or merged", entry.dtype);
            return Err(Error::new("export::dtype", message).expected("F32, BF16 or F16"));
        }
        let content = Content::Stored { bytes, dtype: entry.dtype, update };
        Ok(Self { content, dtype: to, shape: entry.shape.clone() })
    }

    /// A or B, stored as `dtype`, f32 where there is none.
    pub fn values(values: &'a [f32], shape: [usize; 2], dtype: Option<Dtype>) -> Self {
        Self { content: Content::Values(values), dtype: dtype.unwrap_or(Dtype::F32), shape: shape.into() }
    }
}

impl View for ExportTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.content {
            Content::Stored { bytes, dtype, update: None } if *dtype == self.dtype => Cow::Borrowed(bytes),
            Content::Stored { bytes, dtype, update } => {
                let mut w = to_f32(bytes, *dtype).expect("checked when it was made");
                if let Some((update, strength)) = update {
                    merge(&mut w, update, *strength);
                }
                Cow::Owned(encode(&w, self.dtype))
            }
            Content::Values(values) => Cow::Owned(encode(values, self.dtype)),
        }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// W + strength scale B A; the sum in f64.
fn merge(w: &mut [f32], update: &Update, strength: f64) {
    let scale = update.scale * strength;
    w.par_chunks_mut(update.input).zip(update.b.par_chunks(update.rank)).for_each(|(row, b)| {
        let mut delta = vec![0f64; update.input];
        for (b, a) in b.iter().zip(update.a.chunks(update.input)) {
            for (d, a) in delta.iter_mut().zip(a) {
                *d += f64::from(*b) * f64::from(*a);
            }
        }
        for (w, d) in row.iter_mut().zip(delta) {
            *w = (f64::from(*w) + scale * d) as f32;
        }
    });
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Rounded to nearest even where 16 bits are stored.
fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}
