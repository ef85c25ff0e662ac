//! The kernel of the products on matrix instructions.
//!
//! A cube of eight groups of 32 lanes makes a square of the result, each group a half by a quarter of it. Tiles 32 deep
//! pass through two stages of shared memory: while one is multiplied, the next is on its way. Lines of a tile are eight
//! elements further apart than they are long, so that the eight lines of an `ldmatrix` fall into different banks.
//!
//! Cubes that run at once share lines of both operands in the device's cache: bands of [`BAND`] tiles of rows pass over all columns.
//! Walked row after row, the logits of a chunk of 1,024 rows would read the vocabulary's matrix eight times.

use super::super::cube::rows_of_tile;
use super::{DEPTH, Epilogue, Plan, UNITS};
use crate::glu::cube::gelu;
use crate::mma::{
    COPIED, LANES, Two, copy, end_copies, load_left, load_right, multiply_add, no_sums, place_of_sums,
    wait_for_all_but_last,
};
use cubecl::prelude::*;

/// Tiles of rows that are walked together.
const BAND: usize = 8;

/// Which line of a matrix a line of a tile is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Order {
    AsStored,
    /// As `sources` says.
    Gathered,
    /// Eight of the first half, then theirs of the second.
    Paired,
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
    #[comptime] order: Order,
    #[comptime] plan: Plan,
) {
    let pieces = comptime!((if along_depth { DEPTH } else { plan.side() }) / COPIED);
    let pitch = comptime!(plan.pitch(along_depth));
    #[unroll]
    for l in 0..comptime!(plan.side() * DEPTH / COPIED / UNITS) {
        let i = UNIT_POS as usize + l * UNITS;
        let line = i / pieces;
        let col = col0 + i % pieces * COPIED;
        let mut source = line0 + line;
        if comptime!(order == Order::Paired) {
            source = source / 16 * 8 + source % 8;
        }
        let inside = source < line_end && col < col_end;
        if comptime!(order == Order::Gathered) {
            source = sources[select(inside, source, 0usize)] as usize / divisor;
        }
        if comptime!(order == Order::Paired) {
            source += (line0 + line) / 8 % 2 * line_end;
        }
        let start = select(inside, base + source * distance + col, 0usize);
        let count = select(inside, usize::min(col_end - usize::min(col, col_end), COPIED), 0usize);
        let place = stage + line * pitch + i % pieces * COPIED;
        copy::<E>(x, start, count, tile, place, comptime!(plan.aligned), comptime!(plan.unit));
    }
}

/// Begins to copy the tiles of both operands that begin at depth `k0`.
#[cube]
fn copy_tiles<E: Float>(
    a: &[E],
    b: &[E],
    sources: &[u32],
    divisor: usize,
    left: &mut Shared<[E]>,
    right: &mut Shared<[E]>,
    stage: usize,
    matrix: usize,
    row0: usize,
    rows_end: usize,
    col0: usize,
    n: usize,
    a_distance: usize,
    b_distance: usize,
    k0: usize,
    k: usize,
    #[comptime] plan: Plan,
) {
    let order = comptime!(if plan.layout.gathered { Order::Gathered } else { Order::AsStored });
    if comptime!(plan.layout.a_transposed) {
        copy_tile::<E>(a, sources, divisor, left, stage, 0usize, a_distance, k0, k, row0, rows_end, false, order, plan);
    } else {
        copy_tile::<E>(a, sources, divisor, left, stage, 0usize, a_distance, row0, rows_end, k0, k, true, order, plan);
    }
    let order = comptime!(if plan.epilogue == Epilogue::Geglu { Order::Paired } else { Order::AsStored });
    if comptime!(plan.layout.b_transposed) {
        copy_tile::<E>(b, sources, divisor, right, stage, matrix, b_distance, col0, n, k0, k, true, order, plan);
    } else {
        copy_tile::<E>(b, sources, divisor, right, stage, matrix, b_distance, k0, k, col0, n, false, order, plan);
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
/// padded, and none is known to the host. `n` counts the columns of `c`, also where two of `b` make one. With several parts of
/// `part` of the inner dimension, `c` has a matrix for each. The second product, where there is one, is of `a2` and `b2`, which lie as
/// `a` and `b` do, over `k2`: its tiles follow the first one's, so that an adapter costs no pass over the result.
#[cube(launch_unchecked)]
pub(super) fn mma_product<E: Float, C: Float, N: Size>(
    a: &[E],
    b: &[E],
    a2: &[E],
    b2: &[E],
    c: &mut [Vector<C, N>],
    offsets: &[u32],
    sources: &[u32],
    m: usize,
    n: usize,
    k: usize,
    k2: usize,
    a_distance: usize,
    b_distance: usize,
    a2_distance: usize,
    b2_distance: usize,
    b_matrix: usize,
    part: usize,
    groups: usize,
    divisor: usize,
    factor: f32,
    #[comptime] plan: Plan,
    #[define(E, C)] _dtypes: [ElemType; 2],
) {
    let side = comptime!(plan.side());
    let unit = comptime!(plan.unit);
    let stage = comptime!(plan.stage());
    let mut left = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut right = Shared::<[E]>::new_aligned_slice(comptime!(2 * stage), 16usize);
    let mut scratch = Shared::<[E]>::new_slice(comptime!(plan.scratch()));
    let (tile_row, tile_col) = tile_of_cube();
    let col0 = tile_col * side;
    let mut row0 = tile_row * side;
    let mut rows_end = m;
    let mut matrix = 0usize;
    if comptime!(plan.layout.grouped) {
        let (group, first, end) = rows_of_tile(offsets, groups, tile_row, side);
        matrix = group * b_matrix;
        row0 = first;
        rows_end = end;
    }
    let part0 = CUBE_POS_Z as usize * part;
    let first_steps = usize::min(part, k - part0).div_ceil(DEPTH);
    let mut steps = first_steps;
    if comptime!(plan.layout.beside) {
        steps += k2.div_ceil(DEPTH);
    }
    let steps = select(row0 < rows_end, steps, 0usize);

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
            if step < first_steps {
                let k0 = part0 + step * DEPTH;
                copy_tiles::<E>(
                    a, b, sources, divisor, &mut left, &mut right, at, matrix, row0, rows_end, col0, n, a_distance,
                    b_distance, k0, k, plan,
                );
            }
            if comptime!(plan.layout.beside) {
                if step >= first_steps {
                    let k0 = (step - first_steps) * DEPTH;
                    copy_tiles::<E>(
                        a2,
                        b2,
                        sources,
                        divisor,
                        &mut left,
                        &mut right,
                        at,
                        matrix,
                        row0,
                        rows_end,
                        col0,
                        n,
                        a2_distance,
                        b2_distance,
                        k0,
                        k2,
                        plan,
                    );
                }
            }
        }
        end_copies(unit);
        if step > 0 {
            wait_for_all_but_last(unit);
            sync_cube();
            let at = (step - 1) % 2 * stage;
            for half in 0..comptime!(DEPTH / 16) {
                let k0 = half * 16;
                let mut rights = Sequence::<Array<Vector<E, Two>>>::new();
                #[unroll]
                for j in 0..cols16 {
                    let col = warp_col + comptime!(j * 16);
                    let pitch = comptime!(plan.pitch(plan.layout.b_transposed));
                    rights.push(load_right::<E>(&right, at, col, k0, pitch, comptime!(plan.layout.b_transposed), unit));
                }
                #[unroll]
                for i in 0..rows16 {
                    let row = warp_row + comptime!(i * 16);
                    let pitch = comptime!(plan.pitch(!plan.layout.a_transposed));
                    let fragment = load_left::<E>(&left, at, row, k0, pitch, comptime!(plan.layout.a_transposed), unit);
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

    let geglu = comptime!(plan.epilogue == Epilogue::Geglu);
    let width = N::value().comptime();
    #[unroll]
    for i in 0..rows16 {
        #[unroll]
        for j in 0..comptime!(if geglu { cols16 } else { cols16 * 2 }) {
            let gates = comptime!(i * cols16 * 2 + if geglu { 2 * j } else { j });
            #[unroll]
            for register in 0..2usize {
                let (row, col) = place_of_sums(register);
                let row = row0 + warp_row + comptime!(i * 16) + row;
                let col = (col0 + warp_col) / comptime!(if geglu { 2usize } else { 1usize }) + comptime!(j * 8) + col;
                let two = sums.index(gates)[register];
                #[unroll]
                for e in 0..comptime!(2 / width) {
                    let col = col + comptime!(e * width);
                    if row < rows_end && col < n {
                        let place = (CUBE_POS_Z as usize * m * n + row * n + col) / width;
                        let mut values = Vector::<C, N>::empty();
                        #[unroll]
                        for lane in 0..width {
                            let mut value = two.extract(comptime!(e * width + lane)) * factor;
                            if comptime!(geglu) {
                                let ups = sums.index(comptime!(gates + 1))[register];
                                value = gelu(value) * ups.extract(comptime!(e * width + lane)) * factor;
                            }
                            values.insert(lane, C::cast_from(value));
                        }
                        c[place] = values;
                    }
                }
            }
        }
    }
}

/// The sum of the parts of a product, in their order.
#[cube(launch)]
pub(super) fn sum_parts<C: Float>(parts: &[f32], c: &mut [C], count: usize, #[define(C)] _dtype: ElemType) {
    let i = ABSOLUTE_POS;
    if i < c.len() {
        let mut sum = 0.0f32;
        for part in 0..count {
            sum += parts[part * c.len() + i];
        }
        c[i] = C::cast_from(sum);
    }
}
