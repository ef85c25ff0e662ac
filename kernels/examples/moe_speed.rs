//! Prints milliseconds and GFLOP/s of the experts, a LoRA linear layer and the loss on one and two threads, beside the
//! rate of a plain matrix product: `cargo run --release -p tunehost-kernels --example moe_speed`.

use burn::tensor::{Device, Tensor, TensorData};
use half::bf16;
use std::hint::black_box;
use std::time::Instant;
use tunehost_kernels::cross_entropy::linear_cross_entropy;
use tunehost_kernels::linear::{Adapter, lora_linear};
use tunehost_kernels::matmul::{Matrix, Weights, Write, par_matmul};
use tunehost_kernels::moe;
use tunehost_kernels::simd::Isa;

const N: usize = 2048;
const H: usize = 512;
const I: usize = 176;
const EXPERTS: usize = 16;
const TOP_K: usize = 4;
const OUT: usize = 1024;
const RANK: usize = 16;
const VOCAB: usize = 32_768;
const REPEATS: usize = 9;

fn ramp(len: usize) -> Vec<f32> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5).collect()
}

fn tensor<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(ramp(shape.iter().product()), shape), device)
}

/// Prints the shortest time of `f`, which does `flop` floating-point operations.
fn time(name: &str, flop: usize, mut f: impl FnMut()) {
    f();
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("  {name:<48} {:>9.2} ms {:>8.1} GFLOP/s", best * 1e3, flop as f64 / best / 1e9);
}

/// `gemm` from the crate of that name: out `[m, n]` = left `[m, k]` right `[n, k]`^T.
fn crate_gemm(left: &[f32], right: &[f32], out: &mut [f32], [m, n, k]: [usize; 3], threads: usize) {
    assert!(left.len() == m * k && right.len() == n * k && out.len() == m * n);
    let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
    let (n_stride, k_stride) = (n as isize, k as isize);
    // SAFETY: the three slices hold the matrices that the strides describe (checked above).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n_stride,
            false,
            left.as_ptr(),
            1,
            k_stride,
            right.as_ptr(),
            k_stride,
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

fn products(threads: usize) {
    for [m, n, k] in [[N, OUT, H], [N, H, OUT], [512, 2 * I, H], [512, H, I], [256, VOCAB, H]] {
        let (left, right, mut out) = (ramp(m * k), ramp(n * k), vec![0f32; m * n]);
        let flop = 2 * m * n * k;
        let shape = format!("[{m}, {k}] x [{n}, {k}]^T");
        time(&format!("crate gemm {shape}"), flop, || crate_gemm(&left, &right, &mut out, [m, n, k], threads));
        let product = (Matrix::new(&left, m, k), Matrix::new(&right, n, k).t().into());
        time(&format!("product    {shape}"), flop, || par_matmul(&[product], &mut out, Write::Set));
        let product = (Matrix::new(&left, m, k), Matrix::new(&right, k, n).into());
        time(&format!("product    [{m}, {k}] x [{k}, {n}]"), flop, || par_matmul(&[product], &mut out, Write::Set));
        let narrow: Vec<bf16> = right.iter().map(|&value| bf16::from_f32(value)).collect();
        let product = (Matrix::new(&left, m, k), Weights::Bf16(&narrow).matrix(n, k).t());
        time(&format!("bf16       {shape}"), flop, || par_matmul(&[product], &mut out, Write::Set));
        let product = (Matrix::new(&left, m, k), Weights::Bf16(&narrow).matrix(k, n));
        time(&format!("bf16       [{m}, {k}] x [{k}, {n}]"), flop, || par_matmul(&[product], &mut out, Write::Set));
    }
}

fn experts() {
    let (plain, device) = (Device::flex(), Device::flex().autodiff());
    let (gate_up, down) = (tensor([EXPERTS, 2 * I, H], &plain), tensor([EXPERTS, H, I], &plain));
    let routing = |device: &Device| moe::route(tensor([N, EXPERTS], device), Tensor::ones([EXPERTS], device), TOP_K);
    let one_product = 2 * N * TOP_K * H * I;
    let (x, plain_routing) = (tensor([N, H], &plain), routing(&plain));
    time("experts forward", 3 * one_product, || {
        black_box(moe::experts(x.clone(), &plain_routing, gate_up.clone(), down.clone()));
    });
    let (x, routing) = (tensor([N, H], &device).require_grad(), routing(&device));
    time("experts forward + backward", 8 * one_product, || {
        let y = moe::experts(x.clone(), &routing, gate_up.clone(), down.clone());
        black_box(x.grad(&y.sum().backward()));
    });
}

fn linear() {
    let (plain, device) = (Device::flex(), Device::flex().autodiff());
    let weight = tensor([OUT, H], &plain);
    let adapter = |device: &Device| Adapter {
        a: tensor([RANK, H], device).require_grad(),
        b: tensor([OUT, RANK], device).require_grad(),
        scale: 2.0,
        dropout: None,
    };
    let (base, low_rank) = (2 * N * H * OUT, 2 * N * RANK * (H + OUT));
    let (x, plain_adapter) = (tensor([N, H], &plain), adapter(&device));
    time("lora_linear forward", base + low_rank, || {
        black_box(lora_linear(x.clone(), weight.clone(), Some(&plain_adapter)));
    });
    let (x, adapter) = (tensor([N, H], &device).require_grad(), adapter(&device));
    time("lora_linear forward + backward", 2 * base + 3 * low_rank, || {
        let y = lora_linear(x.clone(), weight.clone(), Some(&adapter));
        black_box(x.grad(&y.sum().backward()));
    });
}

fn loss() {
    let device = Device::flex();
    let (hidden, weight) = (tensor([N, H], &device), tensor([VOCAB, H], &device));
    let targets: Vec<i32> = (0..N as i32).collect();
    for chunk_rows in [128, 512] {
        for (name, want_grad) in [("forward", false), ("forward + backward", true)] {
            let flop = 2 * N * H * VOCAB * if want_grad { 2 } else { 1 };
            time(&format!("linear_cross_entropy {name}, {chunk_rows} rows"), flop, || {
                let (hidden, weight) = (hidden.clone(), weight.clone());
                black_box(linear_cross_entropy(hidden, weight, &targets, Some(30.0), 1.0, chunk_rows, want_grad));
            });
        }
    }
}

fn main() {
    println!("instructions: {}", Isa::detect().name());
    for threads in [1, 2] {
        println!("{threads} thread(s)");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        pool.install(|| {
            products(threads);
            experts();
            linear();
            loss();
        });
    }
}
