//! Matrix products on f32 slices, the engine under every kernel here.
//!
//! Element (i, j) of a product is a sum over the depth in blocks of 512, each block summed in order. That
//! order depends on nothing else: not on how many rows or columns stand beside the element, not on the split into tasks,
//! not on the number of threads. A row computed alone has the bits it has among a thousand.
//!
//! The right operand may be bf16. Where the CPU has AVX-512 BF16, the left one is then rounded to bf16 as well, and pairs of
//! products are summed in f32 by one instruction; elsewhere the right one is widened to f32 while it is packed.
//!
//! The scheme is the usual one (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008): the
//! right operand is packed into panels of 64 columns that stay in the second-level cache, and a register tile of 6 rows
//! runs down the depth. The left operand is read in place; so is the right one where there are too few rows to repay packing.

#[cfg(feature = "cubecl")]
pub(crate) mod cube;
#[cfg(all(test, any(feature = "wgpu", feature = "cuda")))]
mod cube_tests;
mod micro;
#[cfg(feature = "cubecl")]
pub(crate) mod mma;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(feature = "cubecl")]
mod tiles;

use crate::simd::Isa;
use half::bf16;
use micro::Tile;
use pack::{COLS, DEPTH, PackBuffer, Value};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Depth of a part where the sum of a product on matrix instructions runs over rows, as an adapter's gradient does: its result has a tile
/// or two of rows or of columns.
pub(crate) const PART_OF_ROWS: usize = 2_048;

/// A borrowed matrix: row-major, or the transpose of a row-major one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// The row-major matrix `[rows, cols]` in `data`.
    ///
    /// # Panics
    /// If `data` does not hold exactly `rows * cols` values.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a {rows} x {cols} matrix needs {} values", rows * cols);
        Self { data, rows, cols, stride: cols, transposed: false }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows in `range`.
    pub fn row_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows);
        if range.is_empty() || self.cols == 0 {
            return Self { data: &[], rows: range.len(), ..self };
        }
        let start = if self.transposed { range.start } else { range.start * self.stride };
        Self { data: &self.data[start..], rows: range.len(), ..self }
    }

    /// The columns in `range`.
    pub fn col_range(self, range: Range<usize>) -> Self {
        self.t().row_range(range).t()
    }
}

/// The elements of a frozen weight.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16: half the memory, and faster where the CPU multiplies it.
    Bf16(&'a [bf16]),
}

impl<'a> Weights<'a> {
    /// Bytes of an element.
    pub fn value_bytes(&self) -> usize {
        match self {
            Weights::F32(_) => size_of::<f32>(),
            Weights::Bf16(_) => size_of::<bf16>(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Weights::F32(values) => values.len(),
            Weights::Bf16(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements in `range`.
    pub fn range(self, range: Range<usize>) -> Self {
        match self {
            Weights::F32(values) => Weights::F32(&values[range]),
            Weights::Bf16(values) => Weights::Bf16(&values[range]),
        }
    }

    /// The row-major matrix `[rows, cols]` of all elements.
    pub fn matrix(self, rows: usize, cols: usize) -> Right<'a> {
        match self {
            Weights::F32(values) => Right::F32(Matrix::new(values, rows, cols)),
            Weights::Bf16(values) => Right::Bf16(Matrix::new(values, rows, cols)),
        }
    }
}

/// The right operand of a product.
#[derive(Clone, Copy, Debug)]
pub enum Right<'a> {
    /// f32.
    F32(Matrix<'a>),
    /// bf16.
    Bf16(Matrix<'a, bf16>),
}

impl<'a> From<Matrix<'a>> for Right<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Right::F32(matrix)
    }
}

impl Right<'_> {
    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        match self {
            Right::F32(matrix) => Right::F32(matrix.t()),
            Right::Bf16(matrix) => Right::Bf16(matrix.t()),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Right::F32(matrix) => matrix.rows,
            Right::Bf16(matrix) => matrix.rows,
        }
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        match self {
            Right::F32(matrix) => matrix.cols,
            Right::Bf16(matrix) => matrix.cols,
        }
    }

    /// The columns in `range`.
    pub fn col_range(self, range: Range<usize>) -> Self {
        match self {
            Right::F32(matrix) => Right::F32(matrix.col_range(range)),
            Right::Bf16(matrix) => Right::Bf16(matrix.col_range(range)),
        }
    }
}

/// Whether a product replaces what the output holds or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// out = product
    Set,
    /// out += product
    Add,
}

/// out = lhs * rhs (or out += lhs * rhs) on the calling thread. `out` is row-major `[lhs.rows, rhs.cols]`; `lhs` must not
/// be a transpose where `rhs` is bf16.
///
/// # Panics
/// If the shapes do not fit together.
pub fn matmul<'a>(lhs: Matrix, rhs: impl Into<Right<'a>>, out: &mut [f32], write: Write) {
    let rhs = rhs.into();
    check(lhs, rhs, out.len(), rhs.cols());
    // SAFETY: `check` made sure that `out` holds lhs.rows rows of rhs.cols values, and it is borrowed mutably.
    unsafe { product(Isa::detect(), lhs, rhs, out.as_mut_ptr(), rhs.cols(), write) }
}

/// out = the sum of the products `lhs * rhs`, on all threads of the current rayon pool; added to `out` with
/// [`Write::Add`]. Every product has the shape of `out`, row-major `[rows, cols]`.
///
/// # Panics
/// If the shapes do not fit together or there is no product.
pub fn par_matmul(products: &[(Matrix, Right)], out: &mut [f32], write: Write) {
    let (rows, cols) = (products[0].0.rows, products[0].1.cols());
    for &(lhs, rhs) in products {
        assert_eq!((lhs.rows, rhs.cols()), (rows, cols), "the products differ in shape");
        check(lhs, rhs, out.len(), cols);
    }
    let isa = Isa::detect();
    let row_blocks = blocks(rows, 512, micro::ROWS);
    let col_blocks = blocks(cols, task_cols(isa, products, row_blocks.count), COLS);
    let shared = SharedOut(out.as_mut_ptr());
    let task = |index: usize| {
        let row_range = row_blocks.range(index / col_blocks.count);
        let col_range = col_blocks.range(index % col_blocks.count);
        let out = shared.at(row_range.start * cols + col_range.start);
        for (i, &(lhs, rhs)) in products.iter().enumerate() {
            let (lhs, rhs) = (lhs.row_range(row_range.clone()), rhs.col_range(col_range.clone()));
            let write = if i == 0 { write } else { Write::Add };
            // SAFETY: the blocks of two tasks do not overlap, all lie inside `out` (checked above), and `out` stays
            // borrowed mutably until every task has ended.
            unsafe { product(isa, lhs, rhs, out, cols, write) };
        }
    };
    let tasks = row_blocks.count * col_blocks.count;
    if tasks == 1 {
        task(0);
    } else {
        (0..tasks).into_par_iter().for_each(task);
    }
}

/// Columns of a task: the more, the fewer times the left operand of a bf16 product is rounded, but two tasks for each
/// thread at least.
fn task_cols(isa: Isa, products: &[(Matrix, Right)], row_blocks: usize) -> usize {
    let mut target = pack::BLOCK_COLS;
    if isa.multiplies_bf16() && products.iter().any(|(_, rhs)| matches!(rhs, Right::Bf16(_))) {
        let cols = products[0].1.cols();
        while target < 4 * pack::BLOCK_COLS && row_blocks * cols / (2 * target) >= 2 * rayon::current_num_threads() {
            target *= 2;
        }
    }
    target
}

fn check(lhs: Matrix, rhs: Right, out_len: usize, cols: usize) {
    assert!(!lhs.transposed || matches!(rhs, Right::F32(_)), "the left operand of bf16 must be row-major");
    assert_eq!(lhs.cols, rhs.rows(), "the operands differ in depth");
    assert_eq!(out_len, lhs.rows * cols, "the output has the wrong size");
}

/// `len` split into `count` equal blocks of `size` (the last one shorter).
struct Blocks {
    len: usize,
    size: usize,
    count: usize,
}

impl Blocks {
    fn range(&self, index: usize) -> Range<usize> {
        index * self.size..((index + 1) * self.size).min(self.len)
    }
}

/// Splits `len` into blocks of about `target`, whole multiples of `unit` but for the last.
fn blocks(len: usize, target: usize, unit: usize) -> Blocks {
    let size = len.div_ceil(len.div_ceil(target).max(1)).next_multiple_of(unit).max(unit);
    Blocks { len, size, count: len.div_ceil(size) }
}

/// The start of an output that several tasks write disjoint blocks of.
struct SharedOut(*mut f32);

// SAFETY: the pointer is only dereferenced by tasks whose blocks are disjoint (see `par_matmul`).
unsafe impl Sync for SharedOut {}

impl SharedOut {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

thread_local! {
    static PANELS: RefCell<PackBuffer> = RefCell::new(PackBuffer::default());
    #[cfg(target_arch = "x86_64")]
    static PAIRS: RefCell<pairs::PairBuffer> = RefCell::new(pairs::PairBuffer::default());
}

/// The serial product. `out` is the first element of the output, whose rows are `out_stride` apart.
///
/// # Safety
/// `out` must be valid for writes (and reads) of `lhs.rows` rows of `rhs.cols` values, `out_stride` apart, that nobody
/// else touches meanwhile. The operands must agree in depth, and `lhs` must not be transposed where `rhs` is bf16.
unsafe fn product(isa: Isa, lhs: Matrix, rhs: Right, out: *mut f32, out_stride: usize, write: Write) {
    if lhs.rows == 0 || rhs.cols() == 0 {
        return;
    }
    if lhs.cols == 0 {
        if write == Write::Set {
            for row in 0..lhs.rows {
                // SAFETY: rows of the output, by the caller's promise.
                unsafe { std::slice::from_raw_parts_mut(out.add(row * out_stride), rhs.cols()) }.fill(0.0);
            }
        }
        return;
    }
    // SAFETY: passed on; the instructions of the second are there where it is chosen.
    unsafe {
        match rhs {
            Right::F32(rhs) if readable_in_place(lhs, rhs) => in_place(isa, lhs, rhs, out, out_stride, write),
            Right::F32(rhs) => widened(isa, lhs, rhs, out, out_stride, write),
            #[cfg(target_arch = "x86_64")]
            Right::Bf16(rhs) if isa.multiplies_bf16() => {
                PAIRS.with_borrow_mut(|buffer| pairs::product(buffer, lhs, rhs, out, out_stride, write));
            }
            Right::Bf16(rhs) => widened(isa, lhs, rhs, out, out_stride, write),
        }
    }
}

/// Whether packing the right operand would cost more than reading it a few times where it lies.
fn readable_in_place(lhs: Matrix, rhs: Matrix) -> bool {
    lhs.rows <= 3 * micro::ROWS && !rhs.transposed && rhs.cols.is_multiple_of(pack::LANES)
}

/// [`product`] without packing.
///
/// # Safety
/// See [`product`]; and [`readable_in_place`].
unsafe fn in_place(isa: Isa, lhs: Matrix, rhs: Matrix, out: *mut f32, out_stride: usize, write: Write) {
    for first_col in (0..rhs.cols).step_by(COLS) {
        for first_depth in (0..lhs.cols).step_by(DEPTH) {
            let panel = Panel {
                values: &rhs.data[first_depth * rhs.stride + first_col..],
                step: rhs.stride,
                depths: first_depth..lhs.cols.min(first_depth + DEPTH),
                cols: COLS.min(rhs.cols - first_col),
                accumulate: write == Write::Add || first_depth > 0,
            };
            for first_row in (0..lhs.rows).step_by(micro::ROWS) {
                // SAFETY: inside the output, by the caller's promise.
                unsafe { panel.multiply(isa, lhs, first_row, out.add(first_col), out_stride) };
            }
        }
    }
}

/// Some columns of the right operand, up to `COLS`, for a range of depths.
struct Panel<'a> {
    values: &'a [f32],
    /// How far apart the depths are.
    step: usize,
    depths: Range<usize>,
    cols: usize,
    accumulate: bool,
}

impl Panel<'_> {
    /// The product of the row tile of `lhs` from `first_row` on, into those rows of `out`.
    ///
    /// # Safety
    /// See [`product`], for the panel's columns alone.
    unsafe fn multiply(&self, isa: Isa, lhs: Matrix, first_row: usize, out: *mut f32, out_stride: usize) {
        let (lhs_stride, lhs_step) = if lhs.transposed { (1, lhs.stride) } else { (lhs.stride, 1) };
        let tile = Tile {
            lhs: &lhs.data[first_row * lhs_stride + self.depths.start * lhs_step..],
            lhs_stride,
            lhs_step,
            panel: self.values,
            panel_step: self.step,
            depth: self.depths.len(),
            rows: micro::ROWS.min(lhs.rows - first_row),
            cols: self.cols,
            // SAFETY: inside the output, by the caller's promise.
            out: unsafe { out.add(first_row * out_stride) },
            out_stride,
            accumulate: self.accumulate,
        };
        // SAFETY: the tile lies inside the output, and `isa` was found on this CPU.
        unsafe { tile.run(isa) };
    }
}

/// [`product`] in f32, whatever the right operand is stored as.
///
/// # Safety
/// See [`product`].
unsafe fn widened<T: Value>(isa: Isa, lhs: Matrix, rhs: Matrix<T>, out: *mut f32, out_stride: usize, write: Write) {
    PANELS.with_borrow_mut(|panels| {
        for first_col in (0..rhs.cols).step_by(pack::BLOCK_COLS) {
            let block_cols = pack::BLOCK_COLS.min(rhs.cols - first_col);
            for first_depth in (0..lhs.cols).step_by(DEPTH) {
                let depths = first_depth..lhs.cols.min(first_depth + DEPTH);
                panels.pack(isa, rhs.col_range(first_col..first_col + block_cols).row_range(depths.clone()));
                for first_row in (0..lhs.rows).step_by(micro::ROWS) {
                    for panel_col in (0..block_cols).step_by(COLS) {
                        let cols = COLS.min(block_cols - panel_col);
                        let panel = Panel {
                            values: panels.panel(panel_col),
                            step: pack::vectors(cols) * pack::LANES,
                            depths: depths.clone(),
                            cols,
                            accumulate: write == Write::Add || first_depth > 0,
                        };
                        // SAFETY: inside the output, by the caller's promise.
                        unsafe { panel.multiply(isa, lhs, first_row, out.add(first_col + panel_col), out_stride) };
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
