//! Every operation that has kernels here, at the production shapes: Gemma-4 26B-A4B, one row of 16,384 tokens.

use super::recorder::On;
use crate::adamw::{AdamWOps, Step, Write};
use crate::attention::{Attention, AttentionKernel, Segments};
use crate::cross_entropy::{CrossEntropyOps, Head};
use crate::embedding::EmbeddingOps;
use crate::glu::GluOps;
use crate::linear::{Dropout, LinearOps};
use crate::moe::MoeOps;
use crate::norm::{RmsNormKernel, RmsNormOps};
use crate::resolve::Dtypes;
use crate::rope::RopeOps;
use burn::tensor::DType;
use burn_cubecl::CubeBackend as Cube;
use burn_cubecl::tensor::CubeTensor;

const TOKENS: usize = 16_384;
const HIDDEN: usize = 2_816;
const DENSE: usize = 2_112;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const EXPERT: usize = 704;
const VOCABULARY: usize = 262_144;
const CHUNK_ROWS: usize = 1_024;
const RANK: usize = 64;
const QUERY_HEADS: usize = 16;
/// Parameters of all adapters.
const ADAPTERS: usize = 74_342_400;
const EPS: f64 = 1e-6;
const HEAD: Head = Head { softcap: Some(30.0), chunk_rows: CHUNK_ROWS };

/// What a card computes in: all that [`crate::resolve`] lets it.
pub const DTYPES: [Dtypes; 3] = [
    Dtypes { weights: DType::F32, activations: DType::F32 },
    Dtypes { weights: DType::BF16, activations: DType::F32 },
    Dtypes { weights: DType::BF16, activations: DType::BF16 },
];

/// An operation and what it computes.
pub struct Case {
    pub name: &'static str,
    /// Floating-point operations of its matrix kernels, in the order of their launches.
    pub flops: Vec<f64>,
    pub run: Box<dyn Fn(&On)>,
}

fn case(name: &'static str, flops: impl IntoIterator<Item = f64>, run: impl Fn(&On) + 'static) -> Case {
    Case { name, flops: flops.into_iter().collect(), run: Box::new(run) }
}

/// Two operations for each element of three sides.
fn product(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

fn attention(
    name: &'static str,
    kv: usize,
    dim: usize,
    window: Option<usize>,
    Dtypes { weights, activations }: Dtypes,
) -> Case {
    let pairs = TOKENS * window.unwrap_or(TOKENS / 2);
    let one = QUERY_HEADS as f64 * product(pairs, dim, 1);
    case(name, [2.0 * one, 3.0 * one, 4.0 * one], move |on| {
        let segments = Segments::new([0, TOKENS as u32], TOKENS).expect("one segment");
        let attention = Attention { segments, window, scale: 1.0, operands: weights };
        let [q, dout] = [(); 2].map(|()| on.tensor([TOKENS, QUERY_HEADS, dim], activations));
        let [k, v] = [(); 2].map(|()| on.tensor([TOKENS, kv, dim], activations));
        let output = <Cube as AttentionKernel>::forward(q.clone(), k.clone(), v.clone(), &attention);
        <Cube as AttentionKernel>::backward(q, k, v, output, dout, &attention);
    })
}

fn loss_head(on: &On, Dtypes { weights, activations }: Dtypes) -> (CubeTensor, CubeTensor) {
    (on.tensor([CHUNK_ROWS, HIDDEN], activations), on.tensor([VOCABULARY, HIDDEN], weights))
}

/// The projection to the queries of a sliding layer.
fn lora(name: &'static str, dropout: Option<Dropout>, Dtypes { weights, activations }: Dtypes) -> Case {
    let out = QUERY_HEADS * 256;
    let (base, a, b) = (product(TOKENS, out, HIDDEN), product(TOKENS, RANK, HIDDEN), product(TOKENS, out, RANK));
    // The adapter is added in the pass of the frozen product, but for a gradient that dropout parts from it.
    let flops = match dropout {
        None => vec![a, base + b, b, base + a, a, b],
        Some(_) => vec![a, base + b, b, base, a, a, b],
    };
    case(name, flops, move |on| {
        let (x, d_y) = (on.tensor([TOKENS, HIDDEN], activations), on.tensor([TOKENS, out], activations));
        let weight = on.tensor([out, HIDDEN], weights);
        let (a, b) = (on.tensor([RANK, HIDDEN], DType::F32), on.tensor([out, RANK], DType::F32));
        let (_, inner) = Cube::lora_linear(x.clone(), weight.clone(), a.clone(), b.clone(), 1.0, dropout);
        Cube::lora_linear_backward(x, weight, a, b, inner, d_y, 1.0, dropout);
    })
}

/// The cases, with tensors in `dtypes`.
pub fn cases(dtypes: Dtypes) -> Vec<Case> {
    let Dtypes { weights, activations: dtype } = dtypes;
    let rows = TOKENS * TOP_K;
    let (up, down) = (product(rows, 2 * EXPERT, HIDDEN), product(rows, HIDDEN, EXPERT));
    let head = product(CHUNK_ROWS, VOCABULARY, HIDDEN);
    vec![
        case("embedding", [], move |on| {
            Cube::scaled_embedding(on.tensor([VOCABULARY, HIDDEN], weights), vec![1; TOKENS], 1.0);
        }),
        attention("attention, window 1,024, D = 256", 8, 256, Some(1_024), dtypes),
        attention("attention, full, D = 512", 2, 512, None, dtypes),
        case("experts", [up, down, up, down, up], move |on| {
            let x = on.tensor([TOKENS, HIDDEN], dtype);
            let (share, chosen) = (on.tensor([TOKENS, TOP_K], DType::F32), on.tensor([TOKENS, TOP_K], DType::I32));
            let gate_up = on.tensor([EXPERTS, 2 * EXPERT, HIDDEN], weights);
            let down = on.tensor([EXPERTS, HIDDEN, EXPERT], weights);
            let out = Cube::moe_experts(x.clone(), share.clone(), chosen.clone(), gate_up.clone(), down.clone());
            Cube::moe_experts_backward(x, share, chosen, gate_up, down, out);
        }),
        case("route", [], |on| {
            let (logits, scale) = (on.tensor([TOKENS, EXPERTS], DType::F32), on.tensor([EXPERTS], DType::F32));
            let (share, chosen) = Cube::moe_route(logits.clone(), scale.clone(), TOP_K);
            Cube::moe_route_backward(logits, scale, chosen, share);
        }),
        case("loss head", [head, head], move |on| {
            let (hidden, weight) = loss_head(on, dtypes);
            Cube::linear_cross_entropy_grad(hidden, weight, vec![1; CHUNK_ROWS], HEAD, 1.0);
        }),
        case("loss head, no gradient", [head, head], move |on| {
            let (hidden, weight) = loss_head(on, dtypes);
            Cube::linear_cross_entropy(hidden.clone(), weight.clone(), vec![1; CHUNK_ROWS], HEAD);
            Cube::head_logits(hidden, weight, HEAD.softcap);
        }),
        lora("LoRA linear", None, dtypes),
        lora("LoRA linear with dropout", Some(Dropout { p: 0.05, seed: 1 }), dtypes),
        case("norms", [], move |on| {
            let [x, stream] = [dtype, DType::F32].map(|dtype| on.result([TOKENS, HIDDEN], dtype));
            let weight = on.tensor([HIDDEN], DType::F32);
            let back = |x: &CubeTensor, weight, dy| <Cube as RmsNormKernel>::backward(x.clone(), weight, dy, EPS, 1.0);
            for residual in [&x, &stream] {
                let y = Cube::rms_norm_residual(x.clone(), weight.clone(), residual.clone(), EPS, 1.0);
                back(&x, Some(weight.clone()), y);
            }
            // What the layers' products read, what the router reads, and the norm of the dense branch.
            for (x, out) in [(&stream, dtype), (&stream, DType::F32), (&x, dtype)] {
                let y = Cube::rms_norm(x.clone(), weight.clone(), EPS, out);
                back(x, Some(weight.clone()), y);
            }
            let y = Cube::rms_norm_weightless(x.clone(), EPS, dtype);
            back(&x, None, y);
        }),
        case("rotation", [], move |on| {
            let x = on.result([TOKENS, QUERY_HEADS, 256], dtype);
            let [cos, sin] = [(); 2].map(|()| on.tensor([TOKENS, 128], DType::F32));
            let weight = on.tensor([256], DType::F32);
            Cube::rope(x.clone(), cos.clone(), sin.clone());
            let y = Cube::rms_norm_rope(x.clone(), weight.clone(), cos.clone(), sin.clone(), EPS);
            Cube::rms_norm_rope_backward(x, weight, cos, sin, y, EPS);
        }),
        case("gated linear unit", [], move |on| {
            let [gate, up] = [(); 2].map(|()| on.result([TOKENS, DENSE], dtype));
            let out = Cube::geglu(gate.clone(), up.clone());
            Cube::geglu_backward(gate, up, out);
        }),
        case("AdamW", [], |on| {
            let [values, m, v, gradient] = [(); 4].map(|()| on.result([ADAPTERS], DType::F32));
            for write in [Write::Set, Write::Add] {
                Cube::write_flat(gradient.clone(), 0, on.result([RANK, HIDDEN], DType::F32), write);
            }
            Cube::sums_of_squares(gradient.clone(), vec![0..ADAPTERS]);
            let step =
                Step { grad_factor: 1.0, betas: [0.9, 0.999], eps: 1e-8, decay: 1.0, step_size: 1e-4, correction: 1.0 };
            Cube::adamw(values, m, v, gradient, step);
        }),
    ]
}
