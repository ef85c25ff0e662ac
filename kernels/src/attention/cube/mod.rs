//! Attention on cubecl: FlashAttention-2's tiles, in f32 without matrix instructions and, of rounded operands, with them (`mma`).
//! Only loads and stores know the dtype of tensors.
//!
//! Without them a cube has 32 queries (or, for the gradients of keys and values, 32 keys) of one head and segment, and walks the tiles
//! of 32 on the other side that the window and the segment let it see; no other tile is loaded. Eight units share a row
//! and each has every eighth column of the scores and of the result. The head dimension is split into chunks of 32, so
//! that shared memory does not grow with it: at most 25,344 bytes. Tiles are cut at segments, so a segment's result is
//! the same whatever stands beside it.

mod backward;
mod forward;
mod mma;
mod tile;

use super::backend::{AttentionKernel, AttentionOps, Output};
use super::{Attention, Segments};
use crate::cube::{alike, empty, line, packed, units, upload};
use crate::resolve::cube::{Math, math};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use tile::TILE;

/// The largest head dimension whose sums stay in registers.
pub const MAX_DIM: usize = 512;

/// `[tiles, 4]`: rows and segment of each tile of `rows` rows, none across segments.
fn tiles(segments: &Segments, rows: usize) -> Vec<u32> {
    let of_segment = |segment: std::ops::Range<usize>| {
        let (start, end) = (segment.start as u32, segment.end as u32);
        segment.step_by(rows).flat_map(move |row| [row as u32, (row as u32 + rows as u32).min(end), start, end])
    };
    segments.ranges().flat_map(of_segment).collect()
}

/// Operands as the kernels take them.
struct Inputs {
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    tiles: CubeTensor,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: usize,
    scale: f32,
}

impl Inputs {
    fn new(q: CubeTensor, k: CubeTensor, v: CubeTensor, attention: &Attention, tile_rows: usize) -> Self {
        let ([tokens, heads, dim], [_, kv_heads, _]) = (q.shape().dims(), k.shape().dims());
        assert!(
            dim <= MAX_DIM,
            "windowed_attention: the cubecl kernel takes head dimensions up to {MAX_DIM}, not {dim}"
        );
        let window = attention.window.unwrap_or(tokens).min(tokens);
        let tiles = upload(&q, &tiles(&attention.segments, tile_rows));
        Self { q, k, v, tiles, heads, kv_heads, dim, window, scale: attention.scale as f32 }
    }

    fn cubes(&self, heads: usize) -> CubeCount {
        CubeCount::Static((self.tiles.shape().num_elements() / 4) as u32, heads as u32, 1)
    }
}

/// The dot of every head's result and its gradient: `[tokens, query heads]`, f32.
fn row_dots(out: CubeTensor, dout: CubeTensor) -> CubeTensor {
    let [tokens, heads, dim] = out.shape().dims();
    let dots = empty(&out, [tokens, heads], DType::F32);
    let dtype = dtype_to_storage_type(out.dtype);
    backward::row_dots::launch(
        &out.client.clone(),
        line(tokens * heads),
        units(),
        out.into_buffer_arg(),
        dout.into_buffer_arg(),
        dots.clone().into_buffer_arg(),
        dim,
        dtype,
    );
    dots
}

/// The forward pass, computed in `math`.
fn attend(q: CubeTensor, k: CubeTensor, v: CubeTensor, attention: &Attention, math: Math) -> Output<CubeBackend> {
    let [q, k, v] = alike("windowed_attention", [q, k, v]);
    let [tokens, heads, _] = q.shape().dims();
    let output = Output { out: empty(&q, q.shape(), q.dtype), lse: empty(&q, [tokens, heads], DType::F32) };
    match math {
        Math::F32 => forward(q, k, v, output.clone(), attention),
        Math::Half { operands, unit } => mma::forward(q, k, v, output.clone(), attention, (operands, unit)),
    }
    output
}

/// The gradients of q, k and v, computed in `math` from them and the gradient of the result.
fn pull_back(
    inputs: [CubeTensor; 4],
    output: Output<CubeBackend>,
    attention: &Attention,
    math: Math,
) -> [CubeTensor; 3] {
    let [q, k, v, dout] = inputs;
    let [q, k, v, out, dout] = alike("windowed_attention", [q, k, v, output.out, dout]);
    let saved = [packed("windowed_attention", output.lse), row_dots(out, dout.clone())];
    let gradients = [&q, &k, &v].map(|x| empty(x, x.shape(), x.dtype));
    let inputs = [q, k, v, dout];
    match math {
        Math::F32 => backward(inputs, saved, gradients.clone(), attention),
        Math::Half { operands, unit } => mma::backward(inputs, saved, gradients.clone(), attention, (operands, unit)),
    }
    gradients
}

/// Writes the result and the log-sum-exp, without matrix instructions.
fn forward(q: CubeTensor, k: CubeTensor, v: CubeTensor, output: Output<CubeBackend>, attention: &Attention) {
    let dtype = dtype_to_storage_type(q.dtype);
    let inputs = Inputs::new(q, k, v, attention, TILE);
    let cubes = inputs.cubes(inputs.heads);
    let Inputs { q, k, v, tiles, heads, kv_heads, dim, window, scale } = inputs;
    forward::forward::launch(
        &q.client.clone(),
        cubes,
        units(),
        q.into_buffer_arg(),
        k.into_buffer_arg(),
        v.into_buffer_arg(),
        tiles.into_buffer_arg(),
        output.out.into_buffer_arg(),
        output.lse.into_buffer_arg(),
        heads,
        kv_heads,
        window,
        scale,
        dim,
        dtype,
    );
}

/// Writes the three gradients, without matrix instructions.
fn backward(
    [q, k, v, dout]: [CubeTensor; 4],
    [lse, delta]: [CubeTensor; 2],
    [dq, dk, dv]: [CubeTensor; 3],
    attention: &Attention,
) {
    let dtype = dtype_to_storage_type(q.dtype);
    let inputs = Inputs::new(q, k, v, attention, TILE);
    let (query_cubes, key_cubes) = (inputs.cubes(inputs.heads), inputs.cubes(inputs.kv_heads));
    let Inputs { q, k, v, tiles, heads, kv_heads, dim, window, scale } = inputs;
    let client = q.client.clone();
    backward::backward_queries::launch(
        &client,
        query_cubes,
        units(),
        q.clone().into_buffer_arg(),
        k.clone().into_buffer_arg(),
        v.clone().into_buffer_arg(),
        dout.clone().into_buffer_arg(),
        lse.clone().into_buffer_arg(),
        delta.clone().into_buffer_arg(),
        tiles.clone().into_buffer_arg(),
        dq.into_buffer_arg(),
        heads,
        kv_heads,
        window,
        scale,
        dim,
        dtype,
    );
    backward::backward_keys::launch(
        &client,
        key_cubes,
        units(),
        q.into_buffer_arg(),
        k.into_buffer_arg(),
        v.into_buffer_arg(),
        dout.into_buffer_arg(),
        lse.into_buffer_arg(),
        delta.into_buffer_arg(),
        tiles.into_buffer_arg(),
        dk.into_buffer_arg(),
        dv.into_buffer_arg(),
        heads,
        kv_heads,
        window,
        scale,
        dim,
        dtype,
    );
}

impl AttentionKernel for CubeBackend {
    fn forward(q: CubeTensor, k: CubeTensor, v: CubeTensor, attention: &Attention) -> Output<CubeBackend> {
        let math = math(&q.client, attention.operands);
        attend(q, k, v, attention, math)
    }

    fn backward(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        output: Output<CubeBackend>,
        dout: CubeTensor,
        attention: &Attention,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let math = math(&q.client, attention.operands);
        let [dq, dk, dv] = pull_back([q, k, v, dout], output, attention, math);
        (dq, dk, dv)
    }
}

impl AttentionOps for CubeBackend {
    fn windowed_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        attention: Attention,
    ) -> (CubeTensor, CubeTensor) {
        let Output { out, lse } = Self::forward(q, k, v, &attention);
        (out, lse)
    }

    fn windowed_attention_known(
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        out: CubeTensor,
        _: CubeTensor,
        _: Attention,
    ) -> CubeTensor {
        out
    }
}
