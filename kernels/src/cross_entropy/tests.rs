use super::*;
#[cfg(feature = "wgpu")]
use crate::testing::halves;
use crate::testing::{check_gradient, close, device, randoms, same_on_one_and_two_threads, wide};
use burn::tensor::{Device, TensorData};

struct Case {
    hidden: Vec<f32>,
    weight: Vec<f32>,
    targets: Vec<i32>,
    n: usize,
    h: usize,
    classes: usize,
}

/// Logits of a few units; every `ignore_every`-th target is ignored (0: none).
fn case(n: usize, h: usize, classes: usize, ignore_every: usize) -> Case {
    let target = |row: usize| {
        let ignored = ignore_every > 0 && row.is_multiple_of(ignore_every);
        if ignored { IGNORED } else { (row * 7 % classes) as i32 }
    };
    Case {
        hidden: randoms(n * h, 1).iter().map(|x| 3.0 * x).collect(),
        weight: randoms(classes * h, 2),
        targets: (0..n).map(target).collect(),
        n,
        h,
        classes,
    }
}

impl Case {
    fn run(
        &self,
        softcap: Option<f64>,
        grad_scale: f64,
        chunk_rows: usize,
        want_grad: bool,
    ) -> (Vec<f32>, Option<Vec<f32>>) {
        let device = device();
        let (hidden, weight) = (self.hidden_tensor(&device), self.weight_tensor(&device));
        let result = linear_cross_entropy(hidden, weight, &self.targets, softcap, grad_scale, chunk_rows, want_grad);
        (result.loss, result.d_hidden.map(|gradient| gradient.into_data().try_into_vec().unwrap()))
    }

    fn hidden_tensor(&self, device: &Device) -> Tensor<2> {
        Tensor::from_data(TensorData::new(self.hidden.clone(), [self.n, self.h]), device)
    }

    fn weight_tensor(&self, device: &Device) -> Tensor<2> {
        Tensor::from_data(TensorData::new(self.weight.clone(), [self.classes, self.h]), device)
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let case = case(5, 4, 7, 3);
    let weight = wide(&case.weight);
    for softcap in [None, Some(2.0)] {
        let gradient = reference::backward(&wide(&case.hidden), &weight, case.h, &case.targets, softcap);
        check_gradient(&wide(&case.hidden), &gradient, |hidden| {
            reference::forward(hidden, &weight, case.h, &case.targets, softcap).iter().sum()
        });
    }
}

#[test]
fn loss_and_gradient_match_the_reference() {
    for (n, h, classes, ignore_every) in
        [(1, 1, 1, 0), (1, 9, 33, 0), (10, 16, 100, 3), (65, 40, 2100, 4), (7, 600, 70, 2)]
    {
        let case = case(n, h, classes, ignore_every);
        let (hidden, weight) = (wide(&case.hidden), wide(&case.weight));
        for softcap in [None, Some(5.0)] {
            for chunk_rows in [1, 4, 1000] {
                let (loss, gradient) = case.run(softcap, 0.25, chunk_rows, true);
                close(&loss, &reference::forward(&hidden, &weight, h, &case.targets, softcap), 2e-6);
                let exact = reference::backward(&hidden, &weight, h, &case.targets, softcap);
                let exact: Vec<f64> = exact.iter().map(|d| 0.25 * d).collect();
                close(&gradient.unwrap(), &exact, 1e-5);
                assert_eq!(case.run(softcap, 0.25, chunk_rows, false), (loss, None));
            }
        }
    }
}

/// The operation as CUDA devices run it, with the instructions emulated.
#[cfg(feature = "wgpu")]
#[test]
fn loss_and_gradient_on_matrix_instructions_match_the_reference() {
    use crate::mma::Unit;
    use crate::resolve::cube::Math;
    use crate::testing::cube::{floats, read, rounded};
    use burn::tensor::DType;
    let math = Math::Half { operands: DType::F16, unit: Unit::Emulated };
    for (n, h, classes, dtype) in [(65, 40, 2104, DType::F32), (65, 40, 2104, DType::F16), (7, 61, 75, DType::F32)] {
        let case = case(n, h, classes, 4);
        let (hidden, weight) = (rounded(&case.hidden, &[n, h], dtype), floats(&case.weight, &[classes, h]));
        let head = Head { softcap: Some(5.0), chunk_rows: 40 };
        let (loss, gradient) = cube::loss_and_gradient(hidden, weight, &case.targets, head, Some(0.25), math);
        let gradient = gradient.expect("a gradient");
        assert_eq!((loss.dtype, gradient.dtype), (DType::F32, dtype));
        let (hidden, weight) = (wide(&case.hidden), wide(&case.weight));
        close(&read(loss), &reference::forward(&hidden, &weight, h, &case.targets, head.softcap), 2e-3);
        let exact = reference::backward(&hidden, &weight, h, &case.targets, head.softcap);
        let exact: Vec<f64> = exact.iter().map(|d| 0.25 * d).collect();
        close(&read(gradient), &exact, 5e-3);
    }
}

/// In 16 bits only the hidden states and their gradient are rounded.
#[cfg(feature = "wgpu")]
#[test]
fn the_gradient_has_the_dtype_of_the_hidden_states_and_losses_and_logits_are_f32() {
    use burn::tensor::DType;
    let case = Case { hidden: halves(40 * 30, 1), ..case(40, 30, 300, 4) };
    let device = device();
    let hidden = || case.hidden_tensor(&device).cast(DType::F16);
    let result = linear_cross_entropy(hidden(), case.weight_tensor(&device), &case.targets, Some(5.0), 0.25, 16, true);
    let gradient = result.d_hidden.unwrap();
    assert_eq!(gradient.dtype(), DType::F16);
    let (exact_hidden, weight) = (wide(&case.hidden), wide(&case.weight));
    close(&result.loss, &reference::forward(&exact_hidden, &weight, 30, &case.targets, Some(5.0)), 2e-6);
    let exact = reference::backward(&exact_hidden, &weight, 30, &case.targets, Some(5.0));
    let exact: Vec<f64> = exact.iter().map(|d| 0.25 * d).collect();
    close(&gradient.cast(DType::F32).into_data().try_into_vec::<f32>().unwrap(), &exact, 1e-3);
    let all: Vec<f32> = logits(hidden(), case.weight_tensor(&device), None).into_data().try_into_vec().unwrap();
    close(&all, &reference::logits(&exact_hidden, &weight, 30, None), 1e-6);
}

#[test]
fn the_losses_are_neither_averaged_nor_affected_by_the_chunks() {
    let case = case(20, 8, 50, 0);
    let (loss, gradient) = case.run(Some(30.0), 1.0, 3, true);
    assert_eq!((loss.clone(), gradient.clone()), case.run(Some(30.0), 1.0, 20, true));
    // Two halves accumulate to the whole.
    let half = |range: std::ops::Range<usize>| Case {
        hidden: case.hidden[range.start * 8..range.end * 8].to_vec(),
        weight: case.weight.clone(),
        targets: case.targets[range.clone()].to_vec(),
        n: range.len(),
        ..case
    };
    let halves = [half(0..7), half(7..20)].map(|half| half.run(Some(30.0), 1.0, 100, true));
    assert_eq!(loss, [halves[0].0.clone(), halves[1].0.clone()].concat());
    let halves = halves.map(|(_, gradient)| gradient.unwrap());
    assert_eq!(gradient.unwrap(), halves.concat());
}

#[test]
fn when_all_targets_are_ignored_loss_and_gradient_are_zero() {
    let case = case(6, 4, 10, 1);
    for softcap in [None, Some(30.0)] {
        assert_eq!(case.run(softcap, 1.0, 2, true), (vec![0.0; 6], Some(vec![0.0; 24])));
    }
}

#[test]
fn large_logits_neither_overflow_nor_lose_the_loss() {
    let case = Case {
        hidden: vec![100.0, -100.0],
        weight: vec![10.0, -10.0, 0.0],
        targets: vec![0, 0],
        n: 2,
        h: 1,
        classes: 3,
    };
    let (loss, gradient) = case.run(None, 1.0, 2, true);
    assert_eq!(loss, [0.0, 2000.0]);
    assert!(gradient.unwrap().iter().all(|d| d.is_finite()));
}

#[test]
fn the_result_is_cut_off_from_the_graph() {
    let device = device().autodiff();
    let case = case(4, 8, 20, 2);
    let hidden = case.hidden_tensor(&device).require_grad();
    let result =
        linear_cross_entropy(hidden.clone() * 1.0, case.weight_tensor(&device), &case.targets, None, 1.0, 2, true);
    let d_hidden = result.d_hidden.unwrap();
    let gradients = (hidden.clone() * d_hidden.clone()).sum().backward();
    let got: Vec<f32> = hidden.grad(&gradients).unwrap().into_data().try_into_vec().unwrap();
    let expected: Vec<f32> = d_hidden.into_data().try_into_vec().unwrap();
    assert_eq!(got, expected);
    assert_eq!(Some(expected), case.run(None, 1.0, 2, true).1);
}

#[test]
fn logits_match_the_reference_and_a_row_is_the_same_alone() {
    let case = case(9, 30, 77, 0);
    let device = device();
    for softcap in [None, Some(4.0)] {
        let all = logits(case.hidden_tensor(&device), case.weight_tensor(&device), softcap);
        let all: Vec<f32> = all.into_data().try_into_vec().unwrap();
        close(&all, &reference::logits(&wide(&case.hidden), &wide(&case.weight), 30, softcap), 1e-6);
        let one = logits(case.hidden_tensor(&device).slice([4..5, 0..30]), case.weight_tensor(&device), softcap);
        assert_eq!(one.into_data().try_into_vec::<f32>().unwrap(), all[4 * 77..5 * 77]);
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let case = case(300, 40, 700, 5);
    same_on_one_and_two_threads(|| case.run(Some(30.0), 1.0, 64, true));
}

#[test]
#[should_panic(expected = "target 10 is neither -100 nor one of 10 classes")]
fn a_target_outside_the_vocabulary_is_refused() {
    let case = Case { targets: vec![10], ..case(1, 2, 10, 0) };
    case.run(None, 1.0, 1, false);
}

/// A gate looks at the loss: it must not be that of another model.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[test]
fn a_row_that_is_no_finite_number_has_no_finite_loss() {
    for lost in [f32::NAN, f32::INFINITY, 3e38] {
        let mut case = case(5, 4, 300, 0);
        case.hidden[4..8].fill(lost);
        for softcap in [None, Some(30.0)] {
            let (loss, _) = case.run(softcap, 1.0, 3, true);
            let finite: Vec<bool> = loss.iter().map(|loss| loss.is_finite()).collect();
            assert_eq!(finite, [true, false, true, true, true], "{lost} {softcap:?}: {loss:?}");
        }
    }
}
