//! Between burn's tensors on a cubecl device and kernels.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of every cube. Kernels below index them as one line.
pub(crate) const UNITS: usize = 256;

/// The most cubes along one axis that every runtime takes.
const MAX_CUBES: usize = 65_535;

/// `tensor` as a buffer of exactly its f32 elements in row-major order.
///
/// # Panics
/// On another dtype, naming the kernel.
pub(crate) fn packed(kernel: &str, tensor: CubeTensor) -> CubeTensor {
    assert_eq!(tensor.dtype, DType::F32, "{kernel}: the cubecl kernel takes f32, not {:?}", tensor.dtype);
    into_contiguous(tensor)
}

/// `tensor`, of any dtype that operations pass to each other, as a buffer of exactly its elements in row-major order.
///
/// # Panics
/// On a dtype that is not f32, f16 or bf16, naming the kernel.
pub(crate) fn activations(kernel: &str, tensor: CubeTensor) -> CubeTensor {
    require_float(kernel, tensor.dtype);
    into_contiguous(tensor)
}

/// [`activations`] of one dtype.
///
/// # Panics
/// As that, and on another dtype than the first one's.
pub(crate) fn alike<const N: usize>(kernel: &str, tensors: [CubeTensor; N]) -> [CubeTensor; N] {
    let dtype = tensors[0].dtype;
    tensors.map(|tensor| {
        assert_eq!(tensor.dtype, dtype, "{kernel}: the cubecl kernel takes tensors of one dtype");
        activations(kernel, tensor)
    })
}

/// # Panics
/// On a dtype that is not f32, f16 or bf16, naming the kernel.
pub(crate) fn require_float(kernel: &str, dtype: DType) {
    let taken = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    assert!(taken, "{kernel}: the cubecl kernel takes f32, f16 or bf16, not {dtype:?}");
}

/// A tensor on the device of `like`, not initialised.
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// A column of u32 on the device of `like`. An empty one has one element that nobody reads.
pub(crate) fn upload(like: &CubeTensor, values: &[u32]) -> CubeTensor {
    let values = if values.is_empty() { &[0] } else { values };
    let handle = like.client.create_from_slice(u32::as_bytes(values));
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), [values.len()].into(), handle, DType::U32)
}

/// At least `cubes` cubes; kernels ask whether theirs is wanted.
pub(crate) fn line(cubes: usize) -> CubeCount {
    let x = cubes.clamp(1, MAX_CUBES);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}

/// Cubes whose units cover `elements`.
pub(crate) fn cover(elements: usize) -> CubeCount {
    line(elements.div_ceil(UNITS))
}

/// The shape of every cube.
pub(crate) fn units() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
}

/// The sum of every unit's `value`, in an order that depends on nothing.
#[cube]
pub(crate) fn sum_units(value: f32, partial: &mut Shared<[f32]>) -> f32 {
    fold_units(value, partial, false)
}

/// The largest of every unit's `value`.
#[cube]
pub(crate) fn max_units(value: f32, partial: &mut Shared<[f32]>) -> f32 {
    fold_units(value, partial, true)
}

/// A tree over shared memory.
#[cube]
fn fold_units(value: f32, partial: &mut Shared<[f32]>, #[comptime] largest: bool) -> f32 {
    let unit = UNIT_POS as usize;
    partial[unit] = value;
    sync_cube();
    #[unroll]
    for level in 0..8usize {
        let half = comptime!(128usize >> level);
        if unit < half {
            let (left, right) = (partial[unit], partial[unit + half]);
            partial[unit] = if comptime!(largest) { f32::max(left, right) } else { left + right };
        }
        sync_cube();
    }
    let folded = partial[0];
    sync_cube();
    folded
}
