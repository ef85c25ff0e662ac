use super::*;
use crate::testing::{close, device, randoms, same_on_one_and_two_threads, wide};
use burn::tensor::TensorData;

const STEP: Step =
    Step { grad_factor: 0.5, betas: [0.9, 0.99], eps: 1e-6, decay: 0.999, step_size: 1e-2, correction: 0.3 };

fn flat(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &device())
}

fn read<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().try_into_vec().unwrap()
}

/// Values, moments and gradient of `len` values; no second moment is negative.
fn case(len: usize) -> [Vec<f32>; 4] {
    let v = randoms(len, 3).iter().map(|x| x * x).collect();
    [randoms(len, 1), randoms(len, 2), v, randoms(len, 4)]
}

#[test]
fn steps_match_the_reference_whatever_the_length() {
    for len in [1, 255, 257, 40_000] {
        let [values, m, v, gradient] = case(len);
        let mut state = [&values, &m, &v].map(|buffer| flat(buffer));
        let mut expected = [&values, &m, &v].map(|buffer| wide(buffer));
        for _ in 0..3 {
            state = adamw(state, flat(&gradient), &STEP);
            let [values, m, v] = &mut expected;
            reference::update(values, m, v, &wide(&gradient), &STEP);
        }
        for (got, expected) in state.iter().zip(&expected) {
            close(&read(got), expected, 2e-6);
        }
    }
}

#[test]
fn what_somebody_else_holds_stays_as_it_is() {
    let [values, m, v, gradient] = case(1_000);
    let state = [&values, &m, &v].map(|buffer| flat(buffer));
    let (snapshot, view) = (state.clone(), state[0].clone().narrow(0, 128, 512).reshape([4, 128]));
    let alone = adamw([&values, &m, &v].map(|buffer| flat(buffer)), flat(&gradient), &STEP);
    let beside = adamw(state, flat(&gradient), &STEP);
    for (held, before) in snapshot.iter().zip([&values, &m, &v]) {
        assert_eq!(&read(held), before);
    }
    assert_eq!(read(&view), values[128..640]);
    for (alone, beside) in alone.iter().zip(&beside) {
        assert_eq!(read(alone), read(beside));
    }
    let held = beside[0].clone();
    let before = read(&held);
    let written = write(beside[0].clone(), 3, Tensor::ones([2, 5], &device()), Write::Add);
    assert_eq!(read(&held), before);
    assert_eq!(read(&written)[3], before[3] + 1.0);
}

#[test]
fn sums_of_squares_are_those_of_each_part() {
    let values = randoms(100_000, 1);
    let parts = [0..1, 128..128, 256..300, 1_024..1_024 + 70_001, 90_000..100_000];
    let sums = squares(flat(&values), &parts);
    for (sum, part) in sums.iter().zip(&parts) {
        let expected: f64 = wide(&values[part.clone()]).iter().map(|x| x * x).sum();
        assert!((sum - expected).abs() <= 1e-6 * expected, "{part:?}: {sum} for {expected}");
    }
    assert_eq!((sums.len(), squares(flat(&values), &[]).len()), (parts.len(), 0));
}

#[test]
fn values_are_written_to_their_place_or_added_to_it() {
    let (before, values) = (randoms(2_000, 1), randoms(6 * 50, 2));
    let tensor = || Tensor::<2>::from_data(TensorData::new(values.clone(), [6, 50]), &device());
    // The transpose of the transpose lies as it did: rows are written, whatever the strides.
    let turned = tensor().transpose();
    let columns: Vec<f32> = (0..300).map(|i| values[i % 6 * 50 + i / 6]).collect();
    for (written, tensor) in [(&values, tensor()), (&columns, turned)] {
        let set = read(&write(flat(&before), 128, tensor.clone(), Write::Set));
        let sum = read(&write(flat(&before), 128, tensor, Write::Add));
        for i in 0..before.len() {
            let value = i.checked_sub(128).and_then(|at| written.get(at));
            assert_eq!(set[i], *value.unwrap_or(&before[i]));
            assert_eq!(sum[i], before[i] + value.unwrap_or(&0.0));
        }
    }
}

#[test]
fn nothing_is_copied_on_the_cpu_that_nobody_else_holds() {
    use burn::backend::Flex;
    let buffers = || case(1_000).map(|values| crate::flex::float_tensor(values, [1_000]));
    let [values, m, v, gradient] = buffers();
    let before = [&values, &m, &v].map(|tensor| tensor.bytes().as_ptr());
    let (values, m, v) = Flex::adamw(values, m, v, gradient, STEP);
    assert_eq!([&values, &m, &v].map(|tensor| tensor.bytes().as_ptr()), before);
    let [small, ..] = buffers();
    let written = Flex::write_flat(values, 0, small, Write::Add);
    assert_eq!(written.bytes().as_ptr(), before[0]);
}

/// The CPU's update has the bits of the same steps taken one operation at a time.
#[test]
fn an_update_on_the_cpu_rounds_every_operation_in_its_order() {
    let device = burn::tensor::Device::flex();
    let [values, m, v, gradient] =
        case(20_000).map(|values| Tensor::<1>::from_data(TensorData::new(values.clone(), [values.len()]), &device));
    let Scalars { grad_factor, betas, rests, eps, decay, step_size, correction } = STEP.scalars();
    let g = gradient.clone().mul_scalar(grad_factor);
    let mean = m.clone().mul_scalar(betas[0]) + g.clone().mul_scalar(rests[0]);
    let square = v.clone().mul_scalar(betas[1]) + g.square().mul_scalar(rests[1]);
    let denominator = square.clone().sqrt().div_scalar(correction).add_scalar(eps);
    let expected = values.clone().mul_scalar(decay) - (mean.clone() / denominator).mul_scalar(step_size);
    let got = adamw([values, m, v], gradient, &STEP);
    for (got, expected) in got.iter().zip([expected, mean, square]) {
        assert_eq!(read(got), read(&expected));
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let [values, m, v, gradient] = case(70_000);
    same_on_one_and_two_threads(|| {
        let mut state = [values.clone(), m.clone(), v.clone()];
        let [values, m, v] = &mut state;
        cpu::update(values, m, v, &gradient, STEP.scalars());
        (state, cpu::squares(&gradient, &[0..30_000, 30_000..70_000]))
    });
}

#[test]
#[should_panic(expected = "6 values from 5 on do not fit 10")]
fn what_does_not_fit_is_refused() {
    write(flat(&[0.0; 10]), 5, Tensor::zeros([1, 6], &device()), Write::Set);
}
