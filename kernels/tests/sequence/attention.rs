use burn::tensor::DType;
#[cfg(feature = "wgpu")]
use burn::tensor::Tensor;
use tunehost_kernels::attention::cpu::{self, Gradients, Inputs, Saved};
use tunehost_kernels::attention::{Attention, Heads, Isa, Segments, SegmentsError, reference, windowed_attention};

use super::{assert_close, assert_gradient, read, tensor, values, weighted_sum, widen, with_threads};

/// Relative to the largest value of the reference; inputs are uniform in -1..1.
const FORWARD_TOLERANCE: f64 = 2e-6;
const BACKWARD_TOLERANCE: f64 = 1e-5;

struct Case {
    heads: Heads,
    attention: Attention,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

/// What both passes computed.
#[derive(PartialEq)]
struct Computed {
    out: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Case {
    fn new(lengths: &[usize], [query, kv, dim]: [usize; 3], window: Option<usize>) -> Self {
        let mut offsets = vec![0];
        offsets.extend(lengths.iter().scan(0, |end, length| {
            *end += *length as u32;
            Some(*end)
        }));
        let tokens = lengths.iter().sum::<usize>();
        let segments = Segments::new(offsets, tokens).unwrap();
        Self {
            heads: Heads { query, kv, dim },
            // Scores of a few units, so that the softmax is neither flat nor a single one.
            attention: Attention { segments, window, scale: 4.0 / (dim as f64).sqrt(), operands: DType::F32 },
            q: values(1, tokens * query * dim),
            k: values(2, tokens * kv * dim),
            v: values(3, tokens * kv * dim),
            dout: values(4, tokens * query * dim),
        }
    }

    fn compute(&self, isa: Isa) -> Computed {
        let (mut out, mut lse) = (vec![0.0; self.q.len()], vec![0.0; self.q.len() / self.heads.dim]);
        let inputs = Inputs { q: &self.q, k: &self.k, v: &self.v, heads: self.heads, attention: &self.attention };
        cpu::forward(isa, &inputs, &mut out, &mut lse);
        let (mut dq, mut dk, mut dv) = (vec![0.0; self.q.len()], vec![0.0; self.k.len()], vec![0.0; self.v.len()]);
        let gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        cpu::backward(isa, &inputs, &Saved { out: &out, lse: &lse, dout: &self.dout }, gradients);
        Computed { out, lse, dq, dk, dv }
    }

    fn reference(&self) -> [Vec<f64>; 4] {
        let [q, k, v, dout] = [&self.q, &self.k, &self.v, &self.dout].map(|x| widen(x));
        let [dq, dk, dv] = reference::backward(&q, &k, &v, &dout, self.heads, &self.attention);
        [reference::forward(&q, &k, &v, self.heads, &self.attention), dq, dk, dv]
    }
}

/// Odd lengths, segments of one token, lengths around the tiles' sides, several blocks; windows of 1, inside a tile,
/// across tiles, above the length, and none; 1 to 16 query heads per key head; every head size.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for window in [None, Some(1), Some(2), Some(5), Some(64), Some(100), Some(1000)] {
        cases.push(Case::new(&[1, 37, 1, 130, 3], [4, 2, 32], window));
    }
    for window in [None, Some(200), Some(256), Some(257)] {
        cases.push(Case::new(&[700, 65], [2, 1, 16], window));
    }
    for dim in [16, 32, 64, 128, 256, 512, 24, 72] {
        cases.push(Case::new(&[63, 64, 66], [2, 2, dim], Some(48)));
    }
    for group in [1, 2, 3, 16] {
        cases.push(Case::new(&[97], [2 * group, 2, 16], None));
    }
    cases
}

#[test]
fn every_instruction_set_agrees_with_the_reference() {
    for case in cases() {
        let [out, dq, dk, dv] = case.reference();
        for isa in Isa::available() {
            let got = case.compute(isa);
            let what = |name| format!("{name}, {}, {:?}, {:?}", isa.name(), case.heads, case.attention);
            assert_close(&what("out"), &got.out, &out, FORWARD_TOLERANCE);
            assert_close(&what("dq"), &got.dq, &dq, BACKWARD_TOLERANCE);
            assert_close(&what("dk"), &got.dk, &dk, BACKWARD_TOLERANCE);
            assert_close(&what("dv"), &got.dv, &dv, BACKWARD_TOLERANCE);
        }
    }
}

#[test]
fn large_scores_stay_exact() {
    let mut case = Case::new(&[150], [2, 1, 64], Some(40));
    case.attention.scale = 100.0;
    let [out, ..] = case.reference();
    // Scores reach a thousand: half a unit in the last place there is 3e-5, and so is the error of a probability.
    for isa in Isa::available() {
        assert_close(isa.name(), &case.compute(isa).out, &out, 2e-3);
    }
}

#[test]
fn the_reference_gradients_are_the_slopes() {
    for window in [None, Some(3)] {
        let Case { heads, attention, q, k, v, dout } = Case::new(&[6, 1, 4], [4, 2, 16], window);
        let [q, k, v, dout] = [q, k, v, dout].map(|x| widen(&x));
        let [dq, dk, dv] = reference::backward(&q, &k, &v, &dout, heads, &attention);
        let loss =
            |q: &[f64], k: &[f64], v: &[f64]| weighted_sum(&reference::forward(q, k, v, heads, &attention), &dout);
        assert_gradient("dq", &q, &dq, |q| loss(q, &k, &v));
        assert_gradient("dk", &k, &dk, |k| loss(&q, k, &v));
        assert_gradient("dv", &v, &dv, |v| loss(&q, &k, v));
    }
}

#[test]
fn the_tensor_operation_has_the_reference_gradients() {
    for case in cases() {
        let (tokens, Heads { query, kv, dim }) = (case.attention.segments.tokens(), case.heads);
        let q = tensor(&case.q, [tokens, query, dim]).require_grad();
        let k = tensor(&case.k, [tokens, kv, dim]).require_grad();
        let v = tensor(&case.v, [tokens, kv, dim]).require_grad();
        let Attention { segments, window, scale, .. } = &case.attention;
        let out = windowed_attention(q.clone(), k.clone(), v.clone(), segments, *window, *scale);
        let gradients = (out.clone() * tensor(&case.dout, [tokens, query, dim])).sum().backward();
        let [want_out, want_dq, want_dk, want_dv] = case.reference();
        assert_close("out", &read(out), &want_out, FORWARD_TOLERANCE);
        assert_close("dq", &read(q.grad(&gradients).unwrap()), &want_dq, BACKWARD_TOLERANCE);
        assert_close("dk", &read(k.grad(&gradients).unwrap()), &want_dk, BACKWARD_TOLERANCE);
        assert_close("dv", &read(v.grad(&gradients).unwrap()), &want_dv, BACKWARD_TOLERANCE);
    }
}

/// Devices that keep tensors in 16 bits compute in f32 all the same.
#[cfg(feature = "wgpu")]
#[test]
fn results_and_gradients_have_the_dtype_of_the_inputs() {
    for dim in [24, 64] {
        let mut case = Case::new(&[63, 1, 70], [4, 2, dim], Some(48));
        for values in [&mut case.q, &mut case.k, &mut case.v, &mut case.dout] {
            // What f16 holds exactly, so that the reference multiplies the same.
            values.iter_mut().for_each(|value| *value = (*value * 64.0).round() / 64.0);
        }
        let (tokens, Heads { query, kv, dim }) = (case.attention.segments.tokens(), case.heads);
        let half = |values, heads| tensor(values, [tokens, heads, dim]).cast(DType::F16).detach();
        let inputs = [half(&case.q, query), half(&case.k, kv), half(&case.v, kv)].map(Tensor::require_grad);
        let [q, k, v] = inputs.clone();
        let Attention { segments, window, scale, .. } = &case.attention;
        let out = windowed_attention(q, k, v, segments, *window, *scale);
        let gradients = (out.clone() * half(&case.dout, query)).sum().backward();
        let [want_out, want @ ..] = case.reference();
        assert_eq!(out.dtype(), DType::F16);
        assert_close("out", &read(out.cast(DType::F32)), &want_out, 1e-3);
        for (input, want) in inputs.iter().zip(&want) {
            let gradient = input.grad(&gradients).unwrap();
            assert_eq!(gradient.dtype(), DType::F16);
            assert_close("gradient", &read(gradient.cast(DType::F32)), want, 1e-3);
        }
    }
}

#[test]
fn only_the_wanted_gradients_are_registered() {
    let case = Case::new(&[9], [2, 1, 16], None);
    let k = tensor(&case.k, [9, 1, 16]).require_grad();
    let (q, v) = (tensor(&case.q, [9, 2, 16]), tensor(&case.v, [9, 1, 16]));
    let out = windowed_attention(q.clone(), k.clone(), v.clone(), &case.attention.segments, None, 1.0);
    let gradients = out.sum().backward();
    assert!(k.grad(&gradients).is_some() && q.grad(&gradients).is_none() && v.grad(&gradients).is_none());
}

#[test]
fn a_window_of_two_is_the_query_and_the_key_before_it() {
    // Queries and keys of zeros weigh visible keys equally, so a result is the mean of the visible values.
    let (heads, tokens) = (Heads { query: 1, kv: 1, dim: 16 }, 4);
    let attention = Attention {
        segments: Segments::new(vec![0, 4], tokens).unwrap(),
        window: Some(2),
        scale: 1.0,
        operands: DType::F32,
    };
    let (q, k) = (vec![0.0; tokens * 16], vec![0.0; tokens * 16]);
    let v: Vec<f32> = [1.0, 10.0, 100.0, 1000.0].iter().flat_map(|&x| [x; 16]).collect();
    let want: Vec<f32> = [1.0, 5.5, 55.0, 550.0].iter().flat_map(|&x| [x; 16]).collect();
    for isa in Isa::available() {
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens]);
        let inputs = Inputs { q: &q, k: &k, v: &v, heads, attention: &attention };
        cpu::forward(isa, &inputs, &mut out, &mut lse);
        assert_eq!(out, want, "{}", isa.name());
        assert_eq!(lse, [0.0, 1.0, 1.0, 1.0], "{}", isa.name());
    }
}

#[test]
fn keys_outside_the_window_and_the_segment_are_never_read() {
    // The last queries' tile starts at token 70 + 256 and sees keys from 70 + 237 on.
    let (tile, first_seen) = (70 + 256, 70 + 237);
    for isa in Isa::available() {
        let mut case = Case::new(&[70, 300], [2, 1, 16], Some(20));
        let clean = case.compute(isa);
        case.k[..first_seen * 16].fill(f32::NAN);
        case.v[..first_seen * 16].fill(f32::NAN);
        let poisoned = case.compute(isa);
        assert_eq!(poisoned.out[tile * 32..], clean.out[tile * 32..], "{}", isa.name());
        assert_eq!(poisoned.dq[tile * 32..], clean.dq[tile * 32..], "{}", isa.name());
        assert!(poisoned.out[(tile - 1) * 32].is_nan(), "a key that is seen must count");
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for case in [Case::new(&[600, 1, 77], [4, 2, 32], Some(130)), Case::new(&[530], [2, 1, 64], None)] {
        for isa in Isa::available() {
            assert!(with_threads(1, || case.compute(isa)) == with_threads(2, || case.compute(isa)), "{}", isa.name());
        }
    }
}

#[test]
fn other_segments_do_not_change_a_bit() {
    let lengths = [3, 300, 1, 131];
    let (heads, window) = ([4, 2, 32], Some(90));
    let together = Case::new(&lengths, heads, window);
    let (q_token, k_token) = (heads[0] * heads[2], heads[1] * heads[2]);
    for isa in Isa::available() {
        let all = together.compute(isa);
        for (range, length) in together.attention.segments.ranges().zip(lengths) {
            let (of_q, of_k) = (range.start * q_token..range.end * q_token, range.start * k_token..range.end * k_token);
            let mut alone = Case::new(&[length], heads, window);
            alone.q.copy_from_slice(&together.q[of_q.clone()]);
            alone.k.copy_from_slice(&together.k[of_k.clone()]);
            alone.v.copy_from_slice(&together.v[of_k.clone()]);
            alone.dout.copy_from_slice(&together.dout[of_q.clone()]);
            let one = alone.compute(isa);
            assert!(one.out == all.out[of_q.clone()] && one.dq == all.dq[of_q], "{}", isa.name());
            assert!(one.dk == all.dk[of_k.clone()] && one.dv == all.dv[of_k], "{}", isa.name());
        }
    }
}

#[test]
fn offsets_are_checked() {
    assert_eq!(Segments::new(vec![], 0), Err(SegmentsError::Start { start: None }));
    assert_eq!(Segments::new(vec![1, 4], 4), Err(SegmentsError::Start { start: Some(1) }));
    assert_eq!(Segments::new(vec![0, 4], 5), Err(SegmentsError::End { end: 4, tokens: 5 }));
    assert_eq!(Segments::new(vec![0, 2, 2, 4], 4), Err(SegmentsError::NotGrowing { index: 2, offset: 2 }));
    assert_eq!(Segments::new(vec![0, 3, 4], 4).unwrap().ranges().collect::<Vec<_>>(), [0..3, 3..4]);
}
