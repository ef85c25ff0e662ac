use super::*;
use crate::matmul::Weights;
use crate::testing::{activations, check_gradient, close, device, halves, randoms, same_on_one_and_two_threads, wide};
use burn::tensor::{Device, TensorData};

fn tensor<const D: usize>(values: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_into_vec().unwrap()
}

#[test]
fn route_reference_gradient_matches_finite_differences() {
    let (n, count, top_k) = (4, 6, 3);
    let logits: Vec<f64> = wide(&randoms(n * count, 1)).iter().map(|z| 3.0 * z).collect();
    let scale: Vec<f64> = wide(&randoms(count, 2)).iter().map(|s| s + 1.5).collect();
    let d_weights = wide(&randoms(n * top_k, 3));
    let (_, experts) = reference::route(&logits, &scale, top_k);
    let gradient = reference::route_backward(&logits, &scale, &experts, &d_weights, top_k);
    check_gradient(&logits, &gradient, |logits| {
        reference::route(logits, &scale, top_k).0.iter().zip(&d_weights).map(|(w, d)| w * d).sum()
    });
}

#[test]
fn route_and_its_gradient_through_autodiff_match_the_reference() {
    let device = device().autodiff();
    for (n, count, top_k) in [(1, 1, 1), (1, 16, 4), (130, 16, 4), (65, 5, 5), (40, 128, 8)] {
        let logits: Vec<f32> = randoms(n * count, 1).iter().map(|z| 4.0 * z).collect();
        let scale: Vec<f32> = randoms(count, 2).iter().map(|s| s + 1.5).collect();
        let d_weights = randoms(n * top_k, 3);
        let logits_tensor = tensor(&logits, [n, count], &device).require_grad();
        let routing = route(logits_tensor.clone(), tensor(&scale, [count], &device), top_k);
        let (weights, experts) = reference::route(&wide(&logits), &wide(&scale), top_k);
        let chosen: Vec<i32> = routing.experts.into_data().try_into_vec().unwrap();
        assert_eq!(chosen, experts.iter().map(|&e| e as i32).collect::<Vec<_>>());
        close(&values(routing.weights.clone()), &weights, 1e-6);
        let gradients = (routing.weights * tensor(&d_weights, [n, top_k], &device)).sum().backward();
        let exact = reference::route_backward(&wide(&logits), &wide(&scale), &experts, &wide(&d_weights), top_k);
        close(&values(logits_tensor.grad(&gradients).unwrap()), &exact, 1e-6);
    }
}

#[test]
fn of_equal_logits_the_lower_expert_comes_first() {
    let (weights, experts) = cpu::route(&[1.0, 2.0, 2.0, 1.0, 2.0], &[1.0; 5], 4);
    assert_eq!(experts, [1, 2, 4, 0]);
    assert_eq!(weights[0], weights[2]);
    // Infinitely unlikely experts, and more of them chosen than there are likely ones.
    let (weights, experts) = cpu::route(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY], &[1.0; 3], 2);
    assert_eq!((experts[0], experts[1]), (1, 0));
    assert!(weights[0] == 1.0 && weights[1] < 1e-30);
}

#[test]
fn nan_logits_choose_different_experts_and_show_in_the_weights() {
    let (weights, experts) = cpu::route(&[f32::NAN; 3], &[1.0; 3], 2);
    assert_eq!(experts, [0, 1]);
    assert!(weights.iter().all(|weight| weight.is_nan()));
}

struct Case {
    x: Vec<f32>,
    weights: Vec<f32>,
    experts: Vec<i32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    d_out: Vec<f32>,
    n: usize,
    top_k: usize,
    count: usize,
    hidden: usize,
    intermediate: usize,
}

/// `choose(token, slot)` is the expert of a token's slot.
fn case([n, top_k, count, hidden, intermediate]: [usize; 5], choose: impl Fn(usize, usize) -> usize) -> Case {
    let places = || (0..n).flat_map(|token| (0..top_k).map(move |slot| (token, slot)));
    Case {
        x: halves(n * hidden, 1),
        weights: randoms(n * top_k, 2),
        experts: places().map(|(token, slot)| choose(token, slot) as i32).collect(),
        gate_up: randoms(count * 2 * intermediate * hidden, 3),
        down: randoms(count * hidden * intermediate, 4),
        d_out: halves(n * hidden, 5),
        n,
        top_k,
        count,
        hidden,
        intermediate,
    }
}

fn cases() -> Vec<Case> {
    vec![
        case([1, 1, 1, 1, 1], |_, _| 0),
        case([1, 2, 4, 9, 5], |_, slot| 3 - slot),
        // One expert takes all rows, more than a tile of them, the others none.
        case([300, 1, 3, 20, 7], |_, _| 1),
        // Every expert is chosen by every token.
        case([17, 5, 5, 33, 18], |token, slot| (token + slot) % 5),
        // Expert 0 gets nothing.
        case([50, 2, 6, 70, 66], |token, slot| 1 + (token * 7 + slot * 2) % 5),
        case([5, 2, 3, 513, 130], |token, slot| (token + slot) % 3),
    ]
}

impl Case {
    fn bank(&self) -> cpu::Bank<'_> {
        cpu::Bank {
            gate_up: Weights::F32(&self.gate_up),
            down: Weights::F32(&self.down),
            count: self.count,
            hidden: self.hidden,
            intermediate: self.intermediate,
        }
    }

    fn choice(&self) -> cpu::Choice<'_> {
        cpu::Choice { weights: &self.weights, experts: &self.experts, top_k: self.top_k }
    }

    fn reference(&self) -> (reference::Bank, Vec<usize>) {
        let bank = reference::Bank {
            gate_up: wide(&self.gate_up),
            down: wide(&self.down),
            hidden: self.hidden,
            intermediate: self.intermediate,
        };
        (bank, self.experts.iter().map(|&e| e as usize).collect())
    }

    /// The result, and the gradients of x and of the weights.
    fn expected(&self) -> (Vec<f64>, (Vec<f64>, Vec<f64>)) {
        let ((bank, experts), x, weights) = (self.reference(), wide(&self.x), wide(&self.weights));
        let out = bank.forward(&x, &weights, &experts, self.top_k);
        (out, bank.backward(&x, &weights, &experts, self.top_k, &wide(&self.d_out)))
    }
}

#[test]
fn experts_reference_gradients_match_finite_differences() {
    let case = case([4, 2, 3, 5, 3], |token, slot| (token + slot) % 3);
    let (bank, experts) = case.reference();
    let (x, weights, d_out) = (wide(&case.x), wide(&case.weights), wide(&case.d_out));
    let value = |x: &[f64], weights: &[f64]| {
        bank.forward(x, weights, &experts, 2).iter().zip(&d_out).map(|(y, d)| y * d).sum::<f64>()
    };
    let (d_x, d_weights) = bank.backward(&x, &weights, &experts, 2, &d_out);
    check_gradient(&x, &d_x, |x| value(x, &weights));
    check_gradient(&weights, &d_weights, |weights| value(&x, weights));
}

#[test]
fn experts_and_their_gradients_through_autodiff_match_the_reference() {
    let plain = device();
    let device = plain.clone().autodiff();
    for (case, (dtype, tolerance)) in
        cases().iter().flat_map(|case| activations(1e-5).into_iter().map(move |to| (case, to)))
    {
        let Case { n, top_k, count, hidden, intermediate, .. } = *case;
        let x = tensor(&case.x, [n, hidden], &device).cast(dtype).require_grad();
        let weights = tensor(&case.weights, [n, top_k], &device).require_grad();
        let chosen =
            Tensor::<2, Int>::from_data(TensorData::new(case.experts.clone(), [n, top_k]), (&device, DType::I32));
        let routing = Routing { weights: weights.clone(), experts: chosen };
        let out = experts(
            x.clone(),
            &routing,
            tensor(&case.gate_up, [count, 2 * intermediate, hidden], &plain),
            tensor(&case.down, [count, hidden, intermediate], &plain),
        );
        let (expected, exact) = case.expected();
        close(&values(out.clone()), &expected, tolerance);
        let gradients = (out * tensor(&case.d_out, [n, hidden], &device).cast(dtype)).sum().backward();
        let [d_x, d_weights] = [&x, &weights].map(|tensor| tensor.grad(&gradients).unwrap());
        assert_eq!([d_x.dtype(), d_weights.dtype()], [dtype, DType::F32]);
        close(&values(d_x), &exact.0, tolerance);
        close(&values(d_weights), &exact.1, tolerance);
    }
}

/// The kernels themselves, those on matrix instructions as CUDA devices run them or emulated, with tokens in chunks that do not divide them.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[test]
fn experts_in_chunks_and_on_matrix_instructions_match_the_reference() {
    use crate::resolve::cube::Math;
    use crate::testing::cube::{ON_MATRIX_UNITS, OPERANDS, choices, floats, read, rounded};
    let (cases, half) = (cases(), OPERANDS.0);
    let runs = [
        (&cases[3], Math::F32, half, 7),
        (&cases[3], ON_MATRIX_UNITS, half, 7),
        (&cases[4], ON_MATRIX_UNITS, DType::F32, 1_000),
    ];
    for (case, math, dtype, chunk_tokens) in runs {
        let Case { n, top_k, count, hidden, intermediate, .. } = *case;
        let call = || {
            let x = rounded(&case.x, &[n, hidden], dtype);
            let routing = [floats(&case.weights, &[n, top_k]), choices(&case.experts, &[n, top_k])];
            let gate_up = floats(&case.gate_up, &[count, 2 * intermediate, hidden]);
            let down = floats(&case.down, &[count, hidden, intermediate]);
            let mut call = cube::Call::new(x, routing, [gate_up, down], math);
            call.chunk_tokens = chunk_tokens;
            call
        };
        let (expected, exact) = case.expected();
        let out = call().forward();
        assert_eq!(out.dtype, dtype);
        close(&read(out), &expected, 3e-3);
        let (d_x, d_weights) = call().backward(rounded(&case.d_out, &[n, hidden], dtype));
        assert_eq!([d_x.dtype, d_weights.dtype], [dtype, DType::F32]);
        close(&read(d_x), &exact.0, 3e-3);
        close(&read(d_weights), &exact.1, 3e-3);
    }
}

#[test]
fn routing_and_experts_work_as_one_chain() {
    let device = device().autodiff();
    let (n, top_k) = (30, 2);
    let case = case([n, top_k, 4, 12, 6], |_, _| 0);
    let logits = tensor(&randoms(n * 4, 9), [n, 4], &device).require_grad();
    let routing = route(logits.clone(), tensor(&[1.0, 0.5, 2.0, 1.5], [4], &device), top_k);
    let gate_up = tensor(&case.gate_up, [4, 12, 12], &device);
    let out = experts(tensor(&case.x, [n, 12], &device), &routing, gate_up, tensor(&case.down, [4, 12, 6], &device));
    let gradients = (out * tensor(&case.d_out, [n, 12], &device)).sum().backward();
    let (bank, _) = case.reference();
    let scale = [1.0, 0.5, 2.0, 1.5];
    let wide_logits = wide(&values(logits.clone()));
    let (weights, indices) = reference::route(&wide_logits, &scale, top_k);
    let (_, d_weights) = bank.backward(&wide(&case.x), &weights, &indices, top_k, &wide(&case.d_out));
    let exact = reference::route_backward(&wide_logits, &scale, &indices, &d_weights, top_k);
    close(&values(logits.grad(&gradients).unwrap()), &exact, 1e-5);
}

#[test]
fn a_token_is_the_same_alone_and_among_others() {
    let case = case([600, 2, 3, 40, 20], |token, slot| (token * 5 / 3 + slot) % 3);
    let all = cpu::experts(&case.x, case.choice(), case.bank());
    for token in [0, 7, 599] {
        let choice = cpu::Choice {
            weights: &case.weights[token * 2..][..2],
            experts: &case.experts[token * 2..][..2],
            top_k: 2,
        };
        let one = cpu::experts(&case.x[token * 40..][..40], choice, case.bank());
        assert_eq!(one, all[token * 40..][..40]);
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let case = case([1300, 3, 7, 40, 30], |token, slot| (token * 3 + slot * 2) % 7);
    let logits = randoms(1300 * 7, 8);
    same_on_one_and_two_threads(|| {
        let (weights, experts) = cpu::route(&logits, &[1.0; 7], 3);
        let d_logits = cpu::route_backward(&logits, &[1.0; 7], &experts, &case.weights, 3);
        let out = cpu::experts(&case.x, case.choice(), case.bank());
        let gradients = cpu::experts_backward(&case.x, case.choice(), case.bank(), &case.d_out);
        (weights, d_logits, out, gradients)
    });
}

#[test]
#[should_panic(expected = "the routing names expert 3 of 3")]
fn an_expert_that_does_not_exist_is_refused() {
    let case = case([2, 1, 3, 4, 2], |_, _| 3);
    cpu::experts(&case.x, case.choice(), case.bank());
}
