//! Attention on matrix instructions, emulated: the kernels that CUDA runs, on whatever device wgpu finds.

use super::super::row_dots;
use super::backward::Backward;
use super::{forward, gradients};
use crate::attention::cpu::{self, Inputs};
use crate::attention::{Attention, Heads, Isa, Segments, reference};
use crate::mma::Unit;
use crate::testing::cube::{floats, read};
use crate::testing::{close, halves, wide};
use burn::tensor::DType;

/// The emulation multiplies f16, which WGSL has: weights and their gradients are rounded to 11 bits.
const BY: (DType, Unit) = (DType::F16, Unit::Emulated);
const TOLERANCE: f64 = 1e-3;

/// Asserts that both passes over documents that end at `offsets` equal the reference, the backward pass with `plans`.
#[track_caller]
fn check(offsets: &[u32], window: Option<usize>, [query, kv, dim]: [usize; 3], plans: [Backward; 2]) {
    let tokens = *offsets.last().unwrap() as usize;
    let heads = Heads { query, kv, dim };
    let segments = Segments::new(offsets.to_vec(), tokens).unwrap();
    let attention = Attention { segments, window, scale: 4.0 / (dim as f64).sqrt(), operands: DType::BF16 };
    let of = |heads: usize, seed| halves(tokens * heads * dim, seed);
    let (q, k, v, dout) = (of(query, 1), of(kv, 2), of(kv, 3), of(query, 4));
    let on_device = |values: &[f32]| floats(values, &[tokens, values.len() / tokens / dim, dim]);
    let (mut same_out, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens * query]);
    cpu::forward(Isa::detect(), &Inputs { q: &q, k: &k, v: &v, heads, attention: &attention }, &mut same_out, &mut lse);

    let [q_there, k_there, v_there, dout_there] = [&q, &k, &v, &dout].map(|values| on_device(values));
    let output = forward(q_there.clone(), k_there.clone(), v_there.clone(), &attention, BY);
    let [q, k, v, dout] = [q, k, v, dout].map(|values| wide(&values));
    close(&read(output.out.clone()), &reference::forward(&q, &k, &v, heads, &attention), TOLERANCE);
    close(&read(output.lse.clone()), &wide(&lse), 1e-5);

    let delta = row_dots(output.out, dout_there.clone());
    let operands = [q_there, k_there, v_there, dout_there];
    let (dq, dk, dv) = gradients(operands, [output.lse, delta], &attention, BY.0, plans);
    let expected = reference::backward(&q, &k, &v, &dout, heads, &attention);
    for (gradient, expected) in [dq, dk, dv].into_iter().zip(&expected) {
        close(&read(gradient), expected, TOLERANCE);
    }
}

#[test]
fn segments_windows_and_shared_heads_equal_the_reference() {
    let plans = Backward::both(64, Unit::Emulated);
    // More than a tile of queries and of keys, with a ragged end.
    check(&[0, 100], None, [2, 1, 64], plans);
    // Segments shorter and longer than a tile; windows that end inside tiles, of one tile, and of one key.
    check(&[0, 5, 75, 140], Some(40), [4, 2, 64], plans);
    check(&[0, 1, 70], Some(32), [8, 1, 64], plans);
    check(&[0, 1, 33], Some(1), [3, 3, 64], plans);
}

#[test]
fn heads_that_fill_no_chunk_equal_the_reference() {
    check(&[0, 1, 41], Some(20), [4, 2, 20], Backward::both(20, Unit::Emulated));
}

#[test]
fn heads_split_among_four_groups_equal_the_reference() {
    // As heads of 512 values are, whose own rows take more shared memory than devices without the instructions have.
    let plans = Backward::both(512, Unit::Native);
    let plans = plans.map(|plan| Backward { dim: 128, unit: Unit::Emulated, rows: 16, ..plan });
    check(&[0, 10, 75], Some(37), [4, 2, 128], plans);
}
