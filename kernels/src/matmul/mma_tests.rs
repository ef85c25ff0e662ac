//! The products on matrix instructions: on a card by them, on whatever device wgpu finds emulated, and the same kernel.

use super::cube::Groups;
use super::mma::{Grouping, PART_OF_ROWS, product};
use crate::testing::cube::{OPERANDS, apart, column, floats, read};
use crate::testing::{close, halves};

/// Element (row, col) of a matrix `[rows, cols]`, stored as its transpose or not.
fn at(values: &[f32], [rows, cols]: [usize; 2], transposed: bool, row: usize, col: usize) -> f64 {
    f64::from(if transposed { values[col * rows + row] } else { values[row * cols + col] })
}

fn stored([rows, cols]: [usize; 2], transposed: bool) -> [usize; 2] {
    if transposed { [cols, rows] } else { [rows, cols] }
}

/// Compares `0.5 a b [m, n]`, or its sum with what is there, with the reference. Lines of b are `apart` elements further apart than
/// they are long.
#[track_caller]
fn assert_product([m, n, k]: [usize; 3], a_transposed: bool, b_transposed: bool, add: bool, further: usize) {
    let (a, b, c) = (halves(m * k, 1), halves(k * n, 2), halves(m * n, 3));
    let left = floats(&a, &stored([m, k], a_transposed));
    let right = stored([k, n], b_transposed);
    let right = apart(&b, &right, right[1] + further);
    let sums = floats(&c, &[m, n]);
    product((left, a_transposed), (right, b_transposed), &sums, [m, n, k], None, (0.5, add), OPERANDS);
    let expected: Vec<f64> = (0..m * n)
        .map(|i| {
            let (row, col) = (i / n, i % n);
            let terms = (0..k).map(|d| at(&a, [m, k], a_transposed, row, d) * at(&b, [k, n], b_transposed, d, col));
            0.5 * terms.sum::<f64>() + if add { f64::from(c[i]) } else { 0.0 }
        })
        .collect();
    close(&read(sums), &expected, 1e-6);
}

#[test]
fn products_of_frozen_matrices_equal_the_reference() {
    // Whole tiles, bands that are not full, lines that no 16 bytes divide, and less than one tile.
    for shape in [[128, 64, 64], [600, 200, 96], [70, 72, 40], [5, 3, 9]] {
        assert_product(shape, false, true, false, 0);
    }
    assert_product([70, 72, 40], false, true, false, 24);
    assert_product([70, 75, 37], false, false, true, 3);
}

#[test]
fn sums_over_many_rows_are_cut_into_parts() {
    assert_product([24, 16, 2 * PART_OF_ROWS + 40], true, false, false, 0);
    assert_product([20, 72, 100], true, true, true, 0);
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
        let groups = Groups { offsets: &offsets_on, rows };
        let gather = gathered.then_some((&sources_on, divisor));
        let [lines, cols] = stored([k, n], b_transposed);
        let right = apart(&b, &[4, lines, cols], cols + further);
        let out = floats(&vec![0.0; rows * n], &[rows, n]);
        let grouping = Some(Grouping { groups, gather });
        let left = (floats(&a, &[rows, k]), false);
        product(left, (right, b_transposed), &out, [rows, n, k], grouping, (1.0, false), OPERANDS);
        let expected: Vec<f64> = (0..rows * n)
            .map(|i| {
                let (row, col) = (i / n, i % n);
                let group = offsets.iter().rposition(|&start| start as usize <= row).expect("a group");
                let source = if gathered { sources[row] as usize / divisor } else { row };
                let matrix = &b[group * k * n..][..k * n];
                (0..k).map(|d| f64::from(a[source * k + d]) * at(matrix, [k, n], b_transposed, d, col)).sum()
            })
            .collect();
        close(&read(out), &expected, 1e-6);
    }
}
