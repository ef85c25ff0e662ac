//! What each kernel takes on the CPU beside its inputs and results is what its `workspace_bytes` says.

use burn::tensor::{Device, Int, Tensor, TensorData};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tunehost_kernels::Runtime;
use tunehost_kernels::attention::{self, Heads, Segments, windowed_attention};
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::cross_entropy::{self, linear_cross_entropy, logits_bytes};
use tunehost_kernels::linear::{self, Adapter, lora_linear};
use tunehost_kernels::moe::{self, Routing};

/// The system's allocator, noting the largest request, what is allocated now, and the most that was.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn note(size: usize) {
    LARGEST.fetch_max(size, Relaxed);
    MOST.fetch_max(NOW.fetch_add(size, Relaxed) + size, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

fn ramp<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| (i * 7 % 13) as f32 / 13.0 - 0.5).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// The most bytes beyond those before it that are allocated during `work`, and its result.
fn most<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    let result = work();
    (MOST.load(Relaxed) - before, result)
}

/// Pulls a graph of `make` back twice, the first time for buffers that stay, and compares the most bytes of the second with the
/// gradients' and what the kernel says.
fn assert_pulled_back(kernel: &str, make: impl Fn() -> Tensor<2>, gradients: usize, workspace: usize) {
    let mut found = 0;
    for _ in 0..2 {
        let output = make();
        let cotangent = ramp(output.dims());
        // held, since the output is an input of nothing that is counted
        let _output = output.clone();
        (found, _) = most(|| pull_back(output, cotangent));
    }
    let told = gradients * size_of::<f32>() + workspace;
    let near = (found as f64 / told as f64 - 1.0).abs() < 0.1;
    println!("{kernel}: {found} bytes, {told} told ({workspace} of them workspace)");
    assert!(near && workspace * 5 > told, "{kernel}: {found} bytes, {told} told ({workspace} of them workspace)");
}

/// One test, since the allocator counts for the whole process.
#[test]
fn workspaces_are_what_the_kernels_tell() {
    // How many tasks run at once is then known.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let runtime = Runtime::Cpu { threads: 1 };

    // The cross entropy never has more logits than one chunk of rows; all at once would be 12 times as large.
    let (n, h, classes, chunk_rows) = (400, 64, 30_000, 32);
    let (hidden, weight) = (ramp([n, h]), ramp([classes, h]));
    let targets: Vec<i32> = (0..n as i32).collect();
    let run = || linear_cross_entropy(hidden.clone(), weight.clone(), &targets, Some(30.0), 1.0, chunk_rows, true);
    drop(run());
    LARGEST.store(0, Relaxed);
    let (found, result) = most(run);
    let largest = LARGEST.load(Relaxed);
    assert!(result.loss.iter().all(|loss| loss.is_finite()) && result.d_hidden.is_some());
    let logits = logits_bytes(chunk_rows, classes);
    assert!((logits..=logits + 4096).contains(&largest), "{largest} bytes at once, {logits} for a chunk's logits");
    let told = cross_entropy::workspace_bytes(runtime, chunk_rows, h, classes) + (n * h + n) * size_of::<f32>();
    assert!((found as f64 / told as f64 - 1.0).abs() < 0.02, "cross entropy: {found} bytes, {told} told");

    let (n, input, output, rank) = (2048, 32, 64, 32);
    let (x, weight) = (ramp([n, input]), ramp([output, input]));
    let (a, b) = (ramp([rank, input]), ramp([output, rank]));
    let make = || {
        let [x, a, b] = [&x, &a, &b].map(|t| t.clone().autodiff().require_grad());
        lora_linear(x, weight.clone(), Some(&Adapter { a, b, scale: 2.0, dropout: None }))
    };
    let gradients = n * input + rank * (input + output);
    assert_pulled_back("linear", make, gradients, linear::workspace_bytes(runtime, n, input, output, rank, false));

    let (tokens, heads) = (128, Heads { query: 16, kv: 2, dim: 16 });
    let (q, k) = (ramp([tokens, heads.query, heads.dim]), ramp([tokens, heads.kv, heads.dim]));
    let segments = Segments::new(vec![0, tokens as u32], tokens).unwrap();
    let make = || {
        let [q, k, v] = [&q, &k, &k].map(|t| t.clone().autodiff().require_grad());
        windowed_attention(q, k, v, &segments, Some(64), 1.0).reshape([tokens, heads.query * heads.dim])
    };
    let gradients = tokens * heads.dim * (heads.query + 2 * heads.kv);
    assert_pulled_back("attention", make, gradients, attention::workspace_bytes(runtime, tokens, heads));

    let shape = moe::Shape { tokens: 512, top_k: 2, experts: 4, hidden: 64, intermediate: 96 };
    let moe::Shape { tokens, top_k, experts, hidden, intermediate } = shape;
    let (x, gate_up) = (ramp([tokens, hidden]), ramp([experts, 2 * intermediate, hidden]));
    let (down, weights) = (ramp([experts, hidden, intermediate]), ramp([tokens, top_k]));
    // All tokens go to the same experts, so that a tile is full.
    let chosen: Vec<i32> = (0..tokens * top_k).map(|i| (i % top_k) as i32).collect();
    let chosen = Tensor::<2, Int>::from_data(TensorData::new(chosen, [tokens, top_k]), &Device::flex());
    let make = || {
        let [x, weights] = [&x, &weights].map(|t| t.clone().autodiff().require_grad());
        moe::experts(x, &Routing { weights, experts: chosen.clone() }, gate_up.clone(), down.clone())
    };
    assert_pulled_back("experts", make, tokens * (hidden + top_k), moe::workspace_bytes(runtime, &shape));
}
