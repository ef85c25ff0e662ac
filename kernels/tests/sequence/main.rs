//! The kernels that work on token sequences, each against its f64 reference on the same generated shapes.

mod attention;
mod norm;
mod rope;

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Uniform values in -1..1 from a fixed seed (the SplitMix64 generator of Steele, Lea and Flood, 2014).
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..count).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

/// As [`values`], such that `dtype` holds every one exactly.
fn values_in(dtype: DType, seed: u64, count: usize) -> Vec<f32> {
    let values = values(seed, count);
    match dtype {
        DType::F32 => values,
        _ => values.iter().map(|value| (value * 64.0).round() / 64.0).collect(),
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Fails unless `got` is within `tolerance` of `want`, relative to the largest value of `want` (or to 1).
fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs() / largest;
        assert!(error <= tolerance, "{what}: element {i} is {got}, the reference says {want}, error {error:e}");
    }
}

/// Fails unless `gradient` is the derivative of `loss` at `x`, by central differences at a spread of elements.
fn assert_gradient(what: &str, x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    for i in (0..x.len()).step_by(x.len().div_ceil(40)) {
        let mut moved = x.to_vec();
        moved[i] = x[i] + STEP;
        let above = loss(&moved);
        moved[i] = x[i] - STEP;
        let slope = (above - loss(&moved)) / (2.0 * STEP);
        assert!((slope - gradient[i]).abs() <= 1e-7, "{what}: element {i} is {}, slope {slope}", gradient[i]);
    }
}

fn weighted_sum(x: &[f64], weights: &[f64]) -> f64 {
    x.iter().zip(weights).map(|(x, w)| x * w).sum()
}

fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

/// Where the operations are tested: through wgpu in a build that has it, else on the first card in one with CUDA, else on the CPU.
fn device() -> Device {
    #[cfg(feature = "wgpu")]
    return Device::wgpu(Default::default());
    #[cfg(all(feature = "cuda", not(feature = "wgpu")))]
    return Device::cuda(0);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    Device::flex()
}

fn tensor<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device().autodiff())
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_into_vec().unwrap()
}

/// The values of a tensor that must be of this dtype.
fn read_in<const D: usize>(dtype: DType, tensor: Tensor<D>) -> Vec<f32> {
    assert_eq!(tensor.dtype(), dtype);
    read(tensor)
}

/// What operations are tested in on that device.
fn dtypes() -> Vec<DType> {
    let mut dtypes = vec![DType::F32];
    if cfg!(feature = "wgpu") {
        dtypes.push(DType::F16);
    } else if cfg!(feature = "cuda") {
        dtypes.push(DType::BF16);
    }
    dtypes
}

/// How near values of this dtype come to a reference, which they do to `f32` in f32: about one rounding of the largest.
fn tolerance(dtype: DType, f32: f64) -> f64 {
    match dtype {
        DType::F32 => f32,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}
