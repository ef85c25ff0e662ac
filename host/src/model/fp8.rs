//! What a server does to activations before it multiplies them with E4M3 weights: each token's row is scaled so that its
//! largest value is the largest E4M3 one, and rounded. For judging such a checkpoint; nothing here has gradients.

use super::adapter::{tensor, values};
use super::codes::{E4M3_MAX, e4m3, from_e4m3};
use super::experts::each_expert;
use burn::tensor::Tensor;
use tunehost_kernels::glu::geglu;
use tunehost_kernels::linear::lora_linear;
use tunehost_kernels::moe::Routing;

/// `x` `[n, width]` with each row rounded.
pub fn round_rows(x: Tensor<2>) -> Tensor<2> {
    let [n, width] = x.dims();
    let mut rows = values(&x);
    for row in rows.chunks_mut(width) {
        let largest = row.iter().fold(0f32, |max, value| max.max(value.abs()));
        if largest == 0.0 {
            continue;
        }
        let scale = largest / E4M3_MAX;
        row.iter_mut().for_each(|value| *value = from_e4m3(e4m3(*value / scale)) * scale);
    }
    tensor([n, width], rows, &x.device())
}

/// As [`tunehost_kernels::moe::experts`], with the experts' inputs and what their gate and up make of them rounded.
pub fn experts(x: Tensor<2>, routing: &Routing, gate_up: Tensor<3>, down: Tensor<3>) -> Tensor<2> {
    let [n, hidden] = x.dims();
    let device = x.device();
    let x = round_rows(x);
    let mut out = vec![0f32; n * hidden];
    for chosen in each_expert(routing) {
        let (gate, up) = chosen.gate_and_up(chosen.rows(&x), &gate_up);
        let y = lora_linear(round_rows(geglu(gate, up)), chosen.matrix(&down), None);
        for ((row, token), weight) in values(&y).chunks(hidden).zip(chosen.tokens).zip(chosen.weights) {
            let sum = &mut out[token * hidden..][..hidden];
            sum.iter_mut().zip(row).for_each(|(sum, y)| *sum += weight * y);
        }
    }
    tensor([n, hidden], out, &device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunehost_kernels::moe;

    #[test]
    fn a_row_keeps_its_largest_value() {
        let device = crate::device::open("cpu").unwrap();
        let x = vec![0.1, -3.0, 1.001, 0.0, 0.0, 0.0];
        let rounded = values(&round_rows(tensor([2, 3], x.clone(), &device)));
        assert_eq!([rounded[1], rounded[3]], [-3.0, 0.0]);
        for (value, rounded) in x.iter().zip(&rounded) {
            assert!((value - rounded).abs() <= value.abs() / 16.0, "{value} became {rounded}");
        }
        assert_ne!(rounded[2], x[2]);
    }

    #[test]
    fn experts_are_those_of_the_kernel_but_for_the_rounding() {
        let device = crate::device::open("cpu").unwrap();
        let (n, hidden, inner, count, top_k) = (5, 8, 4, 3, 2);
        let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let x = tensor([n, hidden], wave(n * hidden, 0.7), &device);
        let gate_up = tensor([count, 2 * inner, hidden], wave(count * 2 * inner * hidden, 0.31), &device);
        let down = tensor([count, hidden, inner], wave(count * hidden * inner, 0.53), &device);
        let routing = moe::route(
            tensor([n, count], wave(n * count, 1.3), &device),
            tensor([count], vec![1.0; count], &device),
            top_k,
        );
        let exact = values(&moe::experts(x.clone(), &routing, gate_up.clone(), down.clone()));
        let rounded = values(&experts(x, &routing, gate_up, down));
        let largest = exact.iter().fold(0f32, |max, v| max.max(v.abs()));
        let worst = exact.iter().zip(&rounded).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(worst > 0.0 && worst < 0.1 * largest, "{worst} of {largest}");
    }
}
