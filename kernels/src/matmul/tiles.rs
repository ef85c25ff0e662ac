//! The kernel of the products without matrix instructions.
//!
//! A cube makes 64 x 64 elements from tiles 16 deep in shared memory, 4 x 4 in the registers of each unit. The sum over
//! the inner dimension runs from first to last, so an element depends neither on the rows beside it nor on the grid.

use super::cube::{Layout, Product, Rows, rows_of_tile};
use crate::cube::units;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows and columns of a cube's part of the result.
const TILE: usize = 64;
/// Depth of the tiles in shared memory.
const DEPTH: usize = 16;
/// Elements of one tile in shared memory.
const SHARED: usize = TILE * DEPTH;

/// Fills `tile [DEPTH, TILE]` with rows `row0..rows_end` and columns `k0..` of the left matrix, whose lines are rows or, if it is
/// transposed, the `rows_end` values of a column.
#[cube]
fn load_left<A: Float>(
    a: &[A],
    sources: &[u32],
    divisor: usize,
    tile: &mut Shared<[f32]>,
    row0: usize,
    rows_end: usize,
    k0: usize,
    k: usize,
    #[comptime] layout: Layout,
) {
    #[unroll]
    for l in 0..4usize {
        let i = UNIT_POS as usize + l * 256;
        let depth = if comptime!(layout.a_transposed) { i / TILE } else { i % DEPTH };
        let row = if comptime!(layout.a_transposed) { i % TILE } else { i / DEPTH };
        let mut value = 0.0f32;
        if k0 + depth < k && row0 + row < rows_end {
            let mut source = row0 + row;
            if comptime!(layout.gathered) {
                source = sources[source] as usize / divisor;
            }
            let place =
                if comptime!(layout.a_transposed) { (k0 + depth) * rows_end + source } else { source * k + k0 + depth };
            value = f32::cast_from(a[place]);
        }
        tile[depth * TILE + row] = value;
    }
}

/// Fills `tile [DEPTH, TILE]` with columns `col0..` and rows `k0..` of the right matrix, which starts at `base` and is
/// stored `[n, k]` if `transposed`, else `[k, n]`.
#[cube]
fn load_right<W: Float>(
    b: &[W],
    tile: &mut Shared<[f32]>,
    base: usize,
    col0: usize,
    k0: usize,
    n: usize,
    k: usize,
    #[comptime] transposed: bool,
) {
    #[unroll]
    for l in 0..4usize {
        let i = UNIT_POS as usize + l * 256;
        // Neighbouring units read neighbouring elements.
        let depth = if comptime!(transposed) { i % DEPTH } else { i / TILE };
        let col = if comptime!(transposed) { i / DEPTH } else { i % TILE };
        let mut value = 0.0f32;
        if k0 + depth < k && col0 + col < n {
            let place =
                if comptime!(transposed) { (col0 + col) * k + k0 + depth } else { (k0 + depth) * n + col0 + col };
            value = f32::cast_from(b[base + place]);
        }
        tile[depth * TILE + col] = value;
    }
}

/// Adds to the unit's sums those over `k` of rows `row0..rows_end` and columns `col0..`.
#[cube]
fn add_product<A: Float, B: Float>(
    a: &[A],
    b: &[B],
    sources: &[u32],
    divisor: usize,
    left: &mut Shared<[f32]>,
    right: &mut Shared<[f32]>,
    sums: &mut Array<f32>,
    matrix: usize,
    row0: usize,
    rows_end: usize,
    col0: usize,
    n: usize,
    k: usize,
    #[comptime] layout: Layout,
) {
    let row = UNIT_POS as usize / 16 * 4;
    let col = UNIT_POS as usize % 16 * 4;
    let steps = select(row0 < rows_end, k.div_ceil(DEPTH), 0usize);
    for step in 0..steps {
        let k0 = step * DEPTH;
        load_left::<A>(a, sources, divisor, left, row0, rows_end, k0, k, layout);
        load_right::<B>(b, right, matrix, col0, k0, n, k, comptime!(layout.b_transposed));
        sync_cube();
        for depth in 0..DEPTH {
            #[unroll]
            for i in 0..4usize {
                let value = left[depth * TILE + row + i];
                #[unroll]
                for j in 0..4usize {
                    sums[i * 4 + j] += value * right[depth * TILE + col + j];
                }
            }
        }
        sync_cube();
    }
}

#[cube]
fn zeros() -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0f32;
    }
    sums
}

/// `c [m, n] = factor * a b`, or one such product a group: row r of group g, `offsets[g] <= r < offsets[g + 1]`, is row
/// `sources[r] / divisor` of `a` times the g-th matrix of `b`. A cube finds its group by walking the offsets: no group is padded, and none
/// is known to the host. The second product, where there is one, is of `a2` and `b2`, which lie as `a` and `b` do, over `k2`.
#[cube(launch)]
fn matmul<A: Float, B: Float, B2: Float, C: Float>(
    a: &[A],
    b: &[B],
    a2: &[A],
    b2: &[B2],
    c: &mut [C],
    offsets: &[u32],
    sources: &[u32],
    m: usize,
    n: usize,
    k: usize,
    k2: usize,
    groups: usize,
    divisor: usize,
    factor: f32,
    #[comptime] layout: Layout,
    #[define(A, B, B2, C)] _dtypes: [ElemType; 4],
) {
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let col0 = CUBE_POS_X as usize * TILE;
    let mut row0 = CUBE_POS_Y as usize * TILE;
    let mut rows_end = m;
    let mut matrix = 0usize;
    if comptime!(layout.grouped) {
        let (group, first, end) = rows_of_tile(offsets, groups, CUBE_POS_Y as usize, TILE);
        matrix = group * n * k;
        row0 = first;
        rows_end = end;
    }
    let mut sums = zeros();
    add_product::<A, B>(
        a, b, sources, divisor, &mut left, &mut right, &mut sums, matrix, row0, rows_end, col0, n, k, layout,
    );
    if comptime!(layout.beside) {
        add_product::<A, B2>(
            a2, b2, sources, divisor, &mut left, &mut right, &mut sums, matrix, row0, rows_end, col0, n, k2, layout,
        );
    }
    let row = row0 + UNIT_POS as usize / 16 * 4;
    let col = col0 + UNIT_POS as usize % 16 * 4;
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..4usize {
            if row + i < rows_end && col + j < n {
                c[(row + i) * n + col + j] = C::cast_from(sums[i * 4 + j] * factor);
            }
        }
    }
}

/// Writes `product` to `c [m, n]`.
pub(super) fn write(product: Product, c: &CubeTensor) {
    let (layout, k2) = (product.layout(), product.second_depth());
    let Product { a: (a, _), b: (b, _), shape: [m, n, k], beside, grouping, factor } = product;
    let [a, b] = [a, b].map(into_contiguous);
    // What is absent is not read: something else stands in.
    let [a2, b2] = beside.map_or_else(|| [a.clone(), b.clone()], |operands| operands.map(into_contiguous));
    let Rows { offsets, sources, groups, divisor, tiles } = Rows::new(grouping, m, TILE, c);
    let dtypes = [a.dtype, b.dtype, b2.dtype, c.dtype].map(dtype_to_storage_type);
    matmul::launch(
        &c.client.clone(),
        CubeCount::Static(n.div_ceil(TILE) as u32, tiles as u32, 1),
        units(),
        a.into_buffer_arg(),
        b.into_buffer_arg(),
        a2.into_buffer_arg(),
        b2.into_buffer_arg(),
        c.clone().into_buffer_arg(),
        offsets.into_buffer_arg(),
        sources.into_buffer_arg(),
        m,
        n,
        k,
        k2,
        groups,
        divisor,
        factor,
        layout,
        dtypes,
    );
}
