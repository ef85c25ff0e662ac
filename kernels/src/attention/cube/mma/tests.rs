//! Attention on matrix instructions, emulated: the kernels that CUDA runs, on whatever device wgpu finds.

use super::super::{attend, pull_back};
use crate::attention::cpu::{self, Inputs};
use crate::attention::{Attention, Heads, Isa, Segments, reference};
use crate::mma::Unit;
use crate::resolve::cube::Math;
use crate::testing::cube::{read, rounded};
use crate::testing::{close, halves, wide};
use burn::tensor::DType;

/// The emulation multiplies f16, which WGSL has: weights and their gradients are rounded to 11 bits.
const MATH: Math = Math::Half { operands: DType::F16, unit: Unit::Emulated };
const TOLERANCE: f64 = 1e-3;

/// Asserts that both passes over documents that end at `offsets` equal the reference, of tensors of `dtype` and to it.
#[track_caller]
fn check(offsets: &[u32], window: Option<usize>, [query, kv, dim]: [usize; 3], dtype: DType) {
    let tokens = *offsets.last().unwrap() as usize;
    let heads = Heads { query, kv, dim };
    let segments = Segments::new(offsets.to_vec(), tokens).unwrap();
    let attention = Attention { segments, window, scale: 4.0 / (dim as f64).sqrt(), operands: DType::BF16 };
    let of = |heads: usize, seed| halves(tokens * heads * dim, seed);
    let inputs = [of(query, 1), of(kv, 2), of(kv, 3), of(query, 4)];
    let there = inputs.each_ref().map(|values| rounded(values, &[tokens, values.len() / tokens / dim, dim], dtype));
    let [q, k, v, dout] = inputs.each_ref().map(|values| wide(values));

    let [on_q, on_k, on_v, _] = there.clone();
    let output = attend(on_q, on_k, on_v, &attention, MATH);
    assert_eq!(output.out.dtype, dtype);
    close(&read(output.out.clone()), &reference::forward(&q, &k, &v, heads, &attention), TOLERANCE);
    let (mut same_out, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens * query]);
    let [q32, k32, v32, _] = &inputs;
    cpu::forward(
        Isa::detect(),
        &Inputs { q: q32, k: k32, v: v32, heads, attention: &attention },
        &mut same_out,
        &mut lse,
    );
    close(&read(output.lse.clone()), &wide(&lse), 1e-5);

    let gradients = pull_back(there, output, &attention, MATH);
    let expected = reference::backward(&q, &k, &v, &dout, heads, &attention);
    for (gradient, expected) in gradients.into_iter().zip(&expected) {
        assert_eq!(gradient.dtype, dtype);
        close(&read(gradient), expected, TOLERANCE);
    }
}

#[test]
fn segments_windows_and_shared_heads_equal_the_reference() {
    // More than a tile of queries and of keys, with a ragged end.
    check(&[0, 100], None, [2, 1, 64], DType::F32);
    // Segments shorter and longer than a tile; windows that end inside tiles, of one tile, and of one key.
    for dtype in [DType::F32, DType::F16] {
        check(&[0, 5, 75, 140], Some(40), [4, 2, 64], dtype);
    }
    check(&[0, 1, 70], Some(32), [8, 1, 64], DType::F16);
    check(&[0, 1, 33], Some(1), [3, 3, 64], DType::F16);
}

#[test]
fn heads_that_fill_no_chunk_equal_the_reference() {
    check(&[0, 1, 41], Some(20), [4, 2, 20], DType::F32);
}

#[test]
fn heads_of_256_and_512_values_equal_the_reference() {
    // Split among groups and chunks as on CUDA devices, with the production's queries to a key.
    check(&[0, 10, 75], Some(37), [2, 1, 256], DType::F16);
    check(&[0, 10, 75], None, [8, 1, 512], DType::F16);
}
