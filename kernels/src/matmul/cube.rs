//! Products on cubecl, of whole matrices and of rows grouped by the matrix that multiplies them. Sums are f32, and rounded once, where
//! they are written.

use super::mma::{self, Epilogue};
use super::tiles;
use crate::cube::{empty, upload};
use crate::mma::Unit;
use crate::resolve::cube::{Math, math};
use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::kernel::cast;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

impl Math {
    /// That of a product with the frozen matrix `weight`, and of the adapter beside it.
    pub(crate) fn with(weight: &CubeTensor) -> Self {
        math(&weight.client, weight.dtype)
    }

    /// `operand`, rounded once for several products.
    pub(crate) fn operand(self, operand: CubeTensor) -> CubeTensor {
        let kept = self.kept(operand.dtype);
        cast(operand, kept)
    }
}

/// An operand and whether it is stored transposed.
pub(crate) type Operand = (CubeTensor, bool);

/// Rows sorted by the group they belong to.
pub(crate) struct Groups<'a> {
    /// `[groups + 1]`, u32: where each group begins.
    pub(crate) offsets: &'a CubeTensor,
    /// Rows in all groups.
    pub(crate) rows: usize,
}

/// How rows are grouped, and where they come from.
pub(super) struct Grouping<'a> {
    pub(super) groups: Groups<'a>,
    /// Row r is row `gather.0[r] / gather.1` of the left matrix.
    pub(super) gather: Option<(&'a CubeTensor, usize)>,
}

/// A product, of matrices of any float: `factor (a b + c d)`.
pub(super) struct Product<'a> {
    pub(super) a: Operand,
    pub(super) b: Operand,
    /// m, n and k: rows and columns of the result, and what is summed over.
    pub(super) shape: [usize; 3],
    /// `c`, as `a` lies and of its dtype, and `d`, as `b` lies.
    pub(super) beside: Option<[CubeTensor; 2]>,
    pub(super) grouping: Option<Grouping<'a>>,
    pub(super) factor: f32,
}

/// How a product's operands lie and what it has of them, for which every kernel has variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    /// The left matrix is stored `[k, m]`.
    pub(super) a_transposed: bool,
    /// The right one is stored `[n, k]`.
    pub(super) b_transposed: bool,
    /// A second product is added.
    pub(super) beside: bool,
    /// Rows are multiplied by the matrix of their group.
    pub(super) grouped: bool,
    /// Rows come from where `sources` says.
    pub(super) gathered: bool,
}

impl Product<'_> {
    pub(super) fn layout(&self) -> Layout {
        Layout {
            a_transposed: self.a.1,
            b_transposed: self.b.1,
            beside: self.beside.is_some(),
            grouped: self.grouping.is_some(),
            gathered: self.grouping.as_ref().is_some_and(|grouping| grouping.gather.is_some()),
        }
    }

    /// What the second product sums over.
    pub(super) fn second_depth(&self) -> usize {
        self.beside.as_ref().map_or(0, |[left, _]| left.shape()[if self.a.1 { 0 } else { 1 }])
    }

    /// Writes it to `out [m, n]`, of any float.
    pub(super) fn write(self, math: Math, out: &CubeTensor) {
        match math {
            Math::F32 => tiles::write(self, out),
            Math::Half { operands, unit } => mma::write(self, Epilogue::Write, operands, unit, out),
        }
    }
}

/// The rows of a product as a kernel takes them.
pub(super) struct Rows {
    pub(super) offsets: CubeTensor,
    pub(super) sources: CubeTensor,
    pub(super) groups: usize,
    pub(super) divisor: usize,
    /// Tiles of `side` rows that cover them.
    pub(super) tiles: usize,
}

impl Rows {
    /// Those of `m` rows, on the device of `like`.
    pub(super) fn new(grouping: Option<Grouping>, m: usize, side: usize, like: &CubeTensor) -> Self {
        // What is absent is not read.
        let absent = || upload(like, &[]);
        let Some(Grouping { groups: Groups { offsets, rows }, gather }) = grouping else {
            let nothing = absent();
            return Self { offsets: nothing.clone(), sources: nothing, groups: 0, divisor: 1, tiles: m.div_ceil(side) };
        };
        let (sources, divisor) = gather.map_or_else(|| (absent(), 1), |(sources, divisor)| (sources.clone(), divisor));
        let groups = offsets.shape().num_elements() - 1;
        // Every group may end with a tile that is not full.
        let tiles = rows.div_ceil(side) + groups.min(rows);
        Self { offsets: offsets.clone(), sources, groups, divisor, tiles }
    }
}

/// The group, the first row and the end of the rows of tile `tile` of rows, `side` of them. A tile beyond the last has none.
#[cube]
pub(super) fn rows_of_tile(
    offsets: &[u32],
    groups: usize,
    tile: usize,
    #[comptime] side: usize,
) -> (usize, usize, usize) {
    let mut group = 0usize;
    let mut row0 = 0usize;
    let mut rows_end = 0usize;
    let mut tiles_before = 0usize;
    for g in 0..groups {
        let start = offsets[g] as usize;
        let end = offsets[g + 1] as usize;
        let tiles = (end - start).div_ceil(side);
        if tile >= tiles_before && tile < tiles_before + tiles {
            group = g;
            row0 = start + (tile - tiles_before) * side;
            rows_end = end;
        }
        tiles_before += tiles;
    }
    (group, row0, rows_end)
}

/// `factor a b` as `out`, for `a [m, k]` and `b [k, n]`, or with `true` beside an operand that operand's transpose: `[m, n]`. Operands are
/// of any float; with [`Math::Half`] both are rounded to its operands where they are not of them.
pub(crate) fn product(a: Operand, b: Operand, factor: f32, out: DType, math: Math) -> CubeTensor {
    sum(a, b, None, factor, out, math)
}

/// `a b + c d` as `out`, where `c` and `d` lie as `a` and `b` do, and `c` is of the dtype of `a`.
pub(crate) fn product_beside(a: Operand, b: Operand, beside: [CubeTensor; 2], out: DType, math: Math) -> CubeTensor {
    sum(a, b, Some(beside), 1.0, out, math)
}

fn sum(a: Operand, b: Operand, beside: Option<[CubeTensor; 2]>, factor: f32, out: DType, math: Math) -> CubeTensor {
    let ([a_rows, a_cols], [b_rows, b_cols]) = (a.0.shape().dims(), b.0.shape().dims());
    let (m, k) = if a.1 { (a_cols, a_rows) } else { (a_rows, a_cols) };
    let n = if b.1 { b_rows } else { b_cols };
    let out = empty(&a.0, [m, n], out);
    Product { a, b, shape: [m, n, k], beside, grouping: None, factor }.write(math, &out);
    out
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
    let shape = [groups.rows, both / 2, k];
    let out = empty(&a, [groups.rows, both / 2], operands);
    let grouping = Some(Grouping { groups, gather: Some(gather) });
    let product = Product { a: (a, false), b: (gate_up, true), shape, beside: None, grouping, factor: 1.0 };
    mma::write(product, Epilogue::Geglu, operands, unit, &out);
    out
}

/// `[rows, n]`, in what `math` keeps beside the dtype of `a`: every row of `a` times the matrix of its group, from `b [groups, ., .]`. With
/// `gather`, row r is row `gather.0[r] / gather.1` of `a`.
pub(crate) fn grouped_product(
    a: CubeTensor,
    (b, b_transposed): Operand,
    groups: Groups,
    gather: Option<(&CubeTensor, usize)>,
    math: Math,
) -> CubeTensor {
    let [_, b_rows, b_cols] = b.shape().dims();
    let (k, n) = if b_transposed { (b_cols, b_rows) } else { (b_rows, b_cols) };
    let shape = [groups.rows, n, k];
    let out = empty(&a, [groups.rows, n], math.kept(a.dtype));
    let grouping = Some(Grouping { groups, gather });
    Product { a: (a, false), b: (b, b_transposed), shape, beside: None, grouping, factor: 1.0 }.write(math, &out);
    out
}
