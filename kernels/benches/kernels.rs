//! Time of each kernel on the CPU at the shapes of a 57 M-parameter mixture of experts: `cargo bench -p tunehost-kernels`.
//!
//! Criterion's elements are floating-point operations, so that `Gelem/s` reads GFLOP/s; its bytes are what a kernel must at
//! least read and write.

use burn::tensor::{DType, Device, Tensor, TensorData};
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use gemmkit::{GemmScalar, MatMut, MatRef, Parallelism};
use half::bf16;
use std::hint::black_box;
use tunehost_kernels::attention::{Segments, windowed_attention};
use tunehost_kernels::cross_entropy::linear_cross_entropy;
use tunehost_kernels::glu::geglu;
use tunehost_kernels::linear::{Adapter, lora_linear};
use tunehost_kernels::matmul::{Matrix, Weights, Write, par_matmul};
use tunehost_kernels::moe;
use tunehost_kernels::norm::rms_norm;

const TOKENS: usize = 2048;
const HIDDEN: usize = 512;
const DENSE: usize = 1024;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const EXPERT: usize = 176;
const VOCAB: usize = 32_768;
const RANK: usize = 16;

fn ramp(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7919 % 2017) as f32 / 1008.0 - 1.0).collect()
}

fn tensor<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(ramp(shape.iter().product()), shape), device)
}

fn weight<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    tensor(shape, device).cast(dtype)
}

fn devices() -> (Device, Device) {
    // As in a run: else the system clears the pages of every result.
    tunehost_kernels::memory::keep_freed();
    (Device::flex(), Device::flex().autodiff())
}

fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10);
    group
}

fn counted(group: &mut BenchmarkGroup<WallTime>, flops: usize, values: usize) {
    group.throughput(Throughput::ElementsAndBytes { elements: flops as u64, bytes: 4 * values as u64 });
}

/// The product that everything else is held against: this machine's own peak, ours and that of two crates made for it.
fn product(c: &mut Criterion) {
    let mut group = group(c, "product");
    let [m, n, k] = [TOKENS, 2048, 2048];
    let (left, right, mut out) = (ramp(m * k), ramp(n * k), vec![0f32; m * n]);
    let narrow: Vec<bf16> = right.iter().map(|&value| bf16::from_f32(value)).collect();
    counted(&mut group, 2 * m * n * k, m * k + n * k + m * n);
    for (name, weights) in [("f32", Weights::F32(&right)), ("bf16", Weights::Bf16(&narrow))] {
        let product = (Matrix::new(&left, m, k), weights.matrix(n, k).t());
        group.bench_function(name, |b| b.iter(|| par_matmul(&[product], &mut out, Write::Set)));
    }
    group.bench_function("f32, crate gemm", |b| b.iter(|| crate_gemm(&left, &right, &mut out, [m, n, k])));
    group.bench_function("f32, crate gemmkit", |b| {
        b.iter(|| crate_gemmkit(1.0, 0.0, &left, &right, &mut out, [m, n, k]))
    });
    let narrow_left: Vec<bf16> = left.iter().map(|&value| bf16::from_f32(value)).collect();
    let mut narrow_out = vec![bf16::ZERO; m * n];
    group.bench_function("bf16, crate gemmkit", |b| {
        b.iter(|| crate_gemmkit(bf16::ONE, bf16::ZERO, &narrow_left, &narrow, &mut narrow_out, [m, n, k]));
    });
}

/// out `[m, n]` = left `[m, k]` right `[n, k]`^T by the crate `gemm`.
fn crate_gemm(left: &[f32], right: &[f32], out: &mut [f32], [m, n, k]: [usize; 3]) {
    assert!(left.len() == m * k && right.len() == n * k && out.len() == m * n);
    let parallelism = gemm::Parallelism::Rayon(rayon::current_num_threads());
    let (out, left, right) = (out.as_mut_ptr(), left.as_ptr(), right.as_ptr());
    let (cols, depth) = (n as isize, k as isize);
    // SAFETY: the three slices hold the matrices that the strides describe (checked above).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            cols,
            false,
            left,
            1,
            depth,
            right,
            depth,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The same by the crate `gemmkit`; one and zero are the factors of the product and of what `out` held.
fn crate_gemmkit<T: GemmScalar>(one: T, zero: T, left: &[T], right: &[T], out: &mut [T], [m, n, k]: [usize; 3]) {
    let (left, right) = (MatRef::from_row_major(left, m, k), MatRef::from_col_major(right, k, n));
    let out = MatMut::from_row_major(out, m, n);
    gemmkit::gemm(one, left, right, zero, out, Parallelism::Rayon(rayon::current_num_threads()));
}

fn attention(c: &mut Criterion) {
    let mut group = group(c, "windowed_attention");
    let (plain, tracked) = devices();
    for (name, tokens, heads, kv_heads, head_dim, window) in [
        ("sliding 2048", 2048, 8, 4, 64, Some(256)),
        ("sliding 16384", 16_384, 8, 4, 64, Some(256)),
        ("full 2048", 2048, 8, 2, 128, None),
    ] {
        let segments = Segments::new(vec![0, tokens as u32], tokens).expect("one segment");
        let pairs: usize = (1..=tokens).map(|seen| seen.min(window.unwrap_or(tokens))).sum();
        let values = tokens * head_dim * (2 * heads + 2 * kv_heads);
        let inputs =
            |device: &Device| [heads, kv_heads, kv_heads].map(|heads| tensor([tokens, heads, head_dim], device));
        let [q, k, v] = inputs(&plain);
        counted(&mut group, 4 * pairs * heads * head_dim, values);
        group.bench_function(format!("{name}, forward"), |b| {
            b.iter(|| black_box(windowed_attention(q.clone(), k.clone(), v.clone(), &segments, window, 1.0)));
        });
        let [q, k, v] = inputs(&tracked).map(|tensor: Tensor<3>| tensor.require_grad());
        counted(&mut group, 14 * pairs * heads * head_dim, 2 * values);
        group.bench_function(format!("{name}, forward and backward"), |b| {
            b.iter(|| {
                let out = windowed_attention(q.clone(), k.clone(), v.clone(), &segments, window, 1.0);
                black_box(q.grad(&out.sum().backward()));
            });
        });
    }
}

fn experts(c: &mut Criterion) {
    let mut group = group(c, "moe_experts");
    let (plain, tracked) = devices();
    let routing =
        |device: &Device| moe::route(tensor([TOKENS, EXPERTS], device), Tensor::ones([EXPERTS], device), TOP_K);
    let (one, weights) = (2 * TOKENS * TOP_K * HIDDEN * EXPERT, EXPERTS * 3 * EXPERT * HIDDEN);
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let gate_up = weight([EXPERTS, 2 * EXPERT, HIDDEN], dtype, &plain);
        let down = weight([EXPERTS, HIDDEN, EXPERT], dtype, &plain);
        let (x, choice) = (tensor([TOKENS, HIDDEN], &plain), routing(&plain));
        counted(&mut group, 3 * one, 2 * TOKENS * HIDDEN + weights);
        group.bench_function(format!("{name}, forward"), |b| {
            b.iter(|| black_box(moe::experts(x.clone(), &choice, gate_up.clone(), down.clone())));
        });
        let (x, choice) = (tensor([TOKENS, HIDDEN], &tracked).require_grad(), routing(&tracked));
        counted(&mut group, 8 * one, 4 * TOKENS * HIDDEN + 2 * weights);
        group.bench_function(format!("{name}, forward and backward"), |b| {
            b.iter(|| {
                let out = moe::experts(x.clone(), &choice, gate_up.clone(), down.clone());
                black_box(x.grad(&out.sum().backward()));
            });
        });
    }
}

fn head(c: &mut Criterion) {
    let mut group = group(c, "linear_cross_entropy");
    let (plain, _) = devices();
    let targets: Vec<i32> = (0..TOKENS).map(|token| (token * 13 % VOCAB) as i32).collect();
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let (hidden, head) = (tensor([TOKENS, HIDDEN], &plain), weight([VOCAB, HIDDEN], dtype, &plain));
        for (pass, products, want_gradient) in [("loss", 1, false), ("loss and gradient", 2, true)] {
            counted(&mut group, products * 2 * TOKENS * HIDDEN * VOCAB, VOCAB * HIDDEN + 2 * TOKENS * HIDDEN);
            group.bench_function(format!("{name}, {pass}"), |b| {
                b.iter(|| {
                    let (hidden, head) = (hidden.clone(), head.clone());
                    black_box(linear_cross_entropy(hidden, head, &targets, Some(30.0), 1.0, 256, want_gradient).loss)
                });
            });
        }
    }
}

fn linear(c: &mut Criterion) {
    let mut group = group(c, "lora_linear");
    let (plain, tracked) = devices();
    let dense = 2 * TOKENS * HIDDEN * DENSE;
    let low_rank = 2 * TOKENS * RANK * (HIDDEN + DENSE);
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let frozen = weight([DENSE, HIDDEN], dtype, &plain);
        let x = tensor([TOKENS, HIDDEN], &tracked).require_grad();
        let adapter = Adapter {
            a: tensor([RANK, HIDDEN], &tracked).require_grad(),
            b: tensor([DENSE, RANK], &tracked).require_grad(),
            scale: 2.0,
            dropout: None,
        };
        counted(&mut group, 2 * dense + 3 * low_rank, 2 * TOKENS * (HIDDEN + DENSE) + 2 * DENSE * HIDDEN);
        group.bench_function(format!("{name}, forward and backward"), |b| {
            b.iter(|| {
                let out = lora_linear(x.clone(), frozen.clone(), Some(&adapter));
                black_box(x.grad(&out.sum().backward()));
            });
        });
    }
}

/// Bound by memory: their operations are not worth counting.
fn elementwise(c: &mut Criterion) {
    let mut group = group(c, "elementwise");
    let (plain, _) = devices();
    let (x, scale) = (tensor([TOKENS, HIDDEN], &plain), tensor([HIDDEN], &plain));
    counted(&mut group, 4 * TOKENS * HIDDEN, 2 * TOKENS * HIDDEN);
    group.bench_function("rms_norm", |b| {
        b.iter(|| black_box(rms_norm(x.clone(), Some(scale.clone()), 1e-6, DType::F32)))
    });
    let (gate, up) = (tensor([TOKENS, DENSE], &plain), tensor([TOKENS, DENSE], &plain));
    counted(&mut group, 10 * TOKENS * DENSE, 3 * TOKENS * DENSE);
    group.bench_function("geglu", |b| b.iter(|| black_box(geglu(gate.clone(), up.clone()))));
}

criterion_group!(benches, product, attention, experts, head, linear, elementwise);
criterion_main!(benches);
