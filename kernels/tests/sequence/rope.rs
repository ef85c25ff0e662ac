use burn::tensor::{DType, Device, Tensor};
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::norm::reference as norm;
use tunehost_kernels::rope::{RopeError, RopeKind, RopeSpec, RopeTable, reference, rms_norm_rope, rope};

use super::{
    assert_close, assert_gradient, device, dtypes, read, read_in, tensor, tolerance, values, values_in, weighted_sum,
    widen, with_threads,
};

const PROPORTIONAL: RopeKind = RopeKind::Proportional { partial_rotary_factor: 0.25, factor: 1.0 };

fn spec(head_dim: usize, kind: RopeKind) -> RopeSpec {
    RopeSpec { head_dim, theta: 10_000.0, kind }
}

fn table(spec: &RopeSpec, positions: &[u32]) -> RopeTable {
    RopeTable::new(spec, positions, &device()).unwrap()
}

/// Two documents, so that positions start again.
fn positions(tokens: usize) -> Vec<u32> {
    (0..tokens as u32 / 3).chain(0..).take(tokens).collect()
}

/// Angles are rounded to f32: up to 50 radians, half a unit in the last place is 2e-6.
const TOLERANCE: f64 = 1e-5;

/// Tokens, heads and head sizes, each in every dtype.
fn shapes() -> impl Iterator<Item = ((usize, usize, usize), DType)> {
    let shapes = [(1, 1, 2), (7, 3, 16), (50, 8, 64), (33, 2, 512)];
    shapes.into_iter().flat_map(|shape| dtypes().into_iter().map(move |dtype| (shape, dtype)))
}

/// What `operation` makes of `x`, and the gradient for that of its result.
fn both_ways(
    dtype: DType,
    shape @ [tokens, heads, head_dim]: [usize; 3],
    x: &[f32],
    dy: &[f32],
    operation: impl Fn(Tensor<3>) -> Tensor<3>,
) -> (Vec<f32>, Vec<f32>) {
    let x = tensor(x, shape).cast(dtype).require_grad();
    let y = operation(x.clone());
    let flat = [tokens, heads * head_dim];
    let gradients = pull_back(y.clone().reshape(flat), tensor(dy, flat).cast(dtype));
    (read_in(dtype, y), read_in(dtype, x.grad(&gradients).unwrap()))
}

#[test]
fn the_tensor_operation_agrees_with_the_reference_both_ways() {
    for ((tokens, heads, head_dim), dtype) in shapes().chain(dtypes().into_iter().map(|dtype| ((70, 16, 256), dtype))) {
        for kind in [RopeKind::Default, PROPORTIONAL] {
            let spec = spec(head_dim, kind);
            let (positions, frequencies) = (positions(tokens), spec.frequencies().unwrap());
            let shape = [tokens, heads, head_dim];
            let [x, dy] = [1, 2].map(|seed| values_in(dtype, seed, tokens * heads * head_dim));
            let (y, dx) = both_ways(dtype, shape, &x, &dy, |x| rope(x, &table(&spec, &positions)));
            let want = reference::forward(&widen(&x), &positions, &frequencies, heads);
            assert_close("y", &y, &want, tolerance(dtype, TOLERANCE));
            let want = reference::backward(&widen(&dy), &positions, &frequencies, heads);
            assert_close("dx", &dx, &want, tolerance(dtype, TOLERANCE));
        }
    }
}

#[test]
fn with_the_norm_before_it_the_rotation_agrees_with_both_references() {
    const EPS: f64 = 1e-6;
    for ((tokens, heads, head_dim), dtype) in shapes() {
        let spec = spec(head_dim, PROPORTIONAL);
        let (positions, frequencies) = (positions(tokens), spec.frequencies().unwrap());
        let (shape, count) = ([tokens, heads, head_dim], tokens * heads * head_dim);
        let (x, dy, weight) = (values_in(dtype, 1, count), values_in(dtype, 2, count), values(3, head_dim));
        let (y, dx) = both_ways(dtype, shape, &x, &dy, |x| {
            rms_norm_rope(x, tensor(&weight, [head_dim]), EPS, &table(&spec, &positions))
        });
        let normed = norm::forward(&widen(&x), Some(&widen(&weight)), head_dim, EPS);
        let want = reference::forward(&normed, &positions, &frequencies, heads);
        assert_close("y", &y, &want, tolerance(dtype, TOLERANCE));
        let turned_back = reference::backward(&widen(&dy), &positions, &frequencies, heads);
        let want = norm::backward(&widen(&x), Some(&widen(&weight)), &turned_back, head_dim, EPS);
        assert_close("dx", &dx, &want, tolerance(dtype, TOLERANCE));
    }
}

#[test]
fn the_reference_gradient_is_the_slope() {
    let (x, dy) = (widen(&values(1, 5 * 2 * 8)), widen(&values(2, 5 * 2 * 8)));
    let frequencies = spec(8, RopeKind::Default).frequencies().unwrap();
    let dx = reference::backward(&dy, &positions(5), &frequencies, 2);
    let forward = |x: &[f64]| reference::forward(x, &positions(5), &frequencies, 2);
    assert_gradient("dx", &x, &dx, |x| weighted_sum(&forward(x), &dy));
}

#[test]
fn proportional_rotates_the_first_pairs_at_the_full_head_size() {
    let frequencies = RopeSpec { head_dim: 512, theta: 1e6, kind: PROPORTIONAL }.frequencies().unwrap();
    assert_eq!(frequencies.len(), 256);
    assert_eq!(frequencies.iter().filter(|&&f| f > 0.0).count(), 64);
    assert!((frequencies[63] - 1e6f64.powf(-126.0 / 512.0)).abs() < 1e-15);
    let halved = RopeKind::Proportional { partial_rotary_factor: 0.25, factor: 2.0 };
    let halved = RopeSpec { head_dim: 512, theta: 1e6, kind: halved }.frequencies().unwrap();
    assert!(halved.iter().zip(&frequencies).all(|(half, full)| 2.0 * half == *full));

    let (x, tokens) = (values(1, 4 * 512), positions(4));
    let spec = RopeSpec { head_dim: 512, theta: 1e6, kind: PROPORTIONAL };
    let y = read(rope(tensor(&x, [4, 1, 512]), &table(&spec, &tokens)));
    let passes_through = |i: usize| (64..256).contains(&(i % 256));
    assert!((0..x.len()).filter(|&i| passes_through(i)).all(|i| x[i] == y[i]));
    assert!((3 * 512..4 * 512).filter(|&i| !passes_through(i)).all(|i| x[i] != y[i]));
}

#[test]
fn threads_do_not_change_a_bit() {
    let [tokens, heads, head_dim] = [203, 4, 64];
    let x = values(1, tokens * heads * head_dim);
    let table = table(&spec(head_dim, RopeKind::Default), &positions(tokens));
    let run = || read(rope(tensor(&x, [tokens, heads, head_dim]), &table));
    assert!(with_threads(1, run) == with_threads(2, run));
}

#[test]
fn a_wrong_field_is_named() {
    let error = |spec: RopeSpec| RopeTable::new(&spec, &[0], &Device::flex()).unwrap_err();
    assert_eq!(error(spec(7, RopeKind::Default)), RopeError::HeadDim(7));
    assert_eq!(error(RopeSpec { theta: 0.0, ..spec(8, RopeKind::Default) }), RopeError::Theta(0.0));
    let kind = RopeKind::Proportional { partial_rotary_factor: 1.5, factor: 1.0 };
    assert_eq!(error(spec(8, kind)), RopeError::PartialRotaryFactor(1.5));
    let kind = RopeKind::Proportional { partial_rotary_factor: 0.5, factor: 0.0 };
    assert_eq!(error(spec(8, kind)), RopeError::Factor(0.0));
}
