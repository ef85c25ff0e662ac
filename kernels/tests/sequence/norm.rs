use burn::tensor::DType;
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::norm::{cpu, reference, rms_norm, rms_norm_residual};

use super::{
    assert_close, assert_gradient, dtypes, read_in, tensor, tolerance, values, values_in, weighted_sum, widen,
    with_threads,
};

const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 7], [5, 64], [17, 100], [130, 512], [33, 2816]];
const EPS: f64 = 1e-6;

#[test]
fn cpu_agrees_with_the_reference() {
    for [rows, dim] in SHAPES {
        let (x, dy, w) = (values(1, rows * dim), values(2, rows * dim), values(3, dim));
        for weight in [None, Some(&w[..])] {
            let wide = weight.map(widen);
            let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            cpu::forward(&x, weight, dim, EPS, None, &mut y);
            cpu::backward(&x, weight, &dy, dim, EPS, 1.0, &mut dx);
            assert_close("y", &y, &reference::forward(&widen(&x), wide.as_deref(), dim, EPS), 1e-6);
            let want = reference::backward(&widen(&x), wide.as_deref(), &widen(&dy), dim, EPS);
            assert_close("dx", &dx, &want, 2e-6);
        }
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let (x, dy, w) = (widen(&values(1, 21)), widen(&values(2, 21)), widen(&values(3, 7)));
    for weight in [None, Some(&w[..])] {
        let dx = reference::backward(&x, weight, &dy, 7, EPS);
        assert_gradient("dx", &x, &dx, |x| weighted_sum(&reference::forward(x, weight, 7, EPS), &dy));
    }
}

/// Every dtype of a norm's input with every one of its result.
fn dtype_pairs() -> impl Iterator<Item = (DType, DType)> {
    dtypes().into_iter().flat_map(|x| dtypes().into_iter().map(move |y| (x, y)))
}

#[test]
fn the_tensor_operation_has_the_reference_gradient() {
    for (x_dtype, y_dtype) in dtype_pairs() {
        for ([rows, dim], weighted) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
            let (x, dy) = (values_in(x_dtype, 1, rows * dim), values_in(y_dtype, 2, rows * dim));
            let w = values(3, dim);
            let weight = weighted.then_some(&w[..]);
            let at = tensor(&x, [rows, dim]).cast(x_dtype).require_grad();
            let y = rms_norm(at.clone(), weight.map(|w| tensor(w, [dim])), EPS, y_dtype);
            let wide = weight.map(widen);
            let want = reference::forward(&widen(&x), wide.as_deref(), dim, EPS);
            assert_close("y", &read_in(y_dtype, y.clone()), &want, tolerance(y_dtype, 1e-6));
            let gradients = pull_back(y, tensor(&dy, [rows, dim]).cast(y_dtype));
            let want = reference::backward(&widen(&x), wide.as_deref(), &widen(&dy), dim, EPS);
            assert_close("dx", &read_in(x_dtype, at.grad(&gradients).unwrap()), &want, tolerance(x_dtype, 2e-6));
        }
    }
}

#[test]
fn a_residual_and_a_scale_give_what_three_operations_give() {
    for ((x_dtype, y_dtype), scale) in dtype_pairs().flat_map(|pair| [(pair, 1.0), (pair, 0.625)]) {
        for [rows, dim] in SHAPES {
            let x = values_in(x_dtype, 1, rows * dim);
            let [residual, dy] = [2, 3].map(|seed| values_in(y_dtype, seed, rows * dim));
            let w = values(4, dim);
            let at = [(&x, x_dtype), (&residual, y_dtype)]
                .map(|(values, dtype)| tensor(values, [rows, dim]).cast(dtype).require_grad());
            let y = rms_norm_residual(at[0].clone(), tensor(&w, [dim]), EPS, at[1].clone(), scale);
            let normed = reference::forward(&widen(&x), Some(&widen(&w)), dim, EPS);
            let want: Vec<f64> =
                normed.iter().zip(&residual).map(|(a, &b)| (a + f64::from(b)) * f64::from(scale)).collect();
            assert_close("y", &read_in(y_dtype, y.clone()), &want, tolerance(y_dtype, 1e-6));
            let gradients = pull_back(y, tensor(&dy, [rows, dim]).cast(y_dtype));
            let wide_dy: Vec<f64> = dy.iter().map(|&dy| f64::from(dy) * f64::from(scale)).collect();
            let want = reference::backward(&widen(&x), Some(&widen(&w)), &wide_dy, dim, EPS);
            let [dx, d_residual] = at.map(|leaf| leaf.grad(&gradients).unwrap());
            assert_close("dx", &read_in(x_dtype, dx), &want, tolerance(x_dtype, 2e-6));
            assert_close("d_residual", &read_in(y_dtype, d_residual), &wide_dy, tolerance(y_dtype, 1e-7));
        }
    }
}

#[test]
fn a_row_of_zeros_stays_finite() {
    let (x, dy) = ([0.0; 8], values(1, 8));
    let (mut y, mut dx) = ([1.0; 8], [0.0; 8]);
    cpu::forward(&x, None, 8, EPS, None, &mut y);
    cpu::backward(&x, None, &dy, 8, EPS, 1.0, &mut dx);
    assert_eq!(y, [0.0; 8]);
    assert!(dx.iter().zip(&dy).all(|(dx, dy)| (dx - dy * 1e3).abs() <= 1e-3));
}

#[test]
fn threads_do_not_change_a_bit() {
    let [rows, dim] = [301, 512];
    let (x, dy, w) = (values(1, rows * dim), values(2, rows * dim), values(3, dim));
    let run = || {
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        cpu::forward(&x, Some(&w), dim, EPS, None, &mut y);
        cpu::backward(&x, Some(&w), &dy, dim, EPS, 1.0, &mut dx);
        (y, dx)
    };
    assert!(with_threads(1, run) == with_threads(2, run));
}
