use super::cpu::{self, Shape};
use super::reference::Operands;
use super::*;
use crate::matmul::Weights;
use crate::testing::{activations, check_gradient, close, device, halves, randoms, same_on_one_and_two_threads, wide};
use burn::tensor::{Device, TensorData};

/// (n, input, output, rank)
const SHAPES: [(usize, usize, usize, usize); 6] =
    [(1, 1, 1, 1), (5, 7, 3, 2), (1, 64, 70, 4), (13, 33, 65, 1), (600, 20, 17, 16), (7, 530, 9, 3)];
const DROPOUTS: [Option<Dropout>; 2] = [None, Some(Dropout { p: 0.3, seed: 77 })];

struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    d_y: Vec<f32>,
    rank: usize,
    shape: Shape,
    dropout: Option<Dropout>,
}

fn case((n, input, output, rank): (usize, usize, usize, usize), dropout: Option<Dropout>) -> Case {
    Case {
        x: randoms(n * input, 1),
        weight: randoms(output * input, 2),
        a: randoms(rank * input, 3),
        b: randoms(output * rank, 4),
        d_y: randoms(n * output, 5),
        rank,
        shape: Shape { n, input, output },
        dropout,
    }
}

/// As [`case`], with an input and a gradient of the result that every dtype of activations holds exactly.
fn case_in_halves(shape @ (n, input, output, _): (usize, usize, usize, usize), dropout: Option<Dropout>) -> Case {
    Case { x: halves(n * input, 1), d_y: halves(n * output, 5), ..case(shape, dropout) }
}

impl Case {
    fn reference(&self) -> Operands {
        Operands {
            x: wide(&self.x),
            weight: wide(&self.weight),
            a: wide(&self.a),
            b: wide(&self.b),
            scale: 1.5,
            dropout: self.dropout,
            input: self.shape.input,
            output: self.shape.output,
            rank: self.rank,
        }
    }

    fn adapter(&self) -> cpu::Adapter<'_> {
        cpu::Adapter { a: &self.a, b: &self.b, rank: self.rank, scale: 1.5, dropout: self.dropout }
    }
}

fn tensor(values: &[f32], rows: usize, device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [rows, values.len() / rows]), device)
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().try_into_vec().unwrap()
}

#[test]
fn reference_gradients_match_finite_differences() {
    for dropout in DROPOUTS {
        let case = case((3, 5, 4, 2), dropout);
        let (at, d_y) = (case.reference(), wide(&case.d_y));
        let value = |operands: &Operands| operands.forward().iter().zip(&d_y).map(|(y, d)| y * d).sum::<f64>();
        let gradients = at.backward(&d_y);
        check_gradient(&at.x, &gradients.x, |x| value(&Operands { x: x.to_vec(), ..at.clone() }));
        check_gradient(&at.a, &gradients.a, |a| value(&Operands { a: a.to_vec(), ..at.clone() }));
        check_gradient(&at.b, &gradients.b, |b| value(&Operands { b: b.to_vec(), ..at.clone() }));
    }
}

#[test]
fn output_and_gradients_through_autodiff_match_the_reference() {
    let device = device().autodiff();
    let shapes = SHAPES.into_iter().flat_map(|shape| DROPOUTS.map(|dropout| (shape, dropout)));
    for ((shape, dropout), (dtype, tolerance)) in
        shapes.flat_map(|given| activations(1e-5).into_iter().map(move |to| (given, to)))
    {
        let case = case_in_halves(shape, dropout);
        let x = tensor(&case.x, case.shape.n, &device).cast(dtype).require_grad();
        let a = tensor(&case.a, case.rank, &device).require_grad();
        let b = tensor(&case.b, case.shape.output, &device).require_grad();
        let weight = tensor(&case.weight, case.shape.output, &device);
        let adapter = Adapter { a: a.clone(), b: b.clone(), scale: 1.5, dropout };
        let y = lora_linear(x.clone(), weight.clone(), Some(&adapter));
        close(&values(y.clone()), &case.reference().forward(), tolerance);
        let gradients = (y * tensor(&case.d_y, case.shape.n, &device).cast(dtype)).sum().backward();
        let exact = case.reference().backward(&wide(&case.d_y));
        let [d_x, d_a, d_b] = [&x, &a, &b].map(|tensor| tensor.grad(&gradients).unwrap());
        assert_eq!([&d_x, &d_a, &d_b].map(|gradient| gradient.dtype()), [dtype, DType::F32, DType::F32]);
        close(&values(d_x), &exact.x, tolerance);
        close(&values(d_a), &exact.a, tolerance);
        close(&values(d_b), &exact.b, tolerance);
        assert!(weight.grad(&gradients).is_none());
    }
}

#[test]
fn without_an_adapter_only_the_input_has_a_gradient() {
    let untracked = device();
    let device = untracked.clone().autodiff();
    for (shape, (dtype, tolerance)) in
        SHAPES.into_iter().flat_map(|shape| activations(1e-5).into_iter().map(move |to| (shape, to)))
    {
        let case = case_in_halves(shape, None);
        let plain = Operands { scale: 0.0, ..case.reference() };
        let x = tensor(&case.x, case.shape.n, &device).cast(dtype).require_grad();
        // A frozen weight made on the plain device mixes with a tracked input.
        let weight = tensor(&case.weight, case.shape.output, &untracked);
        let y = lora_linear(x.clone(), weight, None);
        close(&values(y.clone()), &plain.forward(), tolerance);
        let gradients = (y * tensor(&case.d_y, case.shape.n, &device).cast(dtype)).sum().backward();
        let d_x = x.grad(&gradients).unwrap();
        assert_eq!(d_x.dtype(), dtype);
        close(&values(d_x), &plain.backward(&wide(&case.d_y)).x, tolerance);
    }
}

/// The operation as CUDA devices run it; on others with the instructions emulated.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[test]
fn on_matrix_instructions_output_and_gradients_match_the_reference() {
    use crate::testing::cube::{ON_MATRIX_UNITS, OPERANDS, floats, read, rounded};
    let (dtype, _) = OPERANDS;
    for dropout in DROPOUTS {
        let case = case_in_halves((70, 72, 40, 8), dropout);
        let Shape { n, input, output } = case.shape;
        let (x, d_y) = (rounded(&case.x, &[n, input], dtype), rounded(&case.d_y, &[n, output], dtype));
        let weight = floats(&case.weight, &[output, input]);
        let adapter = [floats(&case.a, &[case.rank, input]), floats(&case.b, &[output, case.rank])];
        let (y, inner) = cube::forward(x.clone(), weight.clone(), adapter.clone(), 1.5, dropout, ON_MATRIX_UNITS);
        assert_eq!([y.dtype, inner.dtype], [dtype; 2]);
        close(&read(y), &case.reference().forward(), 3e-3);
        let gradients = cube::backward([x, inner, d_y], weight, adapter, 1.5, dropout, ON_MATRIX_UNITS);
        assert_eq!(gradients.each_ref().map(|gradient| gradient.dtype), [dtype, DType::F32, DType::F32]);
        let exact = case.reference().backward(&wide(&case.d_y));
        for (gradient, exact) in gradients.into_iter().zip([exact.x, exact.a, exact.b]) {
            close(&read(gradient), &exact, 3e-3);
        }
    }
}

#[test]
fn a_row_is_the_same_alone_and_among_others() {
    let case = case((700, 600, 130, 16), None);
    let (all, _) = cpu::lora_linear(&case.x, Weights::F32(&case.weight), &case.adapter(), case.shape);
    for row in [0, 5, 699] {
        let x = &case.x[row * 600..(row + 1) * 600];
        let (one, _) = cpu::lora_linear(x, Weights::F32(&case.weight), &case.adapter(), Shape { n: 1, ..case.shape });
        assert_eq!(one, all[row * 130..(row + 1) * 130]);
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    for dropout in DROPOUTS {
        let case = case((1100, 200, 300, 16), dropout);
        same_on_one_and_two_threads(|| {
            let (y, inner) = cpu::lora_linear(&case.x, Weights::F32(&case.weight), &case.adapter(), case.shape);
            let gradients = cpu::lora_linear_backward(
                &case.x,
                Weights::F32(&case.weight),
                &case.adapter(),
                &inner,
                &case.d_y,
                case.shape,
            );
            (y, gradients)
        });
    }
}

#[test]
fn dropout_drops_its_share_and_another_seed_drops_others() {
    let ones = vec![1f32; 200 * 100];
    let (a, weight, b) = (vec![1f32; 100], vec![0f32; 100], vec![1f32]);
    let shape = Shape { n: 200, input: 100, output: 1 };
    let sums = |seed| {
        let dropout = Some(Dropout { p: 0.25, seed });
        let adapter = cpu::Adapter { a: &a, b: &b, rank: 1, scale: 1.0, dropout };
        cpu::lora_linear(&ones, Weights::F32(&weight), &adapter, shape).0
    };
    let (first, second) = (sums(1), sums(2));
    assert_eq!(first, sums(1));
    assert_ne!(first, second);
    for sums in [first, second] {
        let mean = sums.iter().sum::<f32>() / 20_000.0;
        assert!((mean - 1.0).abs() < 0.02, "inverted scaling keeps the mean, not {mean}");
        assert!(sums.iter().any(|&sum| sum != sums[0]), "rows drop different elements");
    }
}
