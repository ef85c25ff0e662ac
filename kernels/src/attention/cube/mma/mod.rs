//! Attention on matrix instructions: q, k, v, the gradient of the result and the softmax's weights in 16 bits, everything else f32.
//!
//! Operands are copied to shared memory while something else is multiplied. Tensors of the operands' dtype are read as they lie; in f32
//! they are rounded once, into buffers of their own: in a window of 1,024 every key is read by 34 cubes of queries.
//!
//! One cube fills a multiprocessor of the production's card. The sums of two gradients take half of its registers, a cube's own rows and the
//! stages up to 94 of its 100 KiB of shared memory. Two cubes there would have half the rows each: as many lanes as now, and twice the
//! bytes copied for the same products, which are 64 operations a byte (32 in the backward pass of 512 values), where already 64 ask
//! 7.9 TB/s of the device's cache at its rate of multiplication.

mod backward;
mod forward;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

use super::super::backend::Output;
use super::tile::Head;
use super::{Attention, Inputs};
use crate::mma::{COPIED, Two, Unit, copy, multiply_add};
use backward::{Backward, mma_backward};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use forward::{Forward, mma_forward};

/// Values of a head that pass through shared memory at a time.
const CHUNK: usize = 64;

/// Writes the result and the log-sum-exp. Inputs of another dtype than `operands` are rounded to it.
pub(super) fn forward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    output: Output<CubeBackend>,
    attention: &Attention,
    (operands, unit): (DType, Unit),
) {
    let plan = Forward::new(q.shape()[2], unit);
    let dtypes = [operands, output.out.dtype].map(dtype_to_storage_type);
    let [q, k, v] = [q, k, v].map(|tensor| rounded(tensor, operands));
    let inputs = Inputs::new(q, k, v, attention, plan.queries);
    let cubes = inputs.cubes(inputs.heads);
    let Inputs { q, k, v, tiles, heads, kv_heads, window, scale, .. } = inputs;
    // SAFETY: the kernel reads and writes the rows of its tiles, which lie inside the tensors, and the heads of the grid.
    unsafe {
        mma_forward::launch_unchecked(
            &q.client.clone(),
            cubes,
            CubeDim::new_1d(plan.units() as u32),
            q.into_buffer_arg(),
            k.into_buffer_arg(),
            v.into_buffer_arg(),
            tiles.into_buffer_arg(),
            output.out.into_buffer_arg(),
            output.lse.into_buffer_arg(),
            heads,
            kv_heads,
            window,
            scale,
            plan,
            dtypes,
        );
    }
}

/// Writes the gradients of `inputs`, q, k and v, from that of the result, the last of them; those of another dtype than `operands` are
/// rounded to it. `saved` are the log-sum-exp and the dot of every head's result and its gradient, f32 `[tokens, query heads]`.
pub(super) fn backward(
    inputs: [CubeTensor; 4],
    [lse, delta]: [CubeTensor; 2],
    [dq, dk, dv]: [CubeTensor; 3],
    attention: &Attention,
    (operands, unit): (DType, Unit),
) {
    let dtypes = [operands, dq.dtype].map(dtype_to_storage_type);
    let [q, k, v, dout] = inputs.map(|tensor| rounded(tensor, operands));
    for plan in Backward::both(q.shape()[2], unit) {
        // Queries have one gradient: what stands for the second is not written.
        let buffers = if plan.keys { [&k, &v, &q, &dout, &dk, &dv] } else { [&q, &dout, &k, &v, &dq, &dq] };
        let [own, d_own, other, d_other, first, second] = buffers.map(|tensor| tensor.clone().into_buffer_arg());
        let inputs = Inputs::new(q.clone(), k.clone(), v.clone(), attention, plan.rows);
        // SAFETY: as above.
        unsafe {
            mma_backward::launch_unchecked(
                &q.client,
                inputs.cubes(if plan.keys { inputs.kv_heads } else { inputs.heads }),
                CubeDim::new_1d(plan.units() as u32),
                own,
                d_own,
                other,
                d_other,
                lse.clone().into_buffer_arg(),
                delta.clone().into_buffer_arg(),
                inputs.tiles.into_buffer_arg(),
                first,
                second,
                inputs.heads,
                inputs.kv_heads,
                inputs.window,
                inputs.scale,
                plan,
                dtypes,
            );
        }
    }
}

/// `tensor` as an operand: itself where it is of that dtype.
fn rounded(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    into_contiguous(cast(tensor, dtype))
}

/// Begins to copy `lines` rows of `at`, `len` values of each from `d0` on, to lines of `tile` that are eight elements further
/// apart than they are long; zeros beyond the rows and beyond the head. Each unit copies as many pieces of a line.
#[cube]
fn copy_rows<E: Float>(
    x: &[E],
    at: &Head,
    d0: usize,
    tile: &mut Shared<[E]>,
    base: usize,
    #[comptime] lines: usize,
    #[comptime] len: usize,
    #[comptime] dim: usize,
    #[comptime] units: usize,
    #[comptime] unit: Unit,
) {
    let pieces = comptime!(len / COPIED);
    let aligned = comptime!(dim.is_multiple_of(COPIED));
    for l in 0..comptime!(lines * pieces / units) {
        let i = UNIT_POS as usize + l * units;
        let (line, col) = (i / pieces, i % pieces * COPIED);
        let start = ((at.start + line) * at.heads + at.head) * dim + d0 + col;
        let mut count = select(at.start + line < at.end, 8usize, 0usize);
        if comptime!(!dim.is_multiple_of(len)) {
            count = usize::min(count, dim - usize::min(dim, d0 + col));
        }
        let place = base + line * comptime!(len + COPIED) + col;
        copy::<E>(x, select(count > 0, start, 0usize), count, tile, place, aligned, unit);
    }
}

/// The sums of `count` fragments, two registers of each, zero.
#[cube]
fn no_sums(#[comptime] count: usize) -> Array<Vector<f32, Two>> {
    let mut sums = Array::<Vector<f32, Two>>::new(comptime!(2 * count));
    #[unroll]
    for i in 0..comptime!(2 * count) {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Adds to the sums of two neighbouring fragments, the first of this number, the product of `left` with both of `right`. Natively the
/// number must be known when the kernel is compiled, or the sums have no registers.
#[cube]
fn multiply_add_pair<E: Float>(
    left: &Array<Vector<E, Two>>,
    right: &Array<Vector<E, Two>>,
    sums: &mut Array<Vector<f32, Two>>,
    first: usize,
    scratch: &mut Shared<[E]>,
    #[comptime] unit: Unit,
) {
    #[unroll]
    for half in 0..2usize {
        let at = (first + half) * 2;
        let mut fragment = Array::<Vector<f32, Two>>::new(2usize);
        fragment[0] = sums[at];
        fragment[1] = sums[at + 1];
        multiply_add::<E>(left, right, &mut fragment, scratch, half, unit);
        sums[at] = fragment[0];
        sums[at + 1] = fragment[1];
    }
}
