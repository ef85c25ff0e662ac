//! Causal attention inside document segments, over an optional sliding window, with grouped query heads.
//!
//! Scores exist one tile at a time: the forward pass is FlashAttention-2's online softmax (Dao, arXiv 2307.08691),
//! which keeps one log-sum-exp per token and head, and the backward pass computes each tile of scores again from it.
//! There is no mask tensor: a tile outside the window, the segment or the causal triangle is never visited, so the
//! work is `O(tokens * min(segment, window) * head_dim)`.

mod backend;
mod buffer;
pub mod cpu;
#[cfg(feature = "cubecl")]
pub mod cube;
pub mod reference;
mod segments;
mod simd;
mod tile;

use crate::Runtime;
use crate::trace::{self, Work};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};
use half::bf16;

pub use backend::{AttentionKernel, AttentionOps};
pub use segments::{Segments, SegmentsError};
pub use simd::Isa;

/// Which keys a query sees, and how scores are scaled.
#[derive(Debug, Clone)]
pub struct Attention {
    /// The documents of the micro-batch; no query sees a key of another one.
    pub segments: Segments,
    /// Query `i` sees keys `i - window + 1 ..= i` of its segment; all up to `i` where there is no window.
    pub window: Option<usize>,
    /// Factor on `q . k` before the softmax.
    pub scale: f64,
    /// As what `q`, `k` and `v` may be multiplied. With BF16, on a device with matrix instructions for it, they, the softmax's weights and
    /// the gradient of the result are rounded; sums are f32, and so is everything elsewhere.
    pub operands: DType,
}

impl Attention {
    /// Pairs of a query and a key that it sees.
    pub fn pairs(&self) -> usize {
        let lengths = self.segments.cu_seqlens().windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        let seen = |tokens: usize| {
            let window = self.window.unwrap_or(tokens).min(tokens);
            window * (window + 1) / 2 + (tokens - window) * window
        };
        lengths.map(seen).sum()
    }
}

/// Sizes of the heads: query head `h` reads key and value head `h / (query / kv)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads, a multiple of `kv`.
    pub query: usize,
    /// Number of key and value heads.
    pub kv: usize,
    /// Values per head.
    pub dim: usize,
}

/// Bytes that the gradient takes beside inputs and results, for a document of `tokens`; the forward pass takes less.
///
/// On the CPU a value for each query and head, and each thread's tiles; on cubecl the same value, four numbers for each tile of
/// 32 rows, and where matrix instructions multiply bf16 and activations are not bf16 the three inputs and the gradient of the result,
/// rounded.
pub fn workspace_bytes(runtime: Runtime, tokens: usize, heads: Heads) -> usize {
    match runtime {
        Runtime::Cpu { threads } => cpu::workspace_bytes(tokens, heads, threads),
        Runtime::Cubecl { bf16, activations } => {
            let rounds = bf16 && activations != DType::BF16;
            let rounded = if rounds { 2 * tokens * (heads.query + heads.kv) * heads.dim } else { 0 };
            let tiles = tokens.div_ceil(32) * 4 * size_of::<u32>();
            tokens * heads.query * size_of::<f32>() + tiles + rounded * size_of::<bf16>()
        }
    }
}

/// What attention computed in one pass, so that a second one over the same inputs need not.
#[derive(Debug, Clone)]
pub struct Output {
    /// The result, with the shape and the dtype of `q`.
    pub out: Tensor<3>,
    /// Base-2 logarithm of every query's sum of `2^(score * log2(e))`: `[tokens, query heads]`, f32.
    pub lse: Tensor<2>,
}

/// Attention of `q [tokens, query heads, head_dim]` over `k`, `v` `[tokens, kv heads, head_dim]`, all of one dtype: f32, and where
/// cubecl computes also f16 or bf16. The result has the shape and the dtype of `q`, and is computed in f32. Heads of 16 to 512 values are
/// meant; multiples of 16 are the fast ones.
///
/// Differentiable in `q`, `k` and `v`, whose gradients have their dtype. Kept for the backward pass: these three, the result, and the
/// log-sum-exp `[tokens, query heads]` in f32. Results do not depend on the number of threads, and those of a segment do not depend on
/// the other segments, to the last bit.
///
/// # Panics
/// If the shapes, the segments and each other do not fit, on a window of 0, or on a dtype that is not among these.
pub fn windowed_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    segments: &Segments,
    window: Option<usize>,
    scale: f64,
) -> Tensor<3> {
    let attention = Attention { segments: segments.clone(), window, scale, operands: DType::F32 };
    windowed_attention_output(q, k, v, &attention).out
}

/// [`windowed_attention`], with what a second pass needs.
pub fn windowed_attention_output(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, attention: &Attention) -> Output {
    check(&q, &k, &v, attention);
    let _span = trace::kernel("windowed_attention", || work(2, q.dims(), k.dims(), q.dtype(), attention));
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    let (out, lse) = Dispatch::windowed_attention(q, k, v, attention.clone());
    Output { out: Tensor::from_dispatch(out), lse: Tensor::from_dispatch(lse) }
}

/// [`windowed_attention`] whose `output` is known: only its gradients are still computed.
///
/// # Panics
/// As [`windowed_attention`].
pub fn windowed_attention_known(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    attention: &Attention,
    output: Output,
) -> Tensor<3> {
    check(&q, &k, &v, attention);
    let [tokens, query, _] = q.dims();
    assert_eq!(output.out.dims(), q.dims(), "windowed_attention: the known result has the shape of q");
    assert_eq!(output.lse.dims(), [tokens, query], "windowed_attention: a log-sum-exp for each query and head");
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    let (out, lse) = (output.out.into_dispatch(), output.lse.into_dispatch());
    Tensor::from_dispatch(Dispatch::windowed_attention_known(q, k, v, out, lse, attention.clone()))
}

/// Two products forward; backward five, since the scores are computed again. As many values go in and out.
fn work(products: usize, q: [usize; 3], k: [usize; 3], dtype: DType, attention: &Attention) -> Work {
    let [_, heads, dim] = q;
    let values = 2 * (q.iter().product::<usize>() + k.iter().product::<usize>());
    let passes = if products > 2 { 2 } else { 1 };
    Work::of(products * 2 * attention.pairs() * heads * dim, passes * values, dtype)
}

fn check(q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>, attention: &Attention) {
    let ([tokens, query, dim], [_, kv, _]) = (q.dims(), k.dims());
    assert_eq!(k.dims(), [tokens, kv, dim], "windowed_attention: k does not fit q {:?}", q.dims());
    assert_eq!(v.dims(), k.dims(), "windowed_attention: k and v have one shape");
    assert!(kv > 0 && query % kv == 0, "windowed_attention: {query} query heads over {kv} key and value heads");
    assert_eq!(attention.segments.tokens(), tokens, "windowed_attention: the segments end where the tokens do");
    assert_ne!(attention.window, Some(0), "windowed_attention: a query sees itself, so a window is at least 1");
}
