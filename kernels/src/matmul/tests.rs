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

#[test]
fn every_instruction_set_agrees_with_f64_on_odd_shapes() {
    for [m, n, k] in [[1, 1, 1], [7, 65, 3], [6, 64, 512], [13, 16, 513], [5, 130, 1100], [3, 200, 40], [100, 17, 64]] {
        let (lhs, rhs) = (randoms(m * k, 1), randoms(k * n, 2));
        let exact = reference(&lhs, &rhs, [m, n, k]);
        let rhs_t = transpose(&rhs, k, n);
        for isa in Isa::available() {
            for right in [Matrix::new(&rhs, k, n), Matrix::new(&rhs_t, n, k).t()] {
                let mut out = vec![1f32; m * n];
                // SAFETY: `out` is m rows of n.
                unsafe { product(isa, Matrix::new(&lhs, m, k), right, out.as_mut_ptr(), n, Write::Set) };
                close(&out, &exact, 1e-5);
                // SAFETY: as above.
                unsafe { product(isa, Matrix::new(&lhs, m, k), right, out.as_mut_ptr(), n, Write::Add) };
                let twice: Vec<f64> = exact.iter().map(|x| 2.0 * x).collect();
                close(&out, &twice, 1e-5);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads() {
    let [m, n, k] = [1000, 200, 700];
    let (lhs, rhs) = (randoms(m * k, 3), randoms(k * n, 4));
    let (left, right) = (Matrix::new(&lhs, m, k), Matrix::new(&rhs, k, n));
    let mut all = vec![0f32; m * n];
    matmul(left, right, &mut all, Write::Set);
    for threads in [1, 2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut parallel = vec![0f32; m * n];
        pool.install(|| par_matmul(&[(left, right)], &mut parallel, Write::Set));
        assert_eq!(all, parallel, "{threads} threads");
    }
    for rows in [1, 2, 5, 6, 7, 50] {
        let mut some = vec![0f32; rows * n];
        matmul(left.row_range(11..11 + rows), right, &mut some, Write::Set);
        assert_eq!(some, all[11 * n..(11 + rows) * n], "{rows} rows");
    }
    let mut one = [0f32];
    matmul(left.row_range(11..12), right.col_range(77..78), &mut one, Write::Set);
    assert_eq!(one[0], all[11 * n + 77]);
}

#[test]
fn an_empty_depth_writes_zeros_and_an_empty_side_nothing() {
    let mut out = vec![1f32; 6];
    matmul(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 3), &mut out, Write::Add);
    assert_eq!(out, [1.0; 6]);
    matmul(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 3), &mut out, Write::Set);
    assert_eq!(out, [0.0; 6]);
    par_matmul(&[(Matrix::new(&[], 0, 2), Matrix::new(&[1.0; 6], 2, 3))], &mut [], Write::Set);
}
