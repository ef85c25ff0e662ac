//! Vectors of f32 behind one trait, and the choice of instruction set at run time.

use super::tile::{self, Gemm, OnlineSoftmax, Probabilities};
use crate::simd;

/// An instruction set that this CPU has; there is no other way to get one than [`Isa::detect`] and
/// [`Isa::available`], so holding one is the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(pub(super) Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The fastest one that this CPU has and [`simd::Isa::detect`] allows.
    pub fn detect() -> Self {
        Self::of(simd::Isa::detect())
    }

    /// All of them, so that tests can run each.
    pub fn available() -> Vec<Self> {
        simd::Isa::available().into_iter().map(Self::of).collect()
    }

    /// That of a set which was found on this CPU.
    fn of(found: simd::Isa) -> Self {
        Self(match found {
            #[cfg(target_arch = "x86_64")]
            simd::Isa::Avx512 => Kind::Avx512,
            #[cfg(target_arch = "x86_64")]
            simd::Isa::Avx2 => Kind::Avx2,
            _ => Kind::Portable,
        })
    }

    /// Its name, for a record of what ran.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            Kind::Portable => "portable",
        }
    }
}

/// One instruction set: its vector operations, and the tile routines compiled for it.
///
/// # Safety
/// Every function needs a CPU with the instruction set; those that take a pointer need `LANES` values behind it.
pub(super) trait Simd {
    /// `LANES` f32 values.
    type V: Copy;
    /// Values in a vector.
    const LANES: usize;
    /// Vectors side by side in the widest matrix kernel: what the register file holds for 6 rows.
    const WIDTH: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, x: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the instruction set can.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `x` in lanes `first..end`, `fill` in the others.
    unsafe fn keep(x: Self::V, first: usize, end: usize, fill: f32) -> Self::V;
    /// `x`, and 0 where `by < limit`.
    unsafe fn zero_below(x: Self::V, by: Self::V, limit: f32) -> Self::V;
    /// `x` with the low bits of `n` (as an integer) added to its exponent.
    unsafe fn add_exponent(x: Self::V, n: Self::V) -> Self::V;

    unsafe fn gemm(gemm: &Gemm);
    unsafe fn online_softmax(softmax: &mut OnlineSoftmax);
    unsafe fn probabilities(probabilities: &mut Probabilities);
}

/// `2^x`, within 2 units in the last place; 0 below `2^-125`, so that no result is subnormal. `x` is below 127.
///
/// `x` is split into the nearest integer `n` and a rest in `-0.5..=0.5`, where a polynomial of degree 6
/// (interpolation at Chebyshev nodes, error 2e-8) stands for `2^rest`; `n` goes into the exponent bits.
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const COEFFICIENTS: [f32; 6] =
        [0.000_154_614_45, 0.001_340_042_8, 0.009_618_057, 0.055_503_27, 0.240_226_5, std::f32::consts::LN_2];
    // SAFETY: the caller has a CPU with the instruction set; no memory is touched.
    unsafe {
        let shifted = S::add(x, S::splat(ROUND));
        let rest = S::sub(x, S::sub(shifted, S::splat(ROUND)));
        let mut y = S::splat(COEFFICIENTS[0]);
        for &c in &COEFFICIENTS[1..] {
            y = S::mul_add(y, rest, S::splat(c));
        }
        y = S::mul_add(y, rest, S::splat(1.0));
        S::zero_below(S::add_exponent(y, shifted), x, -125.0)
    }
}

/// The three routines of [`Simd`], compiled with a list of CPU features.
macro_rules! routines {
    ($simd:ty $(, $feature:literal)?) => {
        unsafe fn gemm(gemm: &Gemm) {
            $(#[target_feature(enable = $feature)])?
            unsafe fn compiled(gemm: &Gemm) {
                // SAFETY: passed on from the caller.
                unsafe { tile::gemm::<$simd>(gemm) }
            }
            // SAFETY: the caller has a CPU with the instruction set.
            unsafe { compiled(gemm) }
        }

        unsafe fn online_softmax(softmax: &mut OnlineSoftmax) {
            $(#[target_feature(enable = $feature)])?
            unsafe fn compiled(softmax: &mut OnlineSoftmax) {
                // SAFETY: passed on from the caller.
                unsafe { tile::online_softmax::<$simd>(softmax) }
            }
            // SAFETY: the caller has a CPU with the instruction set.
            unsafe { compiled(softmax) }
        }

        unsafe fn probabilities(probabilities: &mut Probabilities) {
            $(#[target_feature(enable = $feature)])?
            unsafe fn compiled(probabilities: &mut Probabilities) {
                // SAFETY: passed on from the caller.
                unsafe { tile::probabilities::<$simd>(probabilities) }
            }
            // SAFETY: the caller has a CPU with the instruction set.
            unsafe { compiled(probabilities) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    // SAFETY, of every block here: a few instructions of the named set, which the caller has, on values or on the
    // `LANES` floats that the caller has behind a pointer.
    #![allow(clippy::undocumented_unsafe_blocks)]

    use std::arch::x86_64::*;

    use super::*;

    pub enum Avx512 {}

    impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;
        const WIDTH: usize = 4;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, x: __m512) {
            unsafe { _mm512_storeu_ps(p, x) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn keep(x: __m512, first: usize, end: usize, fill: f32) -> __m512 {
            let lanes = ((1u32 << end) - 1) & !((1u32 << first) - 1);
            unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(fill), lanes as __mmask16, x) }
        }
        #[inline(always)]
        unsafe fn zero_below(x: __m512, by: __m512, limit: f32) -> __m512 {
            unsafe {
                let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(by, _mm512_set1_ps(limit));
                _mm512_mask_mov_ps(x, below, _mm512_setzero_ps())
            }
        }
        #[inline(always)]
        unsafe fn add_exponent(x: __m512, n: __m512) -> __m512 {
            unsafe {
                let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n))
            }
        }

        routines!(Avx512, "avx512f");
    }

    pub enum Avx2 {}

    impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;
        const WIDTH: usize = 2;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, x: __m256) {
            unsafe { _mm256_storeu_ps(p, x) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn keep(x: __m256, first: usize, end: usize, fill: f32) -> __m256 {
            unsafe {
                let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(end as i32), lane);
                let before_first = _mm256_cmpgt_epi32(_mm256_set1_epi32(first as i32), lane);
                let lanes = _mm256_castsi256_ps(_mm256_andnot_si256(before_first, before_end));
                _mm256_blendv_ps(_mm256_set1_ps(fill), x, lanes)
            }
        }
        #[inline(always)]
        unsafe fn zero_below(x: __m256, by: __m256, limit: f32) -> __m256 {
            unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(by, _mm256_set1_ps(limit)), x) }
        }
        #[inline(always)]
        unsafe fn add_exponent(x: __m256, n: __m256) -> __m256 {
            unsafe {
                let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n))
            }
        }

        routines!(Avx2, "avx2,fma");
    }
}

/// Four lanes in plain Rust, which every target's compiler turns into its baseline vectors.
pub(super) enum Portable {}

impl Simd for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    const WIDTH: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 4] {
        // SAFETY: the caller has four values behind the pointer, at the alignment of f32.
        unsafe { p.cast::<[f32; 4]>().read() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: [f32; 4]) {
        // SAFETY: as for `load`.
        unsafe { p.cast::<[f32; 4]>().write(x) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn mul_add(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        // Not `f32::mul_add`: without the instruction that is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn keep(x: [f32; 4], first: usize, end: usize, fill: f32) -> [f32; 4] {
        std::array::from_fn(|i| if (first..end).contains(&i) { x[i] } else { fill })
    }
    #[inline(always)]
    unsafe fn zero_below(x: [f32; 4], by: [f32; 4], limit: f32) -> [f32; 4] {
        std::array::from_fn(|i| if by[i] < limit { 0.0 } else { x[i] })
    }
    #[inline(always)]
    unsafe fn add_exponent(x: [f32; 4], n: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| f32::from_bits(x[i].to_bits().wrapping_add(n[i].to_bits() << 23)))
    }

    routines!(Portable);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error of `exp2` in units in the last place, at a million points of its range.
    fn largest_error<S: Simd>() -> f64 {
        let mut largest = 0.0f64;
        for step in 0..1_000_000 {
            let x = -124.9 + step as f32 * 1.3e-4;
            let mut lanes = [0.0; 16];
            // SAFETY: the caller checked the instruction set, whose vectors have at most 16 lanes.
            unsafe { S::store(lanes.as_mut_ptr(), exp2::<S>(S::splat(x))) };
            let want = f64::from(x).exp2();
            let unit = want.log2().floor().exp2() * f64::from(f32::EPSILON);
            largest = largest.max((f64::from(lanes[0]) - want).abs() / unit);
        }
        largest
    }

    #[test]
    fn exp2_is_within_two_units_in_the_last_place() {
        for isa in Isa::available() {
            let error = match isa.0 {
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512 => largest_error::<Avx512>(),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx2 => largest_error::<Avx2>(),
                Kind::Portable => largest_error::<Portable>(),
            };
            assert!(error <= 2.0, "{}: {error}", isa.name());
        }
    }

    #[test]
    fn exp2_is_zero_for_hidden_scores_and_keeps_nan() {
        let exp2_of = |x: f32| {
            let mut lanes = [1.0; 4];
            // SAFETY: the portable set has four lanes and runs on every CPU.
            unsafe { Portable::store(lanes.as_mut_ptr(), exp2::<Portable>(Portable::splat(x))) };
            lanes[0]
        };
        assert_eq!(exp2_of(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2_of(-1e30), 0.0);
        assert_eq!(exp2_of(0.0), 1.0);
        assert!(exp2_of(f32::NAN).is_nan());
    }
}
