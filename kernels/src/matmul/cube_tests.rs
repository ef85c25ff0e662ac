//! The products by both kernels. That on matrix instructions is on a card by them, on whatever device wgpu finds emulated, and the same
//! kernel.

use super::PART_OF_ROWS;
use super::cube::{Grouping, Groups, Product};
use crate::resolve::cube::Math;
use crate::testing::cube::{ON_MATRIX_UNITS, apart, column, read, rounded};
use crate::testing::{activations, close, halves};
use burn::tensor::DType;

/// Compares products of left matrices, and with results, of every dtype that operations pass to each other with the reference. On matrix
/// instructions that is f32 alone but with `in_all`: of 16 bits the tests of the linear layer are, and the emulation takes long to compile.
#[track_caller]
fn assert_all<'a>(expected: &[f64], shape: [usize; 2], in_all: bool, product: impl Fn(DType) -> Product<'a>) {
    let on_matrix_units = activations(1e-6).into_iter().filter(|(dtype, _)| in_all || *dtype == DType::F32);
    let without = activations(1e-6).into_iter().map(|given| (given, Math::F32));
    for ((dtype, tolerance), math) in without.chain(on_matrix_units.map(|given| (given, ON_MATRIX_UNITS))) {
        let out = rounded(&vec![f32::NAN; expected.len()], &shape, dtype);
        product(dtype).write(math, &out);
        close(&read(out), expected, tolerance);
    }
}

/// Element (row, col) of a matrix `[rows, cols]`, stored as its transpose or not.
fn at(values: &[f32], [rows, cols]: [usize; 2], transposed: bool, row: usize, col: usize) -> f64 {
    f64::from(if transposed { values[col * rows + row] } else { values[row * cols + col] })
}

fn stored([rows, cols]: [usize; 2], transposed: bool) -> [usize; 2] {
    if transposed { [cols, rows] } else { [rows, cols] }
}

/// Compares `0.5 (a b + c d)`, of which the second product sums over `k2`, with the reference. Lines of b are `further` elements
/// further apart than they are long.
#[track_caller]
fn assert_product([m, n, k, k2]: [usize; 4], a_transposed: bool, b_transposed: bool, further: usize) {
    let operands = |k: usize, seed| (halves(m * k, seed), halves(k * n, seed + 1));
    let (first, second) = (operands(k, 1), operands(k2, 3));
    let sum = |(a, b): &(Vec<f32>, Vec<f32>), k: usize, row, col| {
        let term = |d| at(a, [m, k], a_transposed, row, d) * at(b, [k, n], b_transposed, d, col);
        (0..k).map(term).sum::<f64>()
    };
    let expected: Vec<f64> =
        (0..m * n).map(|i| 0.5 * (sum(&first, k, i / n, i % n) + sum(&second, k2, i / n, i % n))).collect();
    let tensors = |(a, b): &(Vec<f32>, Vec<f32>), k: usize, further, dtype| {
        let right = stored([k, n], b_transposed);
        [rounded(a, &stored([m, k], a_transposed), dtype), apart(b, &right, right[1] + further)]
    };
    assert_all(&expected, [m, n], k > PART_OF_ROWS, |dtype| {
        let [a, b] = tensors(&first, k, further, dtype);
        let beside = (k2 > 0).then(|| tensors(&second, k2, 0, dtype));
        let (a, b, shape) = ((a, a_transposed), (b, b_transposed), [m, n, k]);
        Product { a, b, shape, beside, grouping: None, factor: 0.5 }
    });
}

#[test]
fn products_of_frozen_matrices_equal_the_reference() {
    // Whole tiles, bands that are not full, lines that no 16 bytes divide, and less than one tile.
    for [m, n, k] in [[128, 64, 64], [600, 200, 96], [70, 72, 40], [5, 3, 9]] {
        assert_product([m, n, k, 0], false, true, 0);
    }
    assert_product([70, 72, 40, 0], false, true, 24);
    assert_product([70, 75, 37, 0], false, false, 3);
}

#[test]
fn a_second_product_is_added_in_the_same_pass() {
    assert_product([70, 72, 40, 8], false, true, 0);
    assert_product([70, 72, 64, 40], false, false, 8);
}

#[test]
fn sums_over_many_rows_are_cut_into_parts() {
    assert_product([24, 16, 2 * PART_OF_ROWS + 40, 0], true, false, 0);
    assert_product([20, 72, 100, 0], true, true, 0);
}

#[test]
fn grouped_rows_meet_the_matrix_of_their_group_wherever_they_come_from() {
    let (k, n, divisor) = (40, 72, 2);
    // A group without rows, one of a row, one of more than a tile.
    let offsets = [0u32, 0, 1, 90, 100];
    let rows = 100;
    let b = halves(4 * k * n, 3);
    let a = halves(rows * k, 4);
    // Some order of places, two of which come from each row.
    let sources: Vec<u32> = (0..rows as u32).map(|row| row * 37 % rows as u32).collect();
    for (b_transposed, gathered, further) in [(true, true, 0), (false, false, 8)] {
        let offsets_on = column(&offsets);
        let sources_on = column(&sources);
        let gather = gathered.then_some((&sources_on, divisor));
        let [lines, cols] = stored([k, n], b_transposed);
        let expected: Vec<f64> = (0..rows * n)
            .map(|i| {
                let (row, col) = (i / n, i % n);
                let group = offsets.iter().rposition(|&start| start as usize <= row).expect("a group");
                let source = if gathered { sources[row] as usize / divisor } else { row };
                let matrix = &b[group * k * n..][..k * n];
                (0..k).map(|d| f64::from(a[source * k + d]) * at(matrix, [k, n], b_transposed, d, col)).sum()
            })
            .collect();
        assert_all(&expected, [rows, n], false, |dtype| {
            let grouping = Some(Grouping { groups: Groups { offsets: &offsets_on, rows }, gather });
            let right = apart(&b, &[4, lines, cols], cols + further);
            let (a, b) = ((rounded(&a, &[rows, k], dtype), false), (right, b_transposed));
            Product { a, b, shape: [rows, n, k], beside: None, grouping, factor: 1.0 }
        });
    }
}
