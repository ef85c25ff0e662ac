//! Products on matrix instructions: 16-bit operands, f32 sums, whole matrices and rows grouped by the matrix that multiplies
//! them in one kernel.
//!
//! A cube of eight groups of 32 lanes makes a square of the result, each group a half by a quarter of it. Tiles 32 deep
//! pass through two stages of shared memory: while one is multiplied, the next is on its way. Lines of a tile are eight
//! elements further apart than they are long, so that the eight lines of an `ldmatrix` fall into different banks.
//!
//! Cubes that run at once share lines of both operands in the device's cache: bands of [`BAND`] tiles of rows pass over all columns.
//! Walked row after row, the logits of a chunk of 1,024 rows would read the vocabulary's matrix eight times. A long inner dimension
//! is cut where the result alone has too few tiles for a device, and the parts are added in order.

use super::cube::{Groups, Operand};
use crate::cube::{cover, empty, units, upload};
use crate::mma::{
    COPIED, LANES, SCRATCH, Two, Unit, copy, end_copies, load_left, load_right, multiply_add, no_sums, place_of_sums,
    wait_for_all_but_last,
};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Depth of the tiles in shared memory.
pub(super) const DEPTH: usize = 32;
/// Units of a cube.
pub(super) const UNITS: usize = 256;
/// Tiles of rows that are walked together.
const BAND: usize = 8;
/// Depth of a part where the sum runs over rows, as an adapter's gradient does: its result has a tile or two of rows or of columns.
pub(super) const PART_OF_ROWS: usize = 2_048;
/// Depth of a part of other sums, of which only those over a vocabulary are longer. It does not depend on the rows beside a row.
const PART: usize = 32_768;

/// Which of the kernel's variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// The left matrix is stored `[k, m]`.
    pub(super) a_transposed: bool,
    /// The right one is stored `[n, k]`.
    pub(super) b_transposed: bool,
    /// Results are added to what is there.
    pub(super) add: bool,
    /// Rows are multiplied by the matrix of their group.
    pub(super) grouped: bool,
    /// Rows come from where `sources` says.
    pub(super) gathered: bool,
    /// Lines begin at multiples of 16 bytes.
    pub(super) aligned: bool,
    pub(super) unit: Unit,
}

impl Plan {
    /// Rows and columns of a cube's part of the result. The emulation's is smaller: its devices may have 32 KiB of shared
    /// memory.
    pub(super) fn side(&self) -> usize {
        match self.unit {
            Unit::Native => 128,
            Unit::Emulated => 64,
        }
    }

    fn copier(&self) -> Unit {
        if self.aligned { self.unit } else { Unit::Emulated }
    }

    /// Distance of lines in shared memory, where lines run along the depth or not.
    fn pitch(&self, along_depth: bool) -> usize {
        COPIED + if along_depth { DEPTH } else { self.side() }
    }

    /// Elements of a stage of one operand, whichever way it lies.
    fn stage(&self) -> usize {
        self.side() * (DEPTH + COPIED)
    }

    fn scratch(&self) -> usize {
        match self.unit {
            Unit::Native => 1,
            Unit::Emulated => UNITS / LANES * SCRATCH,
        }
    }
}

/// Begins to copy a tile: lines `line0..line_end` and columns `col0..col_end` of a matrix at `base` whose lines are `distance`
/// apart, zeros beyond.
#[cube]
fn copy_tile<E: Float>(
    x: &[E],
    sources: &[u32],
    divisor: usize,
    tile: &mut Shared<[E]>,
    stage: usize,
    base: usize,
    distance: usize,
    line0: usize,
    line_end: usize,
    col0: usize,
    col_end: usize,
    #[comptime] along_depth: bool,
    #[comptime] gathered: bool,
    #[comptime] plan: Plan,
) {
    let pieces = comptime!((if along_depth { DEPTH } else { plan.side() }) / COPIED);
    let pitch = comptime!(plan.pitch(along_depth));
    #[unroll]
    for l in 0..comptime!(plan.side() * DEPTH / COPIED / UNITS) {
        let i = UNIT_POS as usize + l * UNITS;
        let line = i / pieces;
        let col = col0 + i % pieces * COPIED;
        let inside = line0 + line < line_end && col < col_end;
        let mut source = line0 + line;
        if comptime!(gathered) {
            source = sources[select(inside, source, 0usize)] as usize / divisor;
        }
        let start = select(inside, base + source * distance + col, 0usize);
        let count = select(inside, usize::min(col_end - usize::min(col, col_end), COPIED), 0usize);
        copy::<E>(x, start, count, tile, stage + line * pitch + i % pieces * COPIED, comptime!(plan.copier()));
    }
}

/// The tile of the result that is this cube's: of rows, and of columns.
#[cube]
fn tile_of_cube() -> (usize, usize) {
    let rows = CUBE_COUNT_Y as usize;
    let in_band = BAND * CUBE_COUNT_X as usize;
    let cube = CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize;
    let first = cube / in_band * BAND;
    let height = usize::min(BAND, rows - first);
    (first + cube % in_band % height, cube % in_band / height)
}

/// `c [m, n] = factor * a b`, or one such product a group: row r of group g, `offsets[g] <= r < offsets[g + 1]`, is row
/// `sources[r] / divisor` of `a` times the g-th matrix of `b`. A cube finds its group by walking the offsets: no group is
/// padded, and none is known to the host. With several parts of `part` of the inner dimension, `c` has a matrix for each.
#[cube(launch_unchecked)]
pub(super) fn mma_product<E: Float>(
    a: &[E],
    b: &[E],
    c: &mut [f32],
    offsets: &[u32],
    sources: &[u32],
    m: usize,
    n: usize,
    k: usize,
    a_distance: usize,
    b_distance: usize,
    b_matrix: usize,
    part: usize,
    groups: usize,
    divisor: usize,
    factor: f32,
    #[comptime] plan: Plan,
    #[define(E)] _operands: ElemType,
) {
    let side = comptime!(plan.side());
    let unit = comptime!(plan.unit);
    let stage = comptime!(plan.stage());
    let mut left = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut right = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut scratch = Shared::<[E]>::new_slice(comptime!(plan.scratch()));
    let (tile, tile_col) = tile_of_cube();
    let col0 = tile_col * side;
    let mut row0 = tile * side;
    let mut rows_end = m;
    let mut matrix = 0usize;
    if comptime!(plan.grouped) {
        let mut tiles_before = 0usize;
        // A cube beyond the last tile has no rows: it multiplies nothing and writes nothing.
        rows_end = 0usize;
        for g in 0..groups {
            let start = offsets[g] as usize;
            let end = offsets[g + 1] as usize;
            let tiles = (end - start).div_ceil(side);
            if tile >= tiles_before && tile < tiles_before + tiles {
                matrix = g * b_matrix;
                row0 = start + (tile - tiles_before) * side;
                rows_end = end;
            }
            tiles_before += tiles;
        }
    }
    let part0 = CUBE_POS_Z as usize * part;
    let depth = usize::min(part, k - part0);
    let steps = select(row0 < rows_end, depth.div_ceil(DEPTH), 0usize);

    // Each group of lanes has half of the rows and a quarter of the columns.
    let rows16 = comptime!(side / 2 / 16);
    let cols16 = comptime!(side / 4 / 16);
    let warp = UNIT_POS as usize / LANES;
    let (warp_row, warp_col) = (warp / 4 * comptime!(side / 2), warp % 4 * comptime!(side / 4));
    let mut sums = Sequence::<Array<Vector<f32, Two>>>::new();
    #[unroll]
    for _ in 0..comptime!(rows16 * cols16 * 2) {
        sums.push(no_sums());
    }

    for step in 0..steps + 1 {
        if step < steps {
            let at = step % 2 * stage;
            let k0 = part0 + step * DEPTH;
            if comptime!(plan.a_transposed) {
                copy_tile::<E>(
                    a, sources, divisor, &mut left, at, 0usize, a_distance, k0, k, row0, m, false, false, plan,
                );
            } else {
                let gathered = comptime!(plan.gathered);
                copy_tile::<E>(
                    a, sources, divisor, &mut left, at, 0usize, a_distance, row0, rows_end, k0, k, true, gathered, plan,
                );
            }
            if comptime!(plan.b_transposed) {
                copy_tile::<E>(
                    b, sources, divisor, &mut right, at, matrix, b_distance, col0, n, k0, k, true, false, plan,
                );
            } else {
                copy_tile::<E>(
                    b, sources, divisor, &mut right, at, matrix, b_distance, k0, k, col0, n, false, false, plan,
                );
            }
        }
        end_copies(comptime!(plan.copier()));
        if step > 0 {
            wait_for_all_but_last(comptime!(plan.copier()));
            sync_cube();
            let at = (step - 1) % 2 * stage;
            for half in 0..comptime!(DEPTH / 16) {
                let k0 = half * 16;
                let mut rights = Sequence::<Array<Vector<E, Two>>>::new();
                #[unroll]
                for j in 0..cols16 {
                    let col = warp_col + comptime!(j * 16);
                    let pitch = comptime!(plan.pitch(plan.b_transposed));
                    rights.push(load_right::<E>(&right, at, col, k0, pitch, comptime!(plan.b_transposed), unit));
                }
                #[unroll]
                for i in 0..rows16 {
                    let row = warp_row + comptime!(i * 16);
                    let pitch = comptime!(plan.pitch(!plan.a_transposed));
                    let fragment = load_left::<E>(&left, at, row, k0, pitch, comptime!(plan.a_transposed), unit);
                    #[unroll]
                    for j in 0..comptime!(cols16 * 2) {
                        let right = rights.index(comptime!(j / 2));
                        let sums = sums.index_mut(comptime!(i * cols16 * 2 + j));
                        multiply_add::<E>(&fragment, right, sums, &mut scratch, comptime!(j % 2), unit);
                    }
                }
            }
            sync_cube();
        }
    }

    #[unroll]
    for i in 0..rows16 {
        #[unroll]
        for j in 0..comptime!(cols16 * 2) {
            #[unroll]
            for register in 0..2usize {
                let (row, col) = place_of_sums(register);
                let row = row0 + warp_row + comptime!(i * 16) + row;
                let col = col0 + warp_col + comptime!(j * 8) + col;
                let two = sums.index(comptime!(i * cols16 * 2 + j))[register];
                #[unroll]
                for e in 0..2usize {
                    if row < rows_end && col + e < n {
                        let place = CUBE_POS_Z as usize * m * n + row * n + col + e;
                        let mut value = two.extract(e) * factor;
                        if comptime!(plan.add) {
                            value += c[place];
                        }
                        c[place] = value;
                    }
                }
            }
        }
    }
}

/// How rows are grouped, and where they come from.
pub(super) struct Grouping<'a> {
    pub(super) groups: Groups<'a>,
    pub(super) gather: Option<(&'a CubeTensor, usize)>,
}

/// The sum of the parts of a product, in their order.
#[cube(launch)]
fn sum_parts(parts: &[f32], c: &mut [f32], count: usize) {
    let i = ABSOLUTE_POS;
    if i < c.len() {
        let mut sum = 0.0f32;
        for part in 0..count {
            sum += parts[part * c.len() + i];
        }
        c[i] = sum;
    }
}

/// A matrix, or matrices one behind the other, whose lines begin `distance` elements apart: devices may begin each at a
/// multiple of their own.
struct Lines {
    tensor: CubeTensor,
    distance: usize,
}

impl Lines {
    /// `operand` as it lies, if lines are all that lies apart in it, else a copy.
    fn new(operand: CubeTensor) -> Self {
        let (shape, strides) = (operand.meta.shape(), operand.meta.strides());
        let last = shape.num_dims() - 1;
        let distance = strides[last - 1];
        if strides[last] == 1 && (last < 2 || strides[last - 2] == shape[last - 1] * distance) {
            return Self { tensor: operand, distance };
        }
        let distance = shape[last];
        Self { tensor: into_contiguous(operand), distance }
    }
}

/// Writes to `c [m, n]`, or adds to it, the product of both operands as `dtype`, of 16 bits, times `factor`.
pub(super) fn product(
    (a, a_transposed): Operand,
    (b, b_transposed): Operand,
    c: &CubeTensor,
    [m, n, k]: [usize; 3],
    grouping: Option<Grouping>,
    (factor, add): (f32, bool),
    (dtype, unit): (DType, Unit),
) {
    let [a, b] = [a, b].map(|operand| Lines::new(cast(operand, dtype)));
    let plan = Plan {
        a_transposed,
        b_transposed,
        add,
        grouped: grouping.is_some(),
        gathered: grouping.as_ref().is_some_and(|grouping| grouping.gather.is_some()),
        aligned: [a.distance, b.distance].iter().all(|distance| distance.is_multiple_of(COPIED)),
        unit,
    };
    let (a_distance, b_distance) = (a.distance, b.distance);
    let b_matrix = b_distance * if b_transposed { n } else { k };
    let (a, b) = (a.tensor, b.tensor);
    // What is absent is not read: one element stands in.
    let (offsets, sources, groups, divisor, tiles) = match &grouping {
        None => (upload(&a, &[]), upload(&a, &[]), 0, 1, m.div_ceil(plan.side())),
        Some(Grouping { groups, gather }) => {
            let (sources, divisor) = gather.map_or_else(|| (upload(&a, &[]), 1), |(s, divisor)| (s.clone(), divisor));
            let count = groups.offsets.shape().num_elements() - 1;
            // Every group may end with a tile that is not full.
            let tiles = groups.rows.div_ceil(plan.side()) + count.min(groups.rows);
            (groups.offsets.clone(), sources, count, divisor, tiles)
        }
    };
    let part = match a_transposed {
        _ if add || plan.grouped => k,
        true => PART_OF_ROWS.min(k),
        false => PART.min(k),
    };
    let parts = k.div_ceil(part);
    let made = if parts == 1 { c.clone() } else { empty(c, [parts, m, n], DType::F32) };
    // SAFETY: the kernel reads and writes inside the bounds that it is given, which are those of the buffers.
    unsafe {
        mma_product::launch_unchecked(
            &a.client.clone(),
            CubeCount::Static(n.div_ceil(plan.side()) as u32, tiles as u32, parts as u32),
            CubeDim::new_1d(UNITS as u32),
            a.into_buffer_arg(),
            b.into_buffer_arg(),
            made.clone().into_buffer_arg(),
            offsets.into_buffer_arg(),
            sources.into_buffer_arg(),
            m,
            n,
            k,
            a_distance,
            b_distance,
            b_matrix,
            part,
            groups,
            divisor,
            factor,
            plan,
            dtype_to_storage_type(dtype),
        );
    }
    if parts > 1 {
        let (made, c) = (made.into_buffer_arg(), c.clone());
        sum_parts::launch(&c.client.clone(), cover(m * n), units(), made, c.into_buffer_arg(), parts);
    }
}
