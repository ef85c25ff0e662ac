//! Times windowed attention on the CPU: milliseconds, and GFLOP/s counted over visible (query, key) pairs only
//! (4 x head_dim a pair forward, 10 x head_dim backward), on one and two threads. With `all` as its argument, for every instruction set that this CPU has.

use std::time::Instant;

use tunehost_kernels::attention::cpu::{self, Gradients, Inputs, Saved};
use tunehost_kernels::attention::{Attention, Heads, Isa, Segments};

const RUNS: usize = 9;

fn main() {
    let all = std::env::args().nth(1).is_some_and(|argument| argument == "all");
    let sets = if all { Isa::available() } else { vec![Isa::detect()] };
    for isa in sets {
        println!("{}", isa.name());
        println!("  tokens  heads  dim  window  threads   forward ms GFLOP/s   forward+backward ms GFLOP/s");
        for (tokens, query, kv, dim, window) in [
            (2048, 8, 4, 64, Some(256)),
            (4096, 8, 4, 64, Some(256)),
            (16_384, 8, 4, 64, Some(256)),
            (2048, 8, 2, 128, None),
            (2048, 16, 8, 256, Some(1024)),
        ] {
            for threads in [1, 2] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
                let heads = Heads { query, kv, dim };
                let segments = Segments::new(vec![0, tokens as u32], tokens).expect("one segment");
                let attention = Attention { segments, window, scale: 1.0 / (dim as f64).sqrt() };
                let [forward, both] = pool.install(|| measure(isa, tokens, heads, &attention));
                let pairs: usize = (1..=tokens).map(|seen| seen.min(window.unwrap_or(tokens))).sum();
                let flops = (pairs * query * dim) as f64;
                println!(
                    "  {tokens:6}  {query:2}:{kv:<2}  {dim:3}  {:>6}  {threads:7}   {:10.2} {:7.1}   {:19.2} {:7.1}",
                    window.map_or("-".into(), |w| w.to_string()),
                    forward * 1e3,
                    4.0 * flops / forward / 1e9,
                    both * 1e3,
                    14.0 * flops / both / 1e9,
                );
            }
        }
    }
}

/// The fastest of a few runs, in seconds: forward alone, and both passes.
fn measure(isa: Isa, tokens: usize, heads: Heads, attention: &Attention) -> [f64; 2] {
    let fill = |count: usize, step: usize| -> Vec<f32> {
        (0..count).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    };
    let (query, kv) = (tokens * heads.query * heads.dim, tokens * heads.kv * heads.dim);
    let (q, k, v, dout) = (fill(query, 7), fill(kv, 11), fill(kv, 13), fill(query, 17));
    let (mut out, mut lse) = (vec![0.0; query], vec![0.0; tokens * heads.query]);
    let (mut dq, mut dk, mut dv) = (vec![0.0; query], vec![0.0; kv], vec![0.0; kv]);
    let inputs = Inputs { q: &q, k: &k, v: &v, heads, attention };
    let mut fastest = [f64::INFINITY; 2];
    for _ in 0..RUNS {
        let start = Instant::now();
        cpu::forward(isa, &inputs, &mut out, &mut lse);
        let forward = start.elapsed().as_secs_f64();
        let gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        cpu::backward(isa, &inputs, &Saved { out: &out, lse: &lse, dout: &dout }, gradients);
        let both = start.elapsed().as_secs_f64();
        fastest = [fastest[0].min(forward), fastest[1].min(both)];
    }
    fastest
}
