use super::*;
use crate::testing::{close, randoms};

fn reference(lhs: &[f32], rhs: &[f32], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut out = vec![0f64; m * n];
    for i in 0..m {
        for j in 0..n {
            out[i * n + j] = (0..k).map(|p| lhs[i * k + p] as f64 * rhs[p * n + j] as f64).sum();
        }
    }
    out
}

fn transpose(data: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| data[i % rows * cols + i / rows]).collect()
}

/// The product written over what is there is `exact`, and added to itself twice that.
fn sets_and_adds(isa: Isa, lhs: Matrix, rhs: Right, exact: &[f64]) {
    let (m, n) = (lhs.rows(), rhs.cols());
    let mut out = vec![1f32; m * n];
    // SAFETY: `out` is m rows of n.
    unsafe { product(isa, lhs, rhs, out.as_mut_ptr(), n, Write::Set) };
    close(&out, exact, 1e-5);
    // SAFETY: as above.
    unsafe { product(isa, lhs, rhs, out.as_mut_ptr(), n, Write::Add) };
    let twice: Vec<f64> = exact.iter().map(|x| 2.0 * x).collect();
    close(&out, &twice, 1e-5);
}

#[test]
fn every_instruction_set_agrees_with_f64_on_odd_shapes() {
    for [m, n, k] in [
        [1, 1, 1],
        [7, 65, 3],
        [6, 64, 512],
        [13, 16, 513],
        [5, 130, 1100],
        [3, 200, 40],
        [100, 17, 64],
        [16, 192, 1100],
    ] {
        let (lhs, rhs) = (randoms(m * k, 1), randoms(k * n, 2));
        let exact = reference(&lhs, &rhs, [m, n, k]);
        let (lhs_t, rhs_t) = (transpose(&lhs, m, k), transpose(&rhs, k, n));
        for isa in Isa::available() {
            for right in [Matrix::new(&rhs, k, n), Matrix::new(&rhs_t, n, k).t()].map(Right::F32) {
                for left in [Matrix::new(&lhs, m, k), Matrix::new(&lhs_t, k, m).t()] {
                    sets_and_adds(isa, left, right, &exact);
                }
            }
        }
    }
}

/// A product's rows have the bits that they have alone and among others, on any number of threads.
fn rows_stand_alone(left: Matrix, right: Right, few: &[usize]) {
    let (m, n) = (left.rows(), right.cols());
    let mut all = vec![0f32; m * n];
    matmul(left, right, &mut all, Write::Set);
    for threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut parallel = vec![0f32; m * n];
        pool.install(|| par_matmul(&[(left, right)], &mut parallel, Write::Set));
        assert_eq!(all, parallel, "{threads} threads");
    }
    for &rows in few {
        let mut some = vec![0f32; rows * n];
        matmul(left.row_range(11..11 + rows), right, &mut some, Write::Set);
        assert_eq!(some, all[11 * n..(11 + rows) * n], "{rows} rows");
    }
    let mut one = [0f32];
    matmul(left.row_range(11..12), right.col_range(77..78), &mut one, Write::Set);
    assert_eq!(one[0], all[11 * n + 77]);
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    // A multiple of 16 columns: few rows then read the right operand in place, many have it packed.
    let [m, n, k] = [1000, 208, 700];
    let (lhs, rhs) = (randoms(m * k, 3), randoms(k * n, 4));
    rows_stand_alone(Matrix::new(&lhs, m, k), Matrix::new(&rhs, k, n).into(), &[1, 2, 5, 6, 7, 50]);
}

#[test]
fn an_empty_depth_writes_zeros_and_an_empty_side_nothing() {
    let mut out = vec![1f32; 6];
    matmul(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 3), &mut out, Write::Add);
    assert_eq!(out, [1.0; 6]);
    matmul(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 3), &mut out, Write::Set);
    assert_eq!(out, [0.0; 6]);
    let mut wide = vec![1f32; 600];
    par_matmul(&[(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 300).into())], &mut wide, Write::Set);
    assert_eq!(wide, [0.0; 600]);
    par_matmul(&[(Matrix::new(&[], 0, 2), Matrix::new(&[1.0; 6], 2, 3).into())], &mut [], Write::Set);
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// With the CPU's own instruction the left operand is rounded too; elsewhere it is not.
#[test]
fn a_bf16_right_operand_gives_the_product_of_what_is_stored() {
    for [m, n, k] in [[1, 1, 1], [7, 65, 3], [6, 64, 512], [13, 16, 513], [5, 130, 1101], [3, 200, 40], [20, 80, 96]] {
        let (lhs, rhs) = (randoms(m * k, 5), rounded(&randoms(k * n, 6)));
        let rhs_t: Vec<bf16> = rounded(&transpose(&widened(&rhs), k, n));
        for isa in Isa::available() {
            let left = if isa.multiplies_bf16() { widened(&rounded(&lhs)) } else { lhs.clone() };
            let exact = reference(&left, &widened(&rhs), [m, n, k]);
            for right in [Matrix::new(&rhs, k, n), Matrix::new(&rhs_t, n, k).t()].map(Right::Bf16) {
                sets_and_adds(isa, Matrix::new(&lhs, m, k), right, &exact);
            }
        }
    }
}

#[test]
fn a_row_of_a_bf16_product_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    let [m, n, k] = [300, 200, 701];
    let (lhs, rhs) = (randoms(m * k, 7), rounded(&randoms(k * n, 8)));
    rows_stand_alone(Matrix::new(&lhs, m, k), Right::Bf16(Matrix::new(&rhs, k, n)), &[1, 5, 7, 50]);
}

#[test]
fn infinities_and_nan_come_through_bf16() {
    let right = rounded(&[1.0; 64]);
    for (value, expected) in
        [(f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, f32::NEG_INFINITY), (f32::NAN, f32::NAN)]
    {
        let mut left = [1f32; 64];
        left[40] = value;
        let mut out = [0f32];
        matmul(Matrix::new(&left, 1, 64), Right::Bf16(Matrix::new(&right, 64, 1)), &mut out, Write::Set);
        assert_eq!(out[0].to_bits() & 0x7fff_ffff >= 0x7f80_0000, expected.to_bits() & 0x7fff_ffff >= 0x7f80_0000);
        assert_eq!(out[0].is_nan(), expected.is_nan());
    }
}
