//! Experts on cubecl.
//!
//! Every choice of a token is a place `token * top_k + j`. Places are sorted by expert on the device, stably, so a row of
//! the grouped products is a place, and the host never learns how many rows an expert has. Tokens go through in chunks: what lives between
//! two products is there for a chunk's places alone.

use super::{CHUNK_TOKENS, MoeOps, router};
use crate::cube::{UNITS, activations, cover, empty, line, packed, sum_units, units};
use crate::glu::cube::{gelu, gelu_derivative};
use crate::matmul::cube::{Groups, grouped_geglu, grouped_product};
use crate::resolve::cube::Math;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use std::ops::Range;

/// A stable counting sort of `places` places from `first`, one cube an expert. Each unit counts in its own run of places those of lower
/// experts and those of its own; the first sum is where the expert begins, the running sum over units where each unit's places go.
#[cube(launch)]
fn sort_places(
    chosen: &[i32],
    offsets: &mut [u32],
    order: &mut [u32],
    rows: &mut [u32],
    first: usize,
    places: usize,
    experts: usize,
) {
    let mut own = Shared::<[u32]>::new_slice(256usize);
    let mut lower = Shared::<[u32]>::new_slice(256usize);
    let expert = CUBE_POS;
    let unit = UNIT_POS as usize;
    let run = places.div_ceil(UNITS);
    let start = first + usize::min(unit * run, places);
    let end = usize::min(start + run, first + places);
    let mut count_own = 0u32;
    let mut count_lower = 0u32;
    for place in start..end {
        let e = chosen[place] as usize;
        if e == expert {
            count_own += 1u32;
        }
        if e < expert {
            count_lower += 1u32;
        }
    }
    own[unit] = count_own;
    lower[unit] = count_lower;
    sync_cube();
    let mut begin = 0u32;
    let mut all = 0u32;
    let mut before = 0u32;
    for u in 0..UNITS {
        begin += lower[u];
        all += own[u];
        if u < unit {
            before += own[u];
        }
    }
    if expert < experts {
        if unit == 0 {
            offsets[expert] = begin;
            if expert == experts - 1 {
                offsets[experts] = begin + all;
            }
        }
        let mut next = begin + before;
        for place in start..end {
            if chosen[place] as usize == expert {
                order[next as usize] = place as u32;
                rows[place - first] = next;
                next += 1u32;
            }
        }
    }
}

/// activation = gelu(gate) * up from rows `[gate, up]`.
#[cube(launch)]
fn activate<E: Float>(gate_up: &[E], activation: &mut [E], intermediate: usize, #[define(E)] _kept: ElemType) {
    let i = ABSOLUTE_POS;
    if i < activation.len() {
        let gate = i / intermediate * intermediate * 2 + i % intermediate;
        let up = f32::cast_from(gate_up[gate + intermediate]);
        activation[i] = E::cast_from(gelu(f32::cast_from(gate_up[gate])) * up);
    }
}

/// From rows `[gate, up]` and the gradient of their activation before the router's weight: the gradient of `[gate, up]` in their place,
/// and that of the weight, the activation times its gradient. One cube a row.
#[cube(launch)]
fn activate_backward<E: Float>(
    gate_up: &mut [E],
    d_activation: &[E],
    weights: &[f32],
    order: &[u32],
    d_weights: &mut [f32],
    places: usize,
    intermediate: usize,
    #[define(E)] _kept: ElemType,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < places;
    let row = select(wanted, CUBE_POS, 0usize);
    let place = order[row] as usize;
    let mut dot = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < intermediate {
        let at = row * intermediate * 2 + i;
        let gate = f32::cast_from(gate_up[at]);
        let up = f32::cast_from(gate_up[at + intermediate]);
        let d = f32::cast_from(d_activation[row * intermediate + i]);
        dot += gelu(gate) * up * d;
        if wanted {
            let d = weights[place] * d;
            gate_up[at] = E::cast_from(d * up * gelu_derivative(gate));
            gate_up[at + intermediate] = E::cast_from(d * gelu(gate));
        }
        i += UNITS;
    }
    let dot = sum_units(dot, &mut partial);
    if wanted && UNIT_POS == 0u32 {
        d_weights[place] = dot;
    }
}

/// The sum of `tokens` tokens from `first_token` over their rows, weighted or not, in the order of the experts' indices: that of the sorted
/// rows.
#[cube(launch)]
fn combine<E: Float, T: Float>(
    sorted: &[E],
    rows: &[u32],
    weights: &[f32],
    out: &mut [T],
    first_token: usize,
    tokens: usize,
    hidden: usize,
    top_k: usize,
    #[comptime] weighted: bool,
    #[define(E, T)] _dtypes: [ElemType; 2],
) {
    let i = ABSOLUTE_POS;
    if i < tokens * hidden {
        let first = i / hidden * top_k;
        let mut sum = 0.0f32;
        let mut next = 0u32;
        for _ in 0..top_k {
            // The token's first row at or after `next`.
            let mut best = 0xffff_ffffu32;
            let mut place = first;
            for j in 0..top_k {
                let row = rows[first + j];
                if row >= next && row < best {
                    best = row;
                    place = first + j;
                }
            }
            let mut value = f32::cast_from(sorted[best as usize * hidden + i % hidden]);
            if comptime!(weighted) {
                value *= weights[first_token * top_k + place];
            }
            sum += value;
            next = best + 1u32;
        }
        out[first_token * hidden + i] = T::cast_from(sum);
    }
}

/// The choices of some tokens in the order of the experts.
struct Sorted {
    /// `[experts + 1]`
    offsets: CubeTensor,
    /// `[places]`: the place of each row, among those of all tokens.
    order: CubeTensor,
    /// `[places]`: the row of each place, from the first of these tokens.
    rows: CubeTensor,
    tokens: Range<usize>,
    top_k: usize,
}

impl Sorted {
    /// Those of `tokens` among `chosen [., k]`, of so many experts.
    fn new(chosen: &CubeTensor, tokens: Range<usize>, experts: usize) -> Self {
        let [_, top_k] = chosen.shape().dims();
        let (first, places) = (tokens.start * top_k, tokens.len() * top_k);
        let column = |len: usize| empty(chosen, [len], DType::U32);
        let sorted = Self { offsets: column(experts + 1), order: column(places), rows: column(places), tokens, top_k };
        sort_places::launch(
            &chosen.client,
            line(experts),
            units(),
            chosen.clone().into_buffer_arg(),
            sorted.offsets.clone().into_buffer_arg(),
            sorted.order.clone().into_buffer_arg(),
            sorted.rows.clone().into_buffer_arg(),
            first,
            places,
            experts,
        );
        sorted
    }

    fn places(&self) -> usize {
        self.tokens.len() * self.top_k
    }

    fn groups(&self) -> Groups<'_> {
        Groups { offsets: &self.offsets, rows: self.places() }
    }

    /// Where a row's token is.
    fn sources(&self) -> (&CubeTensor, usize) {
        (&self.order, self.top_k)
    }

    /// Rows of all tokens to rows of places, each times its expert's matrix.
    fn expand(&self, tokens: &CubeTensor, matrices: &CubeTensor, transposed: bool, math: Math) -> CubeTensor {
        let gather = Some(self.sources());
        grouped_product(tokens.clone(), (matrices.clone(), transposed), self.groups(), gather, math)
    }

    /// Rows of places, each times its expert's matrix.
    fn multiply(&self, rows: CubeTensor, matrices: &CubeTensor, transposed: bool, math: Math) -> CubeTensor {
        grouped_product(rows, (matrices.clone(), transposed), self.groups(), None, math)
    }

    /// gelu(gate) * up, a row for each place.
    fn activation(&self, tokens: &CubeTensor, gate_up: &CubeTensor, math: Math) -> CubeTensor {
        if let Math::Half { operands, unit } = math {
            return grouped_geglu(tokens.clone(), gate_up.clone(), self.groups(), self.sources(), operands, unit);
        }
        let made = self.expand(tokens, gate_up, true, math);
        let [places, both] = made.shape().dims();
        let activation = empty(&made, [places, both / 2], made.dtype);
        let kept = dtype_to_storage_type(made.dtype);
        activate::launch(
            &activation.client,
            cover(places * both / 2),
            units(),
            made.into_buffer_arg(),
            activation.clone().into_buffer_arg(),
            both / 2,
            kept,
        );
        activation
    }

    /// Writes the sums of these tokens to `out [., hidden]` from rows of places, with the places' weights where there are some.
    fn combine(&self, rows: CubeTensor, weights: Option<&CubeTensor>, out: &CubeTensor) {
        let [_, hidden] = rows.shape().dims();
        let dtypes = [rows.dtype, out.dtype].map(dtype_to_storage_type);
        // What is absent is not read: something else stands in.
        let (weighted, weights) = (weights.is_some(), weights.unwrap_or(&self.rows).clone());
        combine::launch(
            &out.client,
            cover(self.tokens.len() * hidden),
            units(),
            rows.into_buffer_arg(),
            self.rows.clone().into_buffer_arg(),
            weights.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            self.tokens.start,
            self.tokens.len(),
            hidden,
            self.top_k,
            weighted,
            dtypes,
        );
    }
}

/// What every pass takes, as kernels read it.
pub(super) struct Call {
    /// `[n, hidden]`, rounded where products round it.
    x: CubeTensor,
    weights: CubeTensor,
    chosen: CubeTensor,
    gate_up: CubeTensor,
    down: CubeTensor,
    math: Math,
    /// Of the results that are like `x`.
    dtype: DType,
    /// Tokens that go through at a time.
    pub(super) chunk_tokens: usize,
}

impl Call {
    /// Of tokens `x`, their choices `chosen` with `weights`, and the experts' matrices.
    pub(super) fn new(
        x: CubeTensor,
        [weights, chosen]: [CubeTensor; 2],
        [gate_up, down]: [CubeTensor; 2],
        math: Math,
    ) -> Self {
        assert_eq!(chosen.dtype, DType::I32, "experts: the cubecl kernel takes choices in i32, not {:?}", chosen.dtype);
        let (x, weights, chosen) = (activations("experts", x), packed("experts", weights), into_contiguous(chosen));
        let dtype = x.dtype;
        let x = math.operand(x);
        Self { x, weights, chosen, gate_up, down, math, dtype, chunk_tokens: CHUNK_TOKENS }
    }

    /// A result like `x`, and the tokens of each of its chunks with their choices.
    fn by_chunks(&self) -> (CubeTensor, impl Iterator<Item = Sorted>) {
        let ([tokens, hidden], experts) = (self.x.shape().dims(), self.down.shape()[0]);
        let sorted = (0..tokens)
            .step_by(self.chunk_tokens)
            .map(move |first| Sorted::new(&self.chosen, first..tokens.min(first + self.chunk_tokens), experts));
        (empty(&self.x, [tokens, hidden], self.dtype), sorted)
    }

    /// The weighted outputs of each token's experts, `[n, hidden]`.
    pub(super) fn forward(self) -> CubeTensor {
        let (out, chunks) = self.by_chunks();
        for sorted in chunks {
            let activation = sorted.activation(&self.x, &self.gate_up, self.math);
            let rows = sorted.multiply(activation, &self.down, true, self.math);
            sorted.combine(rows, Some(&self.weights), &out);
        }
        out
    }

    /// The gradients of `x` and of the weights.
    pub(super) fn backward(self, d_out: CubeTensor) -> (CubeTensor, CubeTensor) {
        let d_out = self.math.operand(activations("experts", d_out));
        let d_weights = empty(&self.weights, self.weights.shape(), DType::F32);
        let [_, _, intermediate] = self.down.shape().dims();
        let (d_x, chunks) = self.by_chunks();
        for sorted in chunks {
            let gate_up = sorted.expand(&self.x, &self.gate_up, true, self.math);
            let d_activation = sorted.expand(&d_out, &self.down, false, self.math);
            let kept = dtype_to_storage_type(gate_up.dtype);
            activate_backward::launch(
                &gate_up.client,
                line(sorted.places()),
                units(),
                gate_up.clone().into_buffer_arg(),
                d_activation.into_buffer_arg(),
                self.weights.clone().into_buffer_arg(),
                sorted.order.clone().into_buffer_arg(),
                d_weights.clone().into_buffer_arg(),
                sorted.places(),
                intermediate,
                kept,
            );
            sorted.combine(sorted.multiply(gate_up, &self.gate_up, false, self.math), None, &d_x);
        }
        (d_x, d_weights)
    }
}

impl MoeOps for CubeBackend {
    fn moe_route(logits: CubeTensor, per_expert_scale: CubeTensor, top_k: usize) -> (CubeTensor, CubeTensor) {
        router::choose(logits, per_expert_scale, top_k)
    }

    fn moe_route_backward(
        logits: CubeTensor,
        per_expert_scale: CubeTensor,
        experts: CubeTensor,
        d_weights: CubeTensor,
    ) -> CubeTensor {
        router::choose_backward(logits, per_expert_scale, experts, d_weights)
    }

    fn moe_experts(
        x: CubeTensor,
        weights: CubeTensor,
        experts: CubeTensor,
        gate_up: CubeTensor,
        down: CubeTensor,
    ) -> CubeTensor {
        let math = Math::with(&gate_up);
        Call::new(x, [weights, experts], [gate_up, down], math).forward()
    }

    fn moe_experts_known(
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        _: CubeTensor,
        out: CubeTensor,
    ) -> CubeTensor {
        out
    }

    fn moe_experts_backward(
        x: CubeTensor,
        weights: CubeTensor,
        experts: CubeTensor,
        gate_up: CubeTensor,
        down: CubeTensor,
        d_out: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let math = Math::with(&gate_up);
        Call::new(x, [weights, experts], [gate_up, down], math).backward(d_out)
    }
}
