//! Weights rounded to few bits: the scales of a module, and its codes.
//!
//! A scale is chosen for each group of columns of a row (for E4M3, of the whole row). Plain rounding lets the group's largest
//! value be the largest code. With the second moments of the module's inputs, the scale is searched that makes the error of
//! the *output* least, E|(Q(w) - w) x|^2, of which the columns of one block are counted together and blocks apart: the
//! products of columns of different blocks average out where inputs are not strongly correlated over a distance.

use crate::model::codes::{E2M1_MAX, E4M3_MAX, E4M3_MIN, e2m1, e4m3, from_e2m1, from_e4m3};
use crate::plugins::Scheme;
use half::bf16;
use rayon::prelude::*;

/// Largest code of a symmetric 4-bit integer.
const INT4_MAX: f32 = 7.0;
/// Columns whose products are counted together where a scale covers a whole row.
const ROW_BLOCK: usize = 16;
/// Most columns of a block.
const GROUP_MAX: usize = 256;
/// Scales that are tried, in parts of the plain one: smaller ones cut the largest values and step finer elsewhere.
const TRIED: [f32; 12] = [0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.70, 1.03, 1.06];

/// Sums of x x^T over a module's inputs x, of each block of columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Columns of a block.
    pub block: usize,
    /// `[width / block, block, block]`.
    pub values: Vec<f32>,
}

impl Moments {
    /// Of no input yet.
    pub fn new(width: usize, block: usize) -> Self {
        Self { block, values: vec![0.0; width * block] }
    }

    /// Adds the inputs `rows` `[n, width]`. What is summed is not divided: a scale is chosen between, not measured.
    pub fn add(&mut self, rows: &[f32], width: usize) {
        let block = self.block;
        self.values.par_chunks_mut(block * block).enumerate().for_each(|(at, sums)| {
            for row in rows.chunks(width) {
                let x = &row[at * block..][..block];
                for (sums, a) in sums.chunks_mut(block).zip(x) {
                    sums.iter_mut().zip(x).for_each(|(sum, b)| *sum += a * b);
                }
            }
        });
    }

    /// Columns of a block for the modules of `scheme`, `width` wide.
    pub fn block_of(scheme: Scheme, width: usize) -> usize {
        match scheme {
            Scheme::Int4(group) => group,
            Scheme::Fp8 | Scheme::Nvfp4 if width.is_multiple_of(ROW_BLOCK) => ROW_BLOCK,
            Scheme::Fp8 | Scheme::Nvfp4 => 1,
        }
    }
}

/// The scales that a search chose, and the squared errors of the outputs over all inputs that were looked at.
#[derive(Debug, Clone, PartialEq)]
pub struct Searched {
    /// Of each group.
    pub scales: Vec<f32>,
    /// With these scales.
    pub error: f64,
    /// With the plain ones.
    pub plain_error: f64,
    /// The squared outputs themselves.
    pub energy: f64,
}

/// The global scale of modules whose largest weight is `largest`: the largest group scale is then the largest E4M3 value.
pub fn global_scale(largest: f32) -> f32 {
    if largest == 0.0 { 1.0 } else { E4M3_MAX * E2M1_MAX / largest }
}

/// How the weights of one module become codes.
#[derive(Debug, Clone, Copy)]
pub struct Rounding {
    /// The layout.
    pub scheme: Scheme,
    /// Columns of the matrix.
    pub width: usize,
    /// The scale of the whole module; used by `nvfp4` alone.
    pub global: f32,
}

impl Rounding {
    fn group(&self) -> usize {
        match self.scheme {
            Scheme::Fp8 => self.width,
            Scheme::Int4(group) => group,
            Scheme::Nvfp4 => 16,
        }
    }

    /// The scale nearest to `scale` that can be stored.
    fn storable(&self, scale: f32) -> f32 {
        match self.scheme {
            Scheme::Nvfp4 => from_e4m3(e4m3(scale * self.global)).max(E4M3_MIN) / self.global,
            // Not zero: a group of zeros has any scale.
            _ => bf16::from_f32(scale).max(bf16::MIN_POSITIVE).to_f32(),
        }
    }

    fn code(&self, value: f32, scale: f32) -> u8 {
        let x = value / scale;
        match self.scheme {
            Scheme::Fp8 => e4m3(x),
            Scheme::Int4(_) => (x.round_ties_even().clamp(-INT4_MAX - 1.0, INT4_MAX) + 8.0) as u8,
            Scheme::Nvfp4 => e2m1(x),
        }
    }

    fn value(&self, code: u8, scale: f32) -> f32 {
        let x = match self.scheme {
            Scheme::Fp8 => from_e4m3(code),
            Scheme::Int4(_) => f32::from(code) - 8.0,
            Scheme::Nvfp4 => from_e2m1(code),
        };
        x * scale
    }

    /// The plain scale of each group of `w` `[rows, width]`.
    pub fn scales(&self, w: &[f32]) -> Vec<f32> {
        w.par_chunks(self.group()).map(|w| self.storable(self.plain(w))).collect()
    }

    /// The scale of each group of `w` that makes the error of the output least.
    pub fn search(&self, w: &[f32], moments: &Moments) -> Searched {
        let (group, block) = (self.group(), moments.block);
        let groups = self.width / group;
        let best = |(at, w): (usize, &[f32])| {
            let moments = &moments.values[at % groups * group * block..][..group * block];
            let plain = self.plain(w);
            let error = |part| {
                let scale = self.storable(plain * part);
                (quadratic_form(moments, block, w.iter().map(|w| self.value(self.code(*w, scale), scale) - w)), scale)
            };
            let first = error(1.0);
            // Of equal ones the first, which is the plain one.
            let best =
                TRIED.into_iter().map(error).fold(first, |best, tried| if tried.0 < best.0 { tried } else { best });
            let energy = quadratic_form(moments, block, w.iter().copied());
            (best.1, [best.0, first.0, energy].map(f64::from))
        };
        let found: Vec<(f32, [f64; 3])> = w.par_chunks(group).enumerate().map(best).collect();
        let [error, plain_error, energy] = [0, 1, 2].map(|which| found.iter().map(|(_, sums)| sums[which]).sum());
        Searched { scales: found.into_iter().map(|(scale, _)| scale).collect(), error, plain_error, energy }
    }

    fn plain(&self, w: &[f32]) -> f32 {
        let largest_code = match self.scheme {
            Scheme::Fp8 => E4M3_MAX,
            Scheme::Int4(_) => INT4_MAX,
            Scheme::Nvfp4 => E2M1_MAX,
        };
        w.iter().fold(0f32, |max, value| max.max(value.abs())) / largest_code
    }

    /// The codes of `w` `[rows, width]`, one a byte.
    fn codes<'a>(&'a self, w: &'a [f32], scales: &'a [f32]) -> impl IndexedParallelIterator<Item = u8> + 'a {
        let group = self.group();
        w.par_iter().enumerate().map(move |(at, value)| self.code(*value, scales[at / group]))
    }

    /// The bytes of the tensor that holds the codes.
    pub fn packed(&self, w: &[f32], scales: &[f32]) -> Vec<u8> {
        let codes: Vec<u8> = self.codes(w, scales).collect();
        match self.scheme {
            Scheme::Fp8 => codes,
            // The low four bits first; so are the nibbles of a little-endian 32-bit word.
            _ => codes.as_chunks().0.iter().map(|[low, high]| low | high << 4).collect(),
        }
    }

    /// The scales of [`Rounding::packed_scales`].
    pub fn unpacked_scales(&self, bytes: &[u8]) -> Vec<f32> {
        match self.scheme {
            Scheme::Nvfp4 => bytes.iter().map(|code| from_e4m3(*code) / self.global).collect(),
            _ => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        }
    }

    /// The bytes of the tensor that holds the scales.
    pub fn packed_scales(&self, scales: &[f32]) -> Vec<u8> {
        match self.scheme {
            Scheme::Nvfp4 => scales.iter().map(|scale| e4m3(scale * self.global)).collect(),
            _ => scales.iter().flat_map(|scale| bf16::from_f32(*scale).to_le_bytes()).collect(),
        }
    }
}

/// d^T M d, where M has the blocks `moments` and is zero elsewhere.
fn quadratic_form(moments: &[f32], block: usize, d: impl Iterator<Item = f32>) -> f32 {
    let mut buffer = [0f32; GROUP_MAX];
    let (mut sum, mut blocks, mut filled) = (0.0, moments.chunks(block * block), 0);
    for value in d {
        buffer[filled] = value;
        filled += 1;
        if filled == block {
            let (d, rows) = (&buffer[..block], blocks.next().expect("a block for each").chunks(block));
            sum +=
                d.iter().zip(rows).map(|(a, row)| a * row.iter().zip(d).map(|(m, b)| m * b).sum::<f32>()).sum::<f32>();
            filled = 0;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 64;

    fn weights(rows: usize) -> Vec<f32> {
        let wave = |i: usize| (i as f32 * 0.37).sin() * 0.02 + (i as f32 * 1.9).cos() * 0.01;
        // An outlier in every row, which plain rounding makes room for.
        (0..rows * WIDTH).map(|i| if i % WIDTH == 5 { 0.2 } else { wave(i) }).collect()
    }

    fn roundings() -> [Rounding; 3] {
        [(Scheme::Fp8, 0.0), (Scheme::Int4(16), 0.0), (Scheme::Nvfp4, global_scale(0.2))]
            .map(|(scheme, global)| Rounding { scheme, width: WIDTH, global })
    }

    /// What the rounded weights are worth.
    fn rounded(rounding: &Rounding, w: &[f32], scales: &[f32]) -> Vec<f32> {
        let scale = |at: usize| scales[at / rounding.group()];
        rounding.codes(w, scales).enumerate().map(|(at, code)| rounding.value(code, scale(at))).collect()
    }

    #[test]
    fn rounded_weights_are_within_half_a_step() {
        let w = weights(4);
        for rounding in roundings() {
            let scales = rounding.scales(&w);
            let steps = match rounding.scheme {
                Scheme::Fp8 => 16.0,
                Scheme::Int4(_) => 0.5,
                Scheme::Nvfp4 => 1.0,
            };
            for (at, (w, q)) in w.iter().zip(rounded(&rounding, &w, &scales)).enumerate() {
                // A stored scale is itself rounded, for E4M3 by a sixteenth.
                let step = scales[at / rounding.group()] * steps * 1.01 + 0.07 * w.abs();
                assert!((w - q).abs() <= step, "{rounding:?}: {w} became {q}");
            }
            assert_eq!(rounding.unpacked_scales(&rounding.packed_scales(&scales)), scales, "{rounding:?}");
        }
    }

    #[test]
    fn a_searched_scale_has_no_larger_output_error_than_the_plain_one() {
        let (w, n) = (weights(8), 200);
        // The outlier's input is small, so that its own error hardly counts.
        let input = |i: usize| (i as f32 * 0.113).sin() * if i % WIDTH == 5 { 0.01 } else { 1.0 };
        let rows: Vec<f32> = (0..n * WIDTH).map(input).collect();
        for rounding in roundings() {
            let mut moments = Moments::new(WIDTH, Moments::block_of(rounding.scheme, WIDTH));
            moments.add(&rows, WIDTH);
            // The sum over inputs, taken input by input instead of through the moments.
            let error = |scales: &[f32]| -> f64 {
                let q = rounded(&rounding, &w, scales);
                let mut sum = 0.0;
                for x in rows.chunks(WIDTH) {
                    for (w, q) in w.chunks(WIDTH).zip(q.chunks(WIDTH)) {
                        let difference: Vec<f64> = (0..WIDTH).map(|i| f64::from((q[i] - w[i]) * x[i])).collect();
                        sum += difference.chunks(moments.block).map(|d| d.iter().sum::<f64>().powi(2)).sum::<f64>();
                    }
                }
                sum
            };
            let searched = rounding.search(&w, &moments);
            for (ours, direct) in
                [(searched.plain_error, error(&rounding.scales(&w))), (searched.error, error(&searched.scales))]
            {
                assert!((ours - direct).abs() <= 1e-3 * direct, "{rounding:?}: {ours} for {direct}");
            }
            assert!(searched.error <= searched.plain_error && searched.plain_error < searched.energy);
            if rounding.scheme != Scheme::Fp8 {
                assert!(searched.error < 0.9 * searched.plain_error, "{rounding:?}: {searched:?}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for rounding in roundings() {
            let w = vec![0.0; 2 * WIDTH];
            let scales = rounding.scales(&w);
            assert!(scales.iter().all(|scale| scale.is_finite() && *scale > 0.0), "{rounding:?}");
            assert!(rounded(&rounding, &w, &scales).iter().all(|value| *value == 0.0));
        }
    }
}
