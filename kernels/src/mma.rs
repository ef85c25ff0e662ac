//! Matrix instructions: `mma.m16n8k16` with f32 sums, the loads of its fragments and the copy from global to shared memory.
//!
//! One seam for two ways to do it. [`Unit::Native`] is what NVIDIA devices of compute capability 8.0 and later have:
//! `mma`, `ldmatrix` and `cp.async`. [`Unit::Emulated`] keeps every fragment in the registers of the lanes that PTX gives it
//! to (PTX ISA, "Matrix fragments for mma.m16n8k16"), and multiplies through shared memory: a kernel runs with the same
//! tiles, masks and fragments on devices without the instructions, slowly. All units of a cube must come to each call.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

/// Lanes that share a fragment.
pub(crate) const LANES: usize = 32;
/// Elements of one copy from global to shared memory: 16 bytes.
pub(crate) const COPIED: usize = 8;
/// Elements that the emulation needs of shared memory for each group of lanes: operands of a product of either half.
pub(crate) const SCRATCH: usize = 2 * HALF_SCRATCH;
/// A left fragment and a right one.
const HALF_SCRATCH: usize = 16 * 16 + 16 * 8;

/// Two neighbouring elements, what a register of a fragment holds.
pub(crate) type Two = Const<2>;

/// Who multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    /// The device's matrix instructions.
    Native,
    /// Its ordinary ones, through shared memory.
    Emulated,
}

/// `count`, as a number that no compiler knows, so that the code of a loop over it stands there once. What the emulation takes of a device's
/// compiler grows faster than its code: unrolled, heads of 256 values took minutes.
#[cube]
fn rolled(#[comptime] count: usize) -> usize {
    usize::min(CUBE_COUNT_X as usize, 1usize) * count
}

#[cube]
fn lane() -> usize {
    UNIT_POS as usize % LANES
}

/// Rows `row0..` and depths `k0..` of a 16 x 16 left fragment. The tile holds lines of rows, or of depths if `transposed`,
/// `pitch` elements apart.
#[cube]
pub(crate) fn load_left<E: Float>(
    tile: &Shared<[E]>,
    base: usize,
    row0: usize,
    k0: usize,
    #[comptime] pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] unit: Unit,
) -> Array<Vector<E, Two>> {
    let mut fragment = Array::<Vector<E, Two>>::new(4usize);
    if comptime!(unit == Unit::Native) {
        // Each lane names a line of one of the four 8 x 8 matrices, in the order of the fragment's registers.
        let along = lane() % 16;
        let across = lane() / 16 * 8;
        let start = if comptime!(transposed) {
            base + (k0 + across + lane() % 8) * pitch + row0 + along / 8 * 8
        } else {
            base + (row0 + along) * pitch + k0 + across
        };
        load_matrices::<E>(tile, start, &mut fragment, MatrixIdent::A, transposed);
    } else {
        let (group, pair) = (lane() / 4, lane() % 4 * 2);
        #[unroll]
        for i in 0..4usize {
            let row = row0 + group + comptime!(i % 2 * 8);
            let depth = k0 + pair + comptime!(i / 2 * 8);
            let mut two = Vector::<E, Two>::empty();
            #[unroll]
            for e in 0..2usize {
                let place = if comptime!(transposed) { (depth + e) * pitch + row } else { row * pitch + depth + e };
                two.insert(e, tile[base + place]);
            }
            fragment[i] = two;
        }
    }
    fragment
}

/// Columns `col0..` and depths `k0..` of two 16 x 8 right fragments side by side, the first in registers 0 and 1. The tile
/// holds lines of columns if `transposed`, else of depths.
#[cube]
pub(crate) fn load_right<E: Float>(
    tile: &Shared<[E]>,
    base: usize,
    col0: usize,
    k0: usize,
    #[comptime] pitch: usize,
    #[comptime] transposed: bool,
    #[comptime] unit: Unit,
) -> Array<Vector<E, Two>> {
    let mut fragment = Array::<Vector<E, Two>>::new(4usize);
    if comptime!(unit == Unit::Native) {
        let line = lane() % 8;
        let depth = k0 + lane() / 8 % 2 * 8;
        let col = col0 + lane() / 16 * 8;
        let start = if comptime!(transposed) {
            base + (col + line) * pitch + depth
        } else {
            base + (depth + line) * pitch + col
        };
        load_matrices::<E>(tile, start, &mut fragment, MatrixIdent::B, !transposed);
    } else {
        let (group, pair) = (lane() / 4, lane() % 4 * 2);
        #[unroll]
        for i in 0..4usize {
            let col = col0 + group + comptime!(i / 2 * 8);
            let depth = k0 + pair + comptime!(i % 2 * 8);
            let mut two = Vector::<E, Two>::empty();
            #[unroll]
            for e in 0..2usize {
                let place = if comptime!(transposed) { col * pitch + depth + e } else { (depth + e) * pitch + col };
                two.insert(e, tile[base + place]);
            }
            fragment[i] = two;
        }
    }
    fragment
}

/// `ldmatrix` of four 8 x 8 matrices; this lane names the line at `start`.
#[cube]
fn load_matrices<E: Float>(
    tile: &Shared<[E]>,
    start: usize,
    fragment: &mut Array<Vector<E, Two>>,
    #[comptime] ident: MatrixIdent,
    #[comptime] turned: bool,
) {
    let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    definition.load_matrix_inplace::<E, Two>(&tile[start..start + COPIED], fragment, ident, 4usize, turned);
}

/// Adds to `sums [16, 8]` the product of `left` with columns `half * 8..` of the pair in `right`. Halves are multiplied in turn, 0 and 1
/// and 0 again: where one is emulated, the operands of the other may still be read.
#[cube]
pub(crate) fn multiply_add<E: Float>(
    left: &Array<Vector<E, Two>>,
    right: &Array<Vector<E, Two>>,
    sums: &mut Array<Vector<f32, Two>>,
    scratch: &mut Shared<[E]>,
    #[comptime] half: usize,
    #[comptime] unit: Unit,
) {
    let mut one = Array::<Vector<E, Two>>::new(2usize);
    one[0] = right[half * 2];
    one[1] = right[half * 2 + 1];
    if comptime!(unit == Unit::Native) {
        let definition = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
        definition.execute_inplace::<Two, Two, Two>(left, &one, sums);
    } else {
        let (group, pair) = (lane() / 4, lane() % 4 * 2);
        let a = UNIT_POS as usize / LANES * SCRATCH + comptime!(half * HALF_SCRATCH);
        let b = a + 256;
        #[unroll]
        for e in 0..2usize {
            #[unroll]
            for i in 0..4usize {
                let (row, depth) = (group + comptime!(i % 2 * 8), pair + comptime!(i / 2 * 8 + e));
                scratch[a + row * 16 + depth] = left[i].extract(e);
            }
            #[unroll]
            for i in 0..2usize {
                scratch[b + (pair + comptime!(i * 8 + e)) * 8 + group] = one[i].extract(e);
            }
        }
        sync_cube();
        let (mut low, mut high) = (sums[0], sums[1]);
        // A loop of the compiler's own would be unrolled, in every place that multiplies; one of 16 rounds would meet lavapipe's end of all
        // loops of a kernel, 65,535 rounds together, before the heads of the production are through.
        for quarter in 0..rolled(4usize) {
            #[unroll]
            for d in 0..4usize {
                let depth = quarter * 4 + d;
                let place = b + depth * 8 + pair;
                let mut line = Vector::<f32, Two>::empty();
                line.insert(0usize, f32::cast_from(scratch[place]));
                line.insert(1usize, f32::cast_from(scratch[place + 1]));
                low += Vector::new(f32::cast_from(scratch[a + group * 16 + depth])) * line;
                high += Vector::new(f32::cast_from(scratch[a + (group + 8) * 16 + depth])) * line;
            }
        }
        sums[0] = low;
        sums[1] = high;
    }
}

/// The sums of a fragment, zero.
#[cube]
pub(crate) fn no_sums() -> Array<Vector<f32, Two>> {
    let mut sums = Array::<Vector<f32, Two>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Row and first column, in its 16 x 8 sums, of register `i` of this lane.
#[cube]
pub(crate) fn place_of_sums(#[comptime] i: usize) -> (usize, usize) {
    (lane() / 4 + comptime!(i * 8), lane() % 4 * 2)
}

/// Begins to copy the first `count` of eight elements from `x[start..]` to `tile[place..]`, and zeros after them. If `aligned`, `start` and
/// `place` are multiples of 8, and the native copy is asynchronous.
#[cube]
pub(crate) fn copy<E: Float>(
    x: &[E],
    start: usize,
    count: usize,
    tile: &mut Shared<[E]>,
    place: usize,
    #[comptime] aligned: bool,
    #[comptime] unit: Unit,
) {
    if comptime!(unit == Unit::Emulated) {
        for i in 0..rolled(COPIED) {
            copy_one::<E>(x, start, count, tile, place, i);
        }
    } else if comptime!(aligned) {
        copy_async_checked(&x[start..start + count], &mut tile[place..place + COPIED], 8u32);
    } else {
        #[unroll]
        for i in 0..8usize {
            copy_one::<E>(x, start, count, tile, place, i);
        }
    }
}

/// Element `i` of a copy.
#[cube]
fn copy_one<E: Float>(x: &[E], start: usize, count: usize, tile: &mut Shared<[E]>, place: usize, i: usize) {
    let mut value = E::new(0.0);
    if i < count {
        value = x[start + i];
    }
    tile[place + i] = value;
}

/// Ends a group of copies.
#[cube]
pub(crate) fn end_copies(#[comptime] unit: Unit) {
    if comptime!(unit == Unit::Native) {
        gpu_asm!("cp.async.commit_group;");
    }
}

/// Waits for this unit's copies.
#[cube]
pub(crate) fn wait_for_copies(#[comptime] unit: Unit) {
    if comptime!(unit == Unit::Native) {
        gpu_asm!("cp.async.wait_group 0;");
    }
}

/// Waits for this unit's copies but those of the last group.
#[cube]
pub(crate) fn wait_for_all_but_last(#[comptime] unit: Unit) {
    if comptime!(unit == Unit::Native) {
        gpu_asm!("cp.async.wait_group 1;");
    }
}
