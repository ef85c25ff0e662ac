//! The tensors of an export, each made while it is written, so that memory stays near the largest one.

use super::blocks;
use super::quantize::{Moments, Rounding, Searched, global_scale};
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::model::checkpoint::{Checkpoint, TensorEntry, to_f32};
use crate::model::ggml::Stored;
use crate::plugins::{QuantizedModule, Scheme};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Values that are converted at once.
const PIECE_VALUES: usize = 1 << 22;

/// Shape and values of A and B of a module.
pub(super) type Factors = [([usize; 2], Vec<f32>); 2];

/// A and B of every module, read from the device.
pub(super) fn factors(adapter: &Adapter) -> Vec<Factors> {
    adapter.pairs().map(|pair| [pair.a, pair.b].map(|t| (t.dims(), values(&t)))).collect()
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

/// A tensor that is written.
pub(super) struct ExportTensor<'a> {
    content: Content<'a>,
    stored: Stored,
    shape: Vec<usize>,
}

enum Content<'a> {
    /// A tensor of the base, with this much of an update.
    Stored { checkpoint: &'a Checkpoint, name: &'a str, dtype: Dtype, update: Option<(&'a Update<'a>, f64)> },
    /// A or B.
    Values(&'a [f32]),
    /// A part of a quantised module.
    Part(&'a QuantizedWeight<'a>, Part),
}

/// What a quantised module is stored as.
#[derive(Clone, Copy)]
enum Part {
    Codes,
    Scales,
    /// The scale of the whole module.
    Global,
    /// Rows and columns.
    Shape,
}

impl<'a> ExportTensor<'a> {
    /// The base's tensor `name`, written as `stored` (its own dtype where there is none), with `strength` times its update.
    ///
    /// # Errors
    /// `model::missing_tensor`; `export::dtype` where its own dtype cannot be computed with.
    pub fn stored(
        checkpoint: &'a Checkpoint,
        name: &'a str,
        entry: &TensorEntry,
        stored: Option<Stored>,
        update: Option<(&'a Update<'a>, f64)>,
    ) -> Result<Self> {
        let bytes = checkpoint.bytes(name)?;
        let own = Stored::Plain(entry.dtype);
        let stored = stored.unwrap_or(own);
        if (update.is_some() || stored != own) && !is_float(entry.dtype) {
            let message = format!("tensor {name} is stored as {:?} and cannot be converted or merged", entry.dtype);
            return Err(not_a_float(message));
        }
        let converted = stored == Stored::Plain(Dtype::F16) && stored != own;
        if let Some(value) = converted.then(|| beyond_f16(bytes, entry.dtype)).flatten() {
            let message = format!("tensor {name} holds {value:e}, which F16 would make infinite");
            return Err(Error::new("export::dtype", message)
                .expected("values up to 65,504")
                .help("export as bfloat16, or unchanged"));
        }
        let content = Content::Stored { checkpoint, name, dtype: entry.dtype, update };
        Ok(Self { content, stored, shape: entry.shape.clone() })
    }

    /// A, B or a constant, written as `stored`, f32 where there is none.
    pub fn values(values: &'a [f32], shape: &[usize], stored: Option<Stored>) -> Self {
        let stored = stored.unwrap_or(Stored::Plain(Dtype::F32));
        Self { content: Content::Values(values), stored, shape: shape.into() }
    }

    /// How it is stored.
    pub fn stored_as(&self) -> Stored {
        self.stored
    }

    /// Writes it piece by piece, so that memory holds the values of some rows and not of all.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let Content::Stored { checkpoint, name, dtype, update } = &self.content else {
            return out.write_all(&self.data());
        };
        let bytes = stored_bytes(checkpoint, name);
        if update.is_none() && Stored::Plain(*dtype) == self.stored {
            out.write_all(bytes)?;
            checkpoint.release(name);
            return Ok(());
        }
        let width = self.shape.last().copied().unwrap_or(1).max(1);
        let rows = (PIECE_VALUES / width).max(1);
        let pieces = bytes.chunks(rows * width * dtype.bitsize() / 8);
        for (piece, first) in pieces.zip((0..).step_by(rows)) {
            let mut w = to_f32(piece, *dtype).expect("checked when it was made");
            if let Some((update, strength)) = update {
                merge(&mut w, update, *strength, first);
            }
            out.write_all(&encode(&w, self.stored))?;
        }
        checkpoint.release(name);
        Ok(())
    }
}

fn stored_bytes<'a>(checkpoint: &'a Checkpoint, name: &str) -> &'a [u8] {
    checkpoint.bytes(name).expect("looked up when it was made")
}

impl View for ExportTensor<'_> {
    /// Blocks have none in safetensors; the plan was checked to put them into GGUF files.
    fn dtype(&self) -> Dtype {
        match self.stored {
            Stored::Plain(dtype) => dtype,
            Stored::Blocks(_) => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.content {
            // A copy, so that memory holds this tensor alone and not the mapped pages of all.
            Content::Stored { checkpoint, name, dtype, update: None } if Stored::Plain(*dtype) == self.stored => {
                let bytes = stored_bytes(checkpoint, name).to_vec();
                checkpoint.release(name);
                Cow::Owned(bytes)
            }
            Content::Stored { checkpoint, name, dtype, update } => {
                let mut w = to_f32(stored_bytes(checkpoint, name), *dtype).expect("checked when it was made");
                checkpoint.release(name);
                if let Some((update, strength)) = update {
                    merge(&mut w, update, *strength, 0);
                }
                Cow::Owned(encode(&w, self.stored))
            }
            Content::Values(values) => Cow::Owned(encode(values, self.stored)),
            Content::Part(module, part) => Cow::Owned(module.bytes(*part)),
        }
    }

    fn data_len(&self) -> usize {
        self.stored.size_bytes(&self.shape)
    }
}

/// Rows of a tensor of the base, with their update.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    bytes: &'a [u8],
    dtype: Dtype,
    first_row: usize,
    update: Option<&'a Update<'a>>,
}

impl Matrix<'_> {
    /// W + scale B A, `[rows, width]`.
    fn values(&self) -> Vec<f32> {
        let mut w = to_f32(self.bytes, self.dtype).expect("checked when it was made");
        if let Some(update) = self.update {
            merge(&mut w, update, 1.0, self.first_row);
        }
        w
    }
}

/// Modules that a server multiplies with at once have one global scale, of the largest weight among them. They are read for it when
/// the first of them is, so that the others are still in the system's memory when their turn comes.
pub(super) struct SharedScale<'a> {
    members: Vec<Matrix<'a>>,
    global: OnceLock<f32>,
}

impl SharedScale<'_> {
    fn global(&self) -> f32 {
        let largest = |matrix: &Matrix| matrix.values().into_par_iter().map(f32::abs).reduce(|| 0.0, f32::max);
        *self.global.get_or_init(|| global_scale(self.members.iter().map(largest).fold(0.0, f32::max)))
    }
}

/// A linear module that is stored quantised.
pub struct QuantizedWeight<'a> {
    path: &'a str,
    /// Name of the base's tensor.
    pub(super) tensor: &'a str,
    /// Its rows of that tensor.
    pub(super) rows: Range<usize>,
    matrix: Matrix<'a>,
    scheme: Scheme,
    width: usize,
    /// Of `nvfp4` alone.
    shared: Option<Arc<SharedScale<'a>>>,
    /// As they are stored. Kept once they were chosen: small beside the codes, and dear where they are searched.
    scales: OnceLock<Vec<u8>>,
}

impl<'a> QuantizedWeight<'a> {
    /// The module `planned`, of the tensor `entry` that is called `name`, before [`share_scales`].
    ///
    /// # Errors
    /// `model::missing_tensor`; `export::dtype` where its dtype cannot be computed with.
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        name: &'a str,
        entry: &TensorEntry,
        planned: &'a QuantizedModule,
        update: Option<&'a Update<'a>>,
    ) -> Result<Self> {
        if !is_float(entry.dtype) {
            let message = format!("tensor {name} is stored as {:?} and cannot be quantised", entry.dtype);
            return Err(not_a_float(message));
        }
        let width = entry.shape.last().copied().unwrap_or(1);
        let row = width * entry.dtype.bitsize() / 8;
        let bytes = &checkpoint.bytes(name)?[planned.rows.start * row..planned.rows.end * row];
        Ok(Self {
            path: &planned.path,
            tensor: name,
            rows: planned.rows.clone(),
            matrix: Matrix { bytes, dtype: entry.dtype, first_row: planned.rows.start, update },
            scheme: planned.scheme,
            width,
            shared: None,
            scales: OnceLock::new(),
        })
    }

    fn rounding(&self) -> Rounding {
        let global = self.shared.as_ref().map_or(1.0, |shared| shared.global());
        Rounding { scheme: self.scheme, width: self.width, global }
    }

    /// No sums yet, of the size that the search of its scales asks for.
    pub(super) fn no_moments(&self) -> Moments {
        Moments::new(self.width, Moments::block_of(self.scheme, self.width))
    }

    /// Chooses the scales by the inputs that `moments` has seen.
    pub(super) fn search_scales(&self, moments: &Moments) -> Searched {
        let rounding = self.rounding();
        let searched = rounding.search(&self.matrix.values(), moments);
        // A first choice stays; nobody chooses twice.
        let _ = self.scales.set(rounding.packed_scales(&searched.scales));
        searched
    }

    fn bytes(&self, part: Part) -> Vec<u8> {
        let rounding = self.rounding();
        let scales = |w: &[f32]| self.scales.get_or_init(|| rounding.packed_scales(&rounding.scales(w)));
        match part {
            Part::Codes => {
                let w = self.matrix.values();
                rounding.packed(&w, &rounding.unpacked_scales(scales(&w)))
            }
            Part::Scales => self.scales.get().unwrap_or_else(|| scales(&self.matrix.values())).clone(),
            Part::Global => rounding.global.to_le_bytes().into(),
            Part::Shape => [self.rows.len(), self.width].iter().flat_map(|n| (*n as i64).to_le_bytes()).collect(),
        }
    }

    /// The tensors that it is stored in, with their names.
    pub(super) fn tensors(&'a self) -> Vec<(String, ExportTensor<'a>)> {
        let (rows, width) = (self.rows.len(), self.width);
        use Dtype::{BF16, F8_E4M3, F32, I32, I64, U8};
        let parts = match self.scheme {
            Scheme::Fp8 => vec![(Part::Codes, F8_E4M3, vec![rows, width]), (Part::Scales, BF16, vec![rows, 1])],
            Scheme::Int4(group) => vec![
                (Part::Codes, I32, vec![rows, width / 8]),
                (Part::Scales, BF16, vec![rows, width / group]),
                (Part::Shape, I64, vec![2]),
            ],
            Scheme::Nvfp4 => vec![
                (Part::Codes, U8, vec![rows, width / 2]),
                (Part::Scales, F8_E4M3, vec![rows, width / 16]),
                (Part::Global, F32, vec![1]),
            ],
        };
        let suffixes = self.scheme.suffixes();
        let named = |((part, dtype, shape), suffix): ((Part, Dtype, Vec<usize>), &str)| {
            let stored = Stored::Plain(dtype);
            (format!("{}.{suffix}", self.path), ExportTensor { content: Content::Part(self, part), stored, shape })
        };
        parts.into_iter().zip(suffixes).map(named).collect()
    }
}

/// W + strength scale B A; the sum in f64. `w` starts at row `first` of the update.
fn merge(w: &mut [f32], update: &Update, strength: f64, first: usize) {
    let scale = update.scale * strength;
    let b = &update.b[first * update.rank..];
    w.par_chunks_mut(update.input).zip(b.par_chunks(update.rank)).for_each(|(row, b)| {
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

/// Lets the modules of `quantized` have one scale whose number in the plan is the same; `numbers` are those, of `nvfp4` alone.
pub(super) fn share_scales<'a>(quantized: &mut [Vec<QuantizedWeight<'a>>], numbers: &[Option<u32>]) {
    let mut members: HashMap<u32, Vec<Matrix<'a>>> = HashMap::new();
    for (weight, number) in quantized.iter().flatten().zip(numbers) {
        number.iter().for_each(|number| members.entry(*number).or_default().push(weight.matrix));
    }
    let shared = |(number, members)| (number, Arc::new(SharedScale { members, global: OnceLock::new() }));
    let shared: HashMap<u32, Arc<SharedScale>> = members.into_iter().map(shared).collect();
    for (weight, number) in quantized.iter_mut().flatten().zip(numbers) {
        weight.shared = number.and_then(|number| shared.get(&number).cloned());
    }
}

fn not_a_float(message: String) -> Error {
    Error::new("export::dtype", message)
        .expected("F32, BF16 or F16")
        .help("store the base's weights in one of these first")
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// The first value that no finite f16 is nearest to.
fn beyond_f16(bytes: &[u8], dtype: Dtype) -> Option<f32> {
    bytes.par_chunks(PIECE_VALUES * dtype.bitsize() / 8).find_map_first(|piece| {
        let values = to_f32(piece, dtype).expect("checked when it was made");
        values.into_iter().find(|value| value.is_finite() && f16::from_f32(*value).is_infinite())
    })
}

/// Rounded to nearest even where 16 bits are stored.
fn encode(values: &[f32], stored: Stored) -> Vec<u8> {
    match stored {
        Stored::Blocks(block) => blocks::encode(block, values),
        Stored::Plain(Dtype::BF16) => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Stored::Plain(Dtype::F16) => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Stored::Plain(_) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::peft::f32_safetensors;

    #[test]
    fn sixteen_bits_are_rounded_to_the_nearest_and_ties_to_even() {
        let step = 1.0 / 128.0;
        let values = [1.0 + 0.5 * step, 1.0 + 1.5 * step, 1.0 + 0.51 * step];
        let stored = to_f32(&encode(&values, Stored::Plain(Dtype::BF16)), Dtype::BF16).unwrap();
        assert_eq!(stored, [1.0, 1.0 + 2.0 * step, 1.0 + step]);
    }

    #[test]
    fn a_value_that_f16_would_make_infinite_is_refused_by_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let tensors = [("large", &[1usize, 2][..], &[1.0f32, -65_520.0][..]), ("fits", &[1, 1], &[65_519.0])];
        std::fs::write(dir.path().join("model.safetensors"), f32_safetensors(tensors)).unwrap();
        let base = Checkpoint::open(dir.path()).unwrap();
        let stored = |name: &'static str, dtype: Dtype| {
            ExportTensor::stored(&base, name, &base.entries()[name], Some(Stored::Plain(dtype)), None)
        };
        let error = stored("large", Dtype::F16).err().expect("refused");
        assert!(error.code() == "export::dtype" && error.message().contains("large holds -6.552e4"), "{error}");
        assert!(stored("large", Dtype::BF16).is_ok());
        assert_eq!(to_f32(&stored("fits", Dtype::F16).unwrap().data(), Dtype::F16).unwrap(), [65_504.0]);
    }
}
