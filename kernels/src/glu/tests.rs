use super::*;
use crate::cotangent::pull_back;
use crate::testing::{activations, check_gradient, close, device, halves, randoms, same_on_one_and_two_threads, wide};
use burn::tensor::{DType, TensorData};

fn spread(len: usize, seed: u64) -> Vec<f32> {
    randoms(len, seed).iter().map(|x| 6.0 * x).collect()
}

#[test]
fn reference_gradients_match_finite_differences() {
    let (gate, up, d_out) = (wide(&spread(40, 1)), wide(&spread(40, 2)), wide(&randoms(40, 3)));
    let value =
        |gate: &[f64], up: &[f64]| reference::forward(gate, up).iter().zip(&d_out).map(|(y, d)| y * d).sum::<f64>();
    let (d_gate, d_up) = reference::backward(&gate, &up, &d_out);
    check_gradient(&gate, &d_gate, |gate| value(gate, &up));
    check_gradient(&up, &d_up, |up| value(&gate, up));
}

#[test]
fn output_and_gradients_through_autodiff_match_the_reference() {
    let device = device().autodiff();
    // The exponential of a GPU is off by a few units in the last place.
    for (dtype, tolerance) in activations(2e-6) {
        for [rows, cols] in [[1, 1], [3, 17], [200, 100]] {
            let [gate, up, d_out] = [1, 2, 3].map(|seed| match dtype {
                DType::F32 => spread(rows * cols, seed),
                _ => halves(rows * cols, seed).iter().map(|x| 4.0 * x).collect(),
            });
            let tensor = |values: &[f32]| {
                Tensor::<2>::from_data(TensorData::new(values.to_vec(), [rows, cols]), &device).cast(dtype)
            };
            let values = |tensor: Tensor<2>| {
                assert_eq!(tensor.dtype(), dtype);
                tensor.cast(DType::F32).into_data().try_into_vec::<f32>().unwrap()
            };
            let (gate_tensor, up_tensor) = (tensor(&gate).require_grad(), tensor(&up).require_grad());
            let out = geglu(gate_tensor.clone(), up_tensor.clone());
            close(&values(out.clone()), &reference::forward(&wide(&gate), &wide(&up)), tolerance);
            let gradients = pull_back(out, tensor(&d_out));
            let (d_gate, d_up) = reference::backward(&wide(&gate), &wide(&up), &wide(&d_out));
            close(&values(gate_tensor.grad(&gradients).unwrap()), &d_gate, tolerance);
            close(&values(up_tensor.grad(&gradients).unwrap()), &d_up, tolerance);
        }
    }
}

#[test]
fn gelu_is_accurate_to_float_precision_everywhere() {
    let gate: Vec<f32> = (-4000..=4000).map(|i| i as f32 * 5e-3).collect();
    let out = cpu::geglu(&gate, &vec![1.0; gate.len()]);
    for (&x, &y) in gate.iter().zip(&out) {
        let exact = reference::gelu(x as f64);
        assert!((y as f64 - exact).abs() <= 3e-7 * exact.abs().max(1.0), "gelu({x}) = {y}, not {exact}");
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let (gate, up) = (spread(50_001, 1), spread(50_001, 2));
    same_on_one_and_two_threads(|| (cpu::geglu(&gate, &up), cpu::geglu_backward(&gate, &up, &gate)));
}
