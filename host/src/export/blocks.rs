//! Weights as blocks of ggml: the scales of each block, and its codes. Scales are those that leave the least squared error among
//! a few ranges that are tried; the codes are rounded by the scales as they are stored.

use crate::model::ggml::{Block, pack_sixes};
use half::f16;
use rayon::prelude::*;

/// Largest six-bit scale or offset of a sub-block.
const SIX_BITS: f32 = 63.0;
/// Steps by which the largest code is moved to find a range that fits better than the widest.
const TRIED: [f32; 7] = [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5];

/// `values`, whole rows of blocks, as blocks.
pub fn encode(block: Block, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; values.len() / block.values() * block.bytes()];
    out.par_chunks_mut(block.bytes()).zip(values.par_chunks(block.values())).for_each(|(out, x)| match block {
        Block::Q8_0 => {
            let largest = x.iter().fold(0f32, |max, x| max.max(x.abs()));
            let scale = store(&mut out[0..2], largest / 127.0);
            x.iter().zip(&mut out[2..]).for_each(|(x, out)| *out = code(*x, scale, 0.0, -127.0, 127.0) as i8 as u8);
        }
        Block::Q5_0 => {
            let scale = store(&mut out[0..2], symmetric(x, 16.0));
            five_bits(&mut out[2..], x.iter().map(|x| (code(*x, scale, 0.0, -16.0, 15.0) + 16.0) as u8));
        }
        Block::Q5_1 => {
            let (scale, offset) = affine(x, 31.0);
            let (scale, offset) = (store(&mut out[0..2], scale), store(&mut out[2..4], -offset));
            five_bits(&mut out[4..], x.iter().map(|x| code(*x, scale, offset, 0.0, 31.0) as u8));
        }
        Block::Q4K => affine_super_block(x, 15.0, out),
        Block::Q5K => affine_super_block(x, 31.0, out),
        Block::Q6K => symmetric_super_block(x, out),
    });
    out
}

/// Stores `value` as f16; what is stored.
fn store(out: &mut [u8], value: f32) -> f32 {
    let value = f16::from_f32(value);
    out.copy_from_slice(&value.to_le_bytes());
    value.to_f32()
}

/// The code whose `scale * code + offset` is nearest to `x`.
fn code(x: f32, scale: f32, offset: f32, least: f32, most: f32) -> f32 {
    if scale == 0.0 { 0f32.clamp(least, most) } else { ((x - offset) / scale).round_ties_even().clamp(least, most) }
}

fn five_bits(out: &mut [u8], codes: impl Iterator<Item = u8>) {
    for (at, code) in codes.enumerate() {
        out[at / 8] |= code >> 4 << (at % 8);
        out[4 + at % 16] |= (code & 15) << (at / 16 * 4);
    }
}

/// The scale with which codes from -n to n - 1 stand for `x` best. The value of largest magnitude has the code -n, or nearly.
fn symmetric(x: &[f32], n: f32) -> f32 {
    let extreme = x.iter().fold(0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    let tried = TRIED.map(|moved| {
        let scale = extreme / -(n + moved);
        let (mut xq, mut qq) = (0.0, 0.0);
        for x in x {
            let q = code(*x, scale, 0.0, -n, n - 1.0);
            xq += x * q;
            qq += q * q;
        }
        let scale = if qq > 0.0 { xq / qq } else { 0.0 };
        // What the squared error is below that of zeros.
        (scale * xq, scale)
    });
    tried.into_iter().fold((0.0, 0.0), |best, tried| if tried.0 > best.0 { tried } else { best }).1
}

/// The scale and offset, both not negative, with which `scale * code - offset` stands for `x` best, for codes from 0 to `n`.
fn affine(x: &[f32], n: f32) -> (f32, f32) {
    let (least, most) = x.iter().fold((0f32, f32::MIN), |(least, most), x| (least.min(*x), most.max(*x)));
    if most <= least {
        return (0.0, -least);
    }
    let count = x.len() as f32;
    let x_sum: f32 = x.iter().sum();
    let tried = TRIED.map(|moved| {
        let scale = (most - least) / (n + moved);
        let (mut q_sum, mut xq, mut qq) = (0.0, 0.0, 0.0);
        for x in x {
            let q = code(*x, scale, least, 0.0, n);
            q_sum += q;
            xq += x * q;
            qq += q * q;
        }
        // Least squares for the codes; where the offset would have the other sign, there is none.
        let determinant = count * qq - q_sum * q_sum;
        let (mut scale, mut offset) = (scale, least);
        if determinant > 0.0 {
            (scale, offset) = ((count * xq - q_sum * x_sum) / determinant, (qq * x_sum - q_sum * xq) / determinant);
        }
        if offset > 0.0 {
            (scale, offset) = (xq / qq, 0.0);
        }
        let error = |x: &f32| (scale * code(*x, scale, offset, 0.0, n) + offset - x).powi(2);
        (x.iter().map(error).sum::<f32>(), scale, offset)
    });
    let best = tried.into_iter().reduce(|best, tried| if tried.0 < best.0 { tried } else { best });
    let (_, scale, offset) = best.expect("several are tried");
    (scale, -offset)
}

fn affine_super_block(x: &[f32], n: f32, out: &mut [u8]) {
    let fits: Vec<(f32, f32)> = x.chunks(32).map(|x| affine(x, n)).collect();
    let largest = fits.iter().fold((0f32, 0f32), |max, fit| (max.0.max(fit.0), max.1.max(fit.1)));
    let (scale, offset) = (store(&mut out[0..2], largest.0 / SIX_BITS), store(&mut out[2..4], largest.1 / SIX_BITS));
    let six_bits =
        |(s, o): (f32, f32)| [(s, scale), (o, offset)].map(|(x, unit)| code(x, unit, 0.0, 0.0, SIX_BITS) as u8);
    let sixes: [(u8, u8); 8] = std::array::from_fn(|sub| six_bits(fits[sub]).into());
    out[4..16].copy_from_slice(&pack_sixes(sixes));
    let (high, low) = out[16..].split_at_mut(if n > 15.0 { 32 } else { 0 });
    for (sub, (x, (s, o))) in x.chunks(32).zip(sixes).enumerate() {
        let (scale, offset) = (scale * f32::from(s), -offset * f32::from(o));
        for (at, x) in x.iter().enumerate() {
            let code = code(*x, scale, offset, 0.0, n) as u8;
            low[sub / 2 * 32 + at] |= (code & 15) << (sub % 2 * 4);
            if let Some(high) = high.get_mut(at) {
                *high |= code >> 4 << sub;
            }
        }
    }
}

fn symmetric_super_block(x: &[f32], out: &mut [u8]) {
    let fits: Vec<f32> = x.chunks(16).map(|x| symmetric(x, 32.0)).collect();
    let largest = fits.iter().fold(0f32, |max, fit| max.max(fit.abs()));
    let unit = store(&mut out[208..210], largest / 127.0);
    for (sub, (x, fit)) in x.chunks(16).zip(fits).enumerate() {
        let s = code(fit, unit, 0.0, -127.0, 127.0);
        out[192 + sub] = s as i8 as u8;
        for (at, x) in (sub * 16..).zip(x) {
            let code = (code(*x, unit * s, 0.0, -32.0, 31.0) + 32.0) as u8;
            out[at / 128 * 64 + at % 64] |= (code & 15) << (at % 128 / 64 * 4);
            out[128 + at / 128 * 32 + at % 32] |= code >> 4 << (at % 128 / 32 * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of several blocks whose scales differ, with an outlier, zeros, and values of one sign.
    fn weights() -> Vec<f32> {
        let wave = |i: usize| ((i as f32 * 0.37).sin() + (i as f32 * 1.9).cos()) * 0.02 * (1 + i / 256) as f32;
        let mut w: Vec<f32> = (0..1024).map(wave).collect();
        w[5] = 0.9;
        w[256..320].fill(0.0);
        w[320..352].iter_mut().for_each(|w| *w = w.abs() + 0.1);
        w
    }

    #[test]
    fn blocks_stand_for_what_was_encoded() {
        let w = weights();
        let energy: f32 = w.iter().map(|w| w * w).sum();
        for (block, error_max) in Block::ALL.into_iter().zip([1e-4, 4e-3, 2e-3, 7e-3, 2e-3, 5e-4]) {
            let bytes = encode(block, &w);
            assert_eq!(bytes.len(), w.len() / block.values() * block.bytes());
            let read = block.decode(&bytes);
            let error: f32 = w.iter().zip(&read).map(|(w, r)| (w - r).powi(2)).sum::<f32>() / energy;
            assert!(error < error_max, "{block:?}: {error}");
            assert!(read[256..320].iter().all(|r| *r == 0.0), "{block:?}");
        }
    }

    #[test]
    fn scales_fit_better_than_the_widest_range() {
        let (mut fitted, mut widest) = (0.0, 0.0);
        for x in weights().chunks(32) {
            let error = |scale: f32, offset: f32| -> f32 {
                x.iter().map(|x| (scale * code(*x, scale, offset, 0.0, 15.0) + offset - x).powi(2)).sum()
            };
            let (least, most) = x.iter().fold((0f32, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
            let (scale, offset) = affine(x, 15.0);
            let errors = (error(scale, -offset), error((most - least) / 15.0, least));
            assert!(errors.0 <= 1.001 * errors.1, "{errors:?}");
            fitted += errors.0;
            widest += errors.1;
        }
        assert!(fitted < 0.9 * widest, "{fitted} {widest}");
    }
}
