//! Tiled products on cubecl, of whole matrices and of rows grouped by the matrix that multiplies them.
//!
//! A cube makes 64 x 64 elements from tiles 16 deep in shared memory, 4 x 4 in the registers of each unit. The sum over
//! the inner dimension runs from first to last, so an element depends neither on the rows beside it nor on the grid.

use super::mma::{Epilogue, Grouping, Product};
use crate::cube::{empty, units, upload};
use crate::mma::Unit;
use crate::resolve::cube::{Math, math};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows and columns of a cube's part of the result.
const TILE: usize = 64;
/// Depth of the tiles in shared memory.
const DEPTH: usize = 16;
/// Elements of one tile in shared memory.
const SHARED: usize = TILE * DEPTH;

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

/// Adds the product of the two tiles to the unit's 4 x 4 sums.
#[cube]
fn multiply(left: &Shared<[f32]>, right: &Shared<[f32]>, sums: &mut Array<f32>) {
    let row = UNIT_POS as usize / 16 * 4;
    let col = UNIT_POS as usize % 16 * 4;
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
}

/// Writes the unit's sums times `factor`, or adds them to what is there.
#[cube]
fn store(
    sums: &Array<f32>,
    c: &mut [f32],
    row0: usize,
    rows_end: usize,
    col0: usize,
    n: usize,
    factor: f32,
    #[comptime] add: bool,
) {
    let row = row0 + UNIT_POS as usize / 16 * 4;
    let col = col0 + UNIT_POS as usize % 16 * 4;
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..4usize {
            if row + i < rows_end && col + j < n {
                let place = (row + i) * n + col + j;
                let mut value = sums[i * 4 + j] * factor;
                if comptime!(add) {
                    value += c[place];
                }
                c[place] = value;
            }
        }
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

#[cube(launch)]
fn matmul<W: Float>(
    a: &[f32],
    b: &[W],
    c: &mut [f32],
    m: usize,
    n: usize,
    k: usize,
    factor: f32,
    #[comptime] a_transposed: bool,
    #[comptime] b_transposed: bool,
    #[comptime] add: bool,
    #[define(W)] _dtype: ElemType,
) {
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let row0 = CUBE_POS_Y as usize * TILE;
    let col0 = CUBE_POS_X as usize * TILE;
    let mut sums = zeros();
    for step in 0..k.div_ceil(DEPTH) {
        let k0 = step * DEPTH;
        #[unroll]
        for l in 0..4usize {
            let i = UNIT_POS as usize + l * 256;
            let depth = if comptime!(a_transposed) { i / TILE } else { i % DEPTH };
            let row = if comptime!(a_transposed) { i % TILE } else { i / DEPTH };
            let mut value = 0.0f32;
            if k0 + depth < k && row0 + row < m {
                let place =
                    if comptime!(a_transposed) { (k0 + depth) * m + row0 + row } else { (row0 + row) * k + k0 + depth };
                value = a[place];
            }
            left[depth * TILE + row] = value;
        }
        load_right::<W>(b, &mut right, 0usize, col0, k0, n, k, b_transposed);
        sync_cube();
        multiply(&left, &right, &mut sums);
        sync_cube();
    }
    store(&sums, c, row0, m, col0, n, factor, add);
}

/// Row r of group g, `offsets[g] <= r < offsets[g + 1]`, is row `sources[r] / divisor` of `a` times the g-th matrix of
/// `b`. A cube finds its group by walking the offsets: no group is padded, and none is known to the host.
#[cube(launch)]
fn grouped_matmul<W: Float>(
    a: &[f32],
    b: &[W],
    c: &mut [f32],
    offsets: &[u32],
    sources: &[u32],
    groups: usize,
    n: usize,
    k: usize,
    divisor: usize,
    #[comptime] gathered: bool,
    #[comptime] b_transposed: bool,
    #[define(W)] _dtype: ElemType,
) {
    let mut left = Shared::<[f32]>::new_slice(SHARED);
    let mut right = Shared::<[f32]>::new_slice(SHARED);
    let col0 = CUBE_POS_X as usize * TILE;
    let mut tiles_before = 0usize;
    let mut group = 0usize;
    let mut row0 = 0usize;
    let mut rows_end = 0usize;
    for g in 0..groups {
        let start = offsets[g] as usize;
        let end = offsets[g + 1] as usize;
        let tiles = (end - start).div_ceil(TILE);
        let tile = CUBE_POS_Y as usize;
        if tile >= tiles_before && tile < tiles_before + tiles {
            group = g;
            row0 = start + (tile - tiles_before) * TILE;
            rows_end = end;
        }
        tiles_before += tiles;
    }
    // A cube beyond the last tile has no rows: it multiplies nothing and writes nothing.
    let steps = select(row0 < rows_end, k.div_ceil(DEPTH), 0usize);
    let mut sums = zeros();
    for step in 0..steps {
        let k0 = step * DEPTH;
        #[unroll]
        for l in 0..4usize {
            let i = UNIT_POS as usize + l * 256;
            let depth = i % DEPTH;
            let row = i / DEPTH;
            let mut value = 0.0f32;
            if k0 + depth < k && row0 + row < rows_end {
                let mut source = row0 + row;
                if comptime!(gathered) {
                    source = sources[row0 + row] as usize / divisor;
                }
                value = a[source * k + k0 + depth];
            }
            left[depth * TILE + row] = value;
        }
        load_right::<W>(b, &mut right, group * n * k, col0, k0, n, k, b_transposed);
        sync_cube();
        multiply(&left, &right, &mut sums);
        sync_cube();
    }
    store(&sums, c, row0, rows_end, col0, n, 1.0f32, false);
}

impl Math {
    /// That of a product with the frozen matrix `weight`, and of the adapter beside it.
    pub(crate) fn with(weight: &CubeTensor) -> Self {
        math(&weight.client, weight.dtype)
    }

    /// `operand`, rounded once for several products.
    pub(crate) fn operand(self, operand: CubeTensor) -> CubeTensor {
        match self {
            Self::F32 => operand,
            Self::Half { operands, .. } => cast(operand, operands),
        }
    }
}

/// An operand and whether it is stored transposed.
pub(crate) type Operand = (CubeTensor, bool);

/// `factor a b`, for `a [m, k]` and `b [k, n]`, or with `true` beside an operand that operand's transpose: `[m, n]`, f32. `b` may be
/// bf16 where the device has it, with [`Math::Half`] both.
pub(crate) fn product(a: Operand, b: Operand, factor: f32, math: Math) -> CubeTensor {
    sum(a, b, None, factor, math)
}

/// `a b + c d`, where `c` and `d` lie as `a` and `b` do.
pub(crate) fn product_beside(a: Operand, b: Operand, beside: [CubeTensor; 2], math: Math) -> CubeTensor {
    sum(a, b, Some(beside), 1.0, math)
}

fn sum(a: Operand, b: Operand, beside: Option<[CubeTensor; 2]>, factor: f32, math: Math) -> CubeTensor {
    let shape @ [m, n, _] = shape_of(&a, &b);
    let out = empty(&a.0, [m, n], DType::F32);
    if let Math::Half { operands, unit } = math {
        let (grouping, epilogue) = (None, Epilogue::Write);
        Product { a, b, shape, beside, grouping, factor, epilogue, operands, unit }.write(&out);
        return out;
    }
    let transposed = (a.1, b.1);
    multiply_tiles(a, b, shape, factor, &out, false);
    if let Some([c, d]) = beside {
        let (c, d) = ((c, transposed.0), (d, transposed.1));
        let shape = shape_of(&c, &d);
        multiply_tiles(c, d, shape, 1.0, &out, true);
    }
    out
}

/// m, n and k of a product.
fn shape_of((a, a_transposed): &Operand, (b, b_transposed): &Operand) -> [usize; 3] {
    let ([a_rows, a_cols], [b_rows, b_cols]) = (a.shape().dims(), b.shape().dims());
    let (m, k) = if *a_transposed { (a_cols, a_rows) } else { (a_rows, a_cols) };
    [m, if *b_transposed { b_rows } else { b_cols }, k]
}

/// Writes `factor a b` to `out`, or adds it.
fn multiply_tiles(
    (a, a_transposed): Operand,
    (b, b_transposed): Operand,
    [m, n, k]: [usize; 3],
    factor: f32,
    out: &CubeTensor,
    add: bool,
) {
    let (a, b) = (into_contiguous(a), into_contiguous(b));
    let dtype = dtype_to_storage_type(b.dtype);
    matmul::launch(
        &a.client.clone(),
        CubeCount::Static(n.div_ceil(TILE) as u32, m.div_ceil(TILE) as u32, 1),
        units(),
        a.into_buffer_arg(),
        b.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        m,
        n,
        k,
        factor,
        a_transposed,
        b_transposed,
        add,
        dtype,
    );
}

/// Rows sorted by the group they belong to.
pub(crate) struct Groups<'a> {
    /// `[groups + 1]`, u32: where each group begins.
    pub(crate) offsets: &'a CubeTensor,
    /// Rows in all groups.
    pub(crate) rows: usize,
}

/// `[rows, n]` as `operands`: gelu(g) * u of every row, where its matrix of `gate_up [groups, 2 n, .]`, transposed, makes of it n times g
/// and then n times u. Row r is row `gather.0[r] / gather.1` of `a`.
pub(crate) fn grouped_geglu(
    a: CubeTensor,
    gate_up: CubeTensor,
    groups: Groups,
    gather: (&CubeTensor, usize),
    operands: DType,
    unit: Unit,
) -> CubeTensor {
    let [_, both, k] = gate_up.shape().dims();
    let c = empty(&a, [groups.rows, both / 2], operands);
    let (a, b, shape) = ((a, false), (gate_up, true), [groups.rows, both / 2, k]);
    let grouping = Some(Grouping { groups, gather: Some(gather) });
    Product { a, b, shape, beside: None, grouping, factor: 1.0, epilogue: Epilogue::Geglu, operands, unit }.write(&c);
    c
}

/// `[rows, n]`, in what `math` keeps: every row of `a` times the matrix of its group, from `b [groups, ., .]`. With `gather`, row
/// r is row `gather.0[r] / gather.1` of `a`.
pub(crate) fn grouped_product(
    a: CubeTensor,
    (b, b_transposed): Operand,
    groups: Groups,
    gather: Option<(&CubeTensor, usize)>,
    math: Math,
) -> CubeTensor {
    let [count, b_rows, b_cols] = b.shape().dims();
    let (k, n) = if b_transposed { (b_cols, b_rows) } else { (b_rows, b_cols) };
    let c = empty(&a, [groups.rows, n], math.kept());
    if let Math::Half { operands, unit } = math {
        let (a, b, shape) = ((a, false), (b, b_transposed), [groups.rows, n, k]);
        let (grouping, epilogue) = (Some(Grouping { groups, gather }), Epilogue::Write);
        Product { a, b, shape, beside: None, grouping, factor: 1.0, epilogue, operands, unit }.write(&c);
        return c;
    }
    let (a, b) = (into_contiguous(a), into_contiguous(b));
    let (sources, divisor) =
        gather.map_or_else(|| (upload(&a, &[]), 1), |(sources, divisor)| (sources.clone(), divisor));
    let dtype = dtype_to_storage_type(b.dtype);
    // Every group may end with a tile that is not full.
    let tiles = groups.rows.div_ceil(TILE) + count.min(groups.rows);
    grouped_matmul::launch(
        &a.client.clone(),
        CubeCount::Static(n.div_ceil(TILE) as u32, tiles as u32, 1),
        units(),
        a.into_buffer_arg(),
        b.into_buffer_arg(),
        c.clone().into_buffer_arg(),
        groups.offsets.clone().into_buffer_arg(),
        sources.into_buffer_arg(),
        count,
        n,
        k,
        divisor,
        gather.is_some(),
        b_transposed,
        dtype,
    );
    c
}
