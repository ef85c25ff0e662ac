//! Which vector instructions the CPU has, and the elementary functions written so that the compiler vectorises them.
//!
//! A loop wrapped in `vectorised!` is compiled once per instruction set and picked at run time. Multiply-adds are fused
//! in all of them (in software where the CPU has none), so every instruction set gives the same bits; only
//! [`crate::matmul`] and [`crate::attention`] differ between them.

use std::sync::OnceLock;

/// An instruction set that the kernels have a path for, the narrowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What the build target guarantees.
    Portable,
    /// AVX2 and FMA: 8 lanes of f32.
    Avx2,
    /// AVX-512 F, BW, DQ and VL besides AVX2 and FMA: 16 lanes of f32.
    Avx512,
}

impl Isa {
    /// The best instruction set of this CPU, up to the one that the environment variable `TUNEHOST_ISA` names: `portable`,
    /// `avx2`, or `avx512` for one without BF16. So the tests run the paths that this CPU would not take.
    pub fn detect() -> Self {
        let found = Self::found();
        limit().map_or(found, |limit| found.min(limit))
    }

    fn found() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Isa::Avx512;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// Every instruction set this CPU can run, the portable one first.
    pub fn available() -> Vec<Self> {
        match Self::detect() {
            Isa::Portable => vec![Isa::Portable],
            Isa::Avx2 => vec![Isa::Portable, Isa::Avx2],
            Isa::Avx512 => vec![Isa::Portable, Isa::Avx2, Isa::Avx512],
        }
    }

    /// Whether products of bf16 are to be computed by the CPU's own instruction for them (AVX-512 BF16).
    pub fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Isa::Avx512 && limit().is_none() && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The name written into a run's provenance.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2+fma",
            Isa::Avx512 => "avx512",
        }
    }
}

/// What `TUNEHOST_ISA` names, where it is set.
///
/// # Errors
/// Its value, where that names none: it may be `portable`, `avx2` or `avx512`.
pub fn asked() -> Result<Option<Isa>, String> {
    match std::env::var("TUNEHOST_ISA").as_deref() {
        Err(_) => Ok(None),
        Ok("portable") => Ok(Some(Isa::Portable)),
        Ok("avx2") => Ok(Some(Isa::Avx2)),
        Ok("avx512") => Ok(Some(Isa::Avx512)),
        Ok(other) => Err(other.into()),
    }
}

/// What `TUNEHOST_ISA` names, read once. A program that uses this asks [`asked`] first.
fn limit() -> Option<Isa> {
    static LIMIT: OnceLock<Option<Isa>> = OnceLock::new();
    *LIMIT.get_or_init(|| asked().unwrap_or_else(|other| panic!("TUNEHOST_ISA is {other:?}")))
}

/// Defines a function that is compiled for each [`Isa`] and takes the one to run as its first argument.
macro_rules! vectorised {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::simd::Isa, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }

            match isa {
                // SAFETY: `Isa::detect` found these features on this CPU; the function is otherwise safe code.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use vectorised;

/// e^x - 1 = `scale * fraction + (scale - 1)`, without cancellation near 0.
///
/// x is split as n ln 2 + r with |r| <= ln(2)/2; `fraction` is e^r - 1 by its Taylor series to r^7 (error below 6e-9)
/// and `scale` is 2^n. Outside [-86, 88] the argument is clamped; NaN stays NaN.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, f32) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has trailing zeros, so n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -86.0 { -86.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut series: f32 = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0] {
        series = series.mul_add(r, coefficient);
    }
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    (series * r, scale)
}

/// e^x, clamped to e^-86 below and e^88 above.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let (fraction, scale) = exp_parts(x);
    scale.mul_add(fraction, scale)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// tanh x, accurate relative to its value also near 0.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let (fraction, scale) = exp_parts(2.0 * x.abs());
    let m = scale.mul_add(fraction, scale - 1.0);
    (m / (m + 2.0)).copysign(x)
}

/// Number of partial sums in [`dot`]: one AVX-512 register.
const LANES: usize = 16;

/// Sum of the products of two equally long slices, in an order that depends on their length alone.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = a[lane].mul_add(b[lane], lanes[lane]);
        }
    }
    lanes.iter().sum::<f32>() + tail
}

vectorised! {
    /// out += factor * values.
    pub(crate) fn add_scaled(out: &mut [f32], factor: f32, values: &[f32]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = factor.mul_add(*value, *out);
        }
    }
}

vectorised! {
    /// values *= factor.
    pub(crate) fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> impl Iterator<Item = f32> {
        (-20_000..=20_000).map(|i| i as f32 * 1e-3)
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for x in grid().chain((-86..=88).map(|i| i as f32)) {
            let exact = (x as f64).exp();
            assert!(((exp(x) as f64 - exact) / exact).abs() < 2.4e-7, "exp({x})");
        }
    }

    #[test]
    fn tanh_and_sigmoid_are_accurate_relative_to_their_value() {
        for x in grid().chain([1e-6, -1e-6, 1e-20, 200.0, -200.0]) {
            let exact = (x as f64).tanh();
            assert!((tanh(x) as f64 - exact).abs() <= 3e-7 * exact.abs(), "tanh({x})");
            let exact = 1.0 / (1.0 + (-x as f64).exp());
            assert!((sigmoid(x) as f64 - exact).abs() <= 3e-7 * exact.max(1e-30), "sigmoid({x})");
        }
        assert_eq!(tanh(0.0), 0.0);
    }

    #[test]
    fn nan_is_not_lost() {
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
    }

    vectorised! {
        fn tanh_all(values: &mut [f32]) {
            for value in values {
                *value = tanh(*value);
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut plain: Vec<f32> = grid().collect();
        tanh_all(Isa::Portable, &mut plain);
        for isa in Isa::available() {
            let mut values: Vec<f32> = grid().collect();
            tanh_all(isa, &mut values);
            assert_eq!(values, plain, "{isa:?}");
        }
    }
}
