//! Times of one operation at the shapes of Gemma-4 26B-A4B, a JSON object a line: what `tests/gpu/bench` puts beside PyTorch.
//!
//!     operation_times cuda:0 windowed 16384
//!     operation_times cpu experts 64 --small

use burn::tensor::{DType, Device, Distribution, Tensor};
use std::time::Instant;
use tunehost_kernels::attention::{Attention, Segments, windowed_attention_output};
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::cross_entropy::linear_cross_entropy;
use tunehost_kernels::linear::{Adapter, lora_linear};
use tunehost_kernels::moe;

const USAGE: &str = "usage: operation_times DEVICE windowed|full|experts|linear|loss TOKENS [--small]\n\
                     DEVICE is cpu, wgpu or cuda:0, as the build has them";

/// Rows of the loss head at once: their logits, and the gradient of these, are under 1 GiB with the result of 32,768 rows.
const CHUNK_ROWS: usize = 512;

/// As in `tests/gpu/bench.py`.
struct Sizes {
    hidden: usize,
    experts: usize,
    top_k: usize,
    expert: usize,
    vocabulary: usize,
    rank: usize,
    runs: usize,
    windowed: Heads,
    full: Heads,
}

/// Heads of queries, those of keys and values, values of a head, and the window.
type Heads = (usize, usize, usize, Option<usize>);

const LARGE: Sizes = Sizes {
    hidden: 2_816,
    experts: 128,
    top_k: 8,
    expert: 704,
    vocabulary: 262_144,
    rank: 64,
    runs: 5,
    windowed: (16, 8, 256, Some(1_024)),
    full: (16, 2, 512, None),
};
const SMALL: Sizes = Sizes {
    hidden: 64,
    experts: 8,
    top_k: 2,
    expert: 32,
    vocabulary: 512,
    rank: 4,
    runs: 3,
    windowed: (4, 2, 64, Some(16)),
    full: (4, 1, 128, None),
};

struct Bench {
    device: Device,
    /// Of frozen matrices, and of what operations pass to each other.
    dtype: DType,
    sizes: Sizes,
    tokens: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (words, sizes) = match words[..] {
        [device, operation, tokens, "--small"] => ([device, operation, tokens], SMALL),
        [device, operation, tokens] => ([device, operation, tokens], LARGE),
        _ => usage(),
    };
    let (Some(device), Ok(tokens)) = (device(words[0]), words[2].parse()) else { usage() };
    let dtype = if words[0].starts_with("cuda") { DType::BF16 } else { DType::F32 };
    let bench = Bench { device, dtype, sizes, tokens };
    match words[1] {
        "windowed" => bench.attention(bench.sizes.windowed),
        "full" => bench.attention(bench.sizes.full),
        "experts" => bench.experts(),
        "linear" => bench.linear(),
        "loss" => bench.loss(),
        _ => usage(),
    }
}

fn usage() -> ! {
    eprintln!("{USAGE}");
    std::process::exit(2)
}

fn device(name: &str) -> Option<Device> {
    match name {
        "cpu" => Some(Device::flex()),
        #[cfg(feature = "wgpu")]
        "wgpu" => Some(Device::wgpu(Default::default())),
        #[cfg(feature = "cuda")]
        "cuda:0" => Some(Device::cuda(0)),
        _ => None,
    }
}

fn tracked<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().autodiff().require_grad()
}

impl Bench {
    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::random(shape, Distribution::Uniform(-0.1, 0.1), &self.device)
    }

    /// [`Bench::random`] as frozen matrices and activations are kept.
    fn rounded<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.random(shape).cast(self.dtype)
    }

    /// Times `run`, which does `flops` operations that the model needs; what a kernel computes a second time is not among them.
    fn time(&self, pass: &str, flops: usize, mut run: impl FnMut()) {
        let sync = || self.device.sync().expect("a device that answers");
        let reserved = || self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        sync();
        self.device.memory_cleanup();
        let before = reserved();
        // Once to compile; what the pools hold afterwards is the most that it took.
        run();
        sync();
        let extra = before.zip(reserved()).map_or("null".into(), |(before, after)| (after - before).to_string());
        let ms: Vec<String> = (0..self.sizes.runs)
            .map(|_| {
                let started = Instant::now();
                run();
                sync();
                format!("{:.4}", 1e3 * started.elapsed().as_secs_f64())
            })
            .collect();
        println!(
            "{{\"by\": \"tunehost\", \"name\": \"{pass}\", \"flops\": {flops}, \"extra_bytes\": {extra}, \"ms\": [{}]}}",
            ms.join(", ")
        );
    }

    fn attention(&self, (query, kv, dim, window): Heads) {
        let tokens = self.tokens;
        let segments = Segments::new([0, tokens as u32], tokens).expect("one segment");
        let attention = Attention { segments, window, scale: 1.0 / (dim as f64).sqrt(), operands: self.dtype };
        let flops = 4 * attention.pairs() * query * dim;
        let inputs = [query, kv, kv].map(|heads| self.rounded([tokens, heads, dim]));
        let d_out = self.rounded([tokens, query * dim]);
        let run = |[q, k, v]: [Tensor<3>; 3]| windowed_attention_output(q, k, v, &attention).out;
        self.time("forward", flops, || drop(run(inputs.clone())));
        self.time("forward and backward", flops * 7 / 2, || {
            let out = run([0, 1, 2].map(|input| tracked(&inputs[input]))).reshape([tokens, query * dim]);
            drop(pull_back(out, d_out.clone()));
        });
    }

    fn experts(&self) {
        let Sizes { hidden, experts, top_k, expert, .. } = self.sizes;
        let flops = 6 * self.tokens * top_k * hidden * expert;
        let (gate_up, down) = (self.rounded([experts, 2 * expert, hidden]), self.rounded([experts, hidden, expert]));
        let routing = moe::route(self.random([self.tokens, experts]), Tensor::ones([experts], &self.device), top_k);
        self.both(flops, 2 * flops, |x| moe::experts(x, &routing, gate_up.clone(), down.clone()));
    }

    fn linear(&self) {
        let Sizes { hidden, rank, windowed: (heads, _, dim, _), .. } = self.sizes;
        let (out, tokens) = (heads * dim, self.tokens);
        let (whole, pair) = (2 * tokens * hidden * out, 2 * tokens * rank * (hidden + out));
        let (weight, a, b) = (self.rounded([out, hidden]), self.random([rank, hidden]), self.random([out, rank]));
        self.both(whole + pair, 2 * whole + 3 * pair, |x| {
            let [a, b] = [&a, &b].map(|t| if x.is_require_grad() { tracked(t) } else { t.clone() });
            lora_linear(x, weight.clone(), Some(&Adapter { a, b, scale: 1.0, dropout: None }))
        });
    }

    /// Times an operation on rows as wide as the model, and it with its backward pass.
    fn both(&self, forward: usize, both: usize, run: impl Fn(Tensor<2>) -> Tensor<2>) {
        let x = self.rounded([self.tokens, self.sizes.hidden]);
        let d_out = run(x.clone());
        self.time("forward", forward, || drop(run(x.clone())));
        self.time("forward and backward", both, || drop(pull_back(run(tracked(&x)), d_out.clone())));
    }

    fn loss(&self) {
        let Sizes { hidden, vocabulary, .. } = self.sizes;
        let (rows, weight) = (self.rounded([self.tokens, hidden]), self.rounded([vocabulary, hidden]));
        let targets: Vec<i32> = (0..self.tokens).map(|row| (row * 7919 % vocabulary) as i32).collect();
        let flops = 2 * self.tokens * hidden * vocabulary;
        for (pass, gradient) in [("forward", false), ("forward and backward", true)] {
            self.time(pass, if gradient { 2 * flops } else { flops }, || {
                let (rows, weight) = (rows.clone(), weight.clone());
                drop(linear_cross_entropy(rows, weight, &targets, Some(30.0), 1.0, CHUNK_ROWS, gradient));
            });
        }
    }
}
