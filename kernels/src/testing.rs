//! What the tests of the kernels share: a small deterministic generator and a comparison.

use burn::tensor::{DType, Device};

/// Where the operations are tested: through wgpu in a build that has it, else on the first card in one with CUDA, else on the CPU.
pub(crate) fn device() -> Device {
    #[cfg(feature = "wgpu")]
    return Device::wgpu(Default::default());
    #[cfg(all(feature = "cuda", not(feature = "wgpu")))]
    return Device::cuda(0);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    Device::flex()
}

/// What operations are tested in on that device, each with how near its results come to a reference: `f32_tolerance` in f32, in 16 bits
/// about one rounding of the largest.
pub(crate) fn activations(f32_tolerance: f64) -> Vec<(DType, f64)> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    let halves = Some(match cube::OPERANDS.0 {
        DType::F16 => (DType::F16, 1e-3),
        dtype => (dtype, 8e-3),
    });
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    let halves = None;
    [(DType::F32, f32_tolerance)].into_iter().chain(halves).collect()
}

/// `len` values in [-1, 1) from a linear congruential generator started at `seed`.
pub(crate) fn randoms(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    // The first values of neighbouring seeds are alike.
    (0..8 + len).map(|_| next()).skip(8).collect()
}

/// As [`randoms`], values that f16 and bf16 hold exactly, so that a reference multiplies what a kernel does.
pub(crate) fn halves(len: usize, seed: u64) -> Vec<f32> {
    randoms(len, seed).iter().map(|value| (value * 64.0).round() / 64.0).collect()
}

/// Tensors of the device that is tested, for kernels that are launched by themselves.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) mod cube {
    use crate::mma::Unit;
    use crate::resolve::cube::Math;
    use burn::tensor::DType;
    use burn_cubecl::kernel::{cast, into_contiguous};
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::prelude::*;
    use half::{bf16, f16};

    /// What products on matrix instructions take there, and who multiplies.
    #[cfg(feature = "wgpu")]
    pub(crate) const OPERANDS: (DType, Unit) = (DType::F16, Unit::Emulated);
    #[cfg(not(feature = "wgpu"))]
    pub(crate) const OPERANDS: (DType, Unit) = (DType::BF16, Unit::Native);

    /// Products on matrix instructions there.
    pub(crate) const ON_MATRIX_UNITS: Math = Math::Half { operands: OPERANDS.0, unit: OPERANDS.1 };

    fn upload(bytes: &[u8], shape: &[usize], dtype: DType) -> CubeTensor {
        #[cfg(feature = "wgpu")]
        let device = cubecl::Device::wgpu(Default::default()).expect("a device");
        #[cfg(not(feature = "wgpu"))]
        let device = cubecl::Device::cuda(0).expect("a card");
        let client = device.client();
        let handle = client.create_from_slice(bytes);
        CubeTensor::new_contiguous(client, device, shape.to_vec().into(), handle, dtype)
    }

    pub(crate) fn floats(values: &[f32], shape: &[usize]) -> CubeTensor {
        upload(f32::as_bytes(values), shape, DType::F32)
    }

    /// As [`floats`], rounded to `dtype`.
    pub(crate) fn rounded(values: &[f32], shape: &[usize], dtype: DType) -> CubeTensor {
        cast(floats(values, shape), dtype)
    }

    /// Matrices `[.., rows, cols]` of [`OPERANDS`] whose lines begin `distance` elements apart, with NaN between them.
    pub(crate) fn apart(values: &[f32], shape: &[usize], distance: usize) -> CubeTensor {
        let cols = *shape.last().expect("a matrix");
        let (dtype, _) = OPERANDS;
        let half = |value| match dtype {
            DType::F16 => f16::from_f32(value).to_bits(),
            _ => bf16::from_f32(value).to_bits(),
        };
        let mut lines = vec![half(f32::NAN); values.len() / cols * distance];
        for (line, values) in lines.chunks_mut(distance).zip(values.chunks(cols)) {
            line.iter_mut().zip(values).for_each(|(to, value)| *to = half(*value));
        }
        let mut tensor = upload(u16::as_bytes(&lines), shape, dtype);
        let (_, above) = tensor.meta.strides_mut().split_last_mut().expect("a matrix");
        above.iter_mut().for_each(|stride| *stride = *stride / cols * distance);
        tensor
    }

    pub(crate) fn choices(values: &[i32], shape: &[usize]) -> CubeTensor {
        upload(i32::as_bytes(values), shape, DType::I32)
    }

    pub(crate) fn column(values: &[u32]) -> CubeTensor {
        upload(u32::as_bytes(values), &[values.len()], DType::U32)
    }

    /// The elements of a tensor of floats of any dtype.
    pub(crate) fn read(tensor: CubeTensor) -> Vec<f32> {
        let tensor = cast(into_contiguous(tensor), DType::F32);
        f32::from_bytes(&tensor.client.read_one_unchecked(tensor.handle)).to_vec()
    }
}

/// The values in f64, for a reference.
pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value as f64).collect()
}

/// Asserts that `got` is within `tolerance` of `expected`, relative to the largest expected magnitude (at least 1e-3).
#[track_caller]
pub(crate) fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (got as f64 - expected).abs() / scale;
        assert!(error <= tolerance, "element {i}: {got} for {expected}, {error:e} of the largest");
    }
}

/// Asserts that `gradient` is the derivative of `f` at `at`, by central differences in f64.
#[track_caller]
pub(crate) fn check_gradient(at: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    assert_eq!(at.len(), gradient.len());
    let step = 1e-5;
    let mut point = at.to_vec();
    for i in 0..at.len() {
        point[i] = at[i] + step;
        let above = f(&point);
        point[i] = at[i] - step;
        let numeric = (above - f(&point)) / (2.0 * step);
        point[i] = at[i];
        assert!(
            (numeric - gradient[i]).abs() <= 1e-6 * (1.0 + numeric.abs()),
            "element {i}: {} for {numeric}",
            gradient[i]
        );
    }
}

/// Runs `f` on a pool of one thread and of two, and asserts that the results are equal.
#[track_caller]
pub(crate) fn same_on_one_and_two_threads<T: PartialEq + std::fmt::Debug + Send>(f: impl Fn() -> T + Sync) {
    let on = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&f);
    assert!(on(1) == on(2), "the result depends on the number of threads");
}
