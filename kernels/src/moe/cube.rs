//! Router and experts on cubecl.
//!
//! Every choice of a token is a place `token * top_k + j`. Places are sorted by expert on the device, stably, so a row of
//! the grouped products is a place, and the host never learns how many rows an expert has.

use super::MoeOps;
use crate::cube::{UNITS, cover, empty, line, packed, sum_units, units};
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

/// The largest logit of a row and the sum of e^(logit - largest).
#[cube]
fn softmax_of(logits: &[f32], start: usize, experts: usize) -> (f32, f32) {
    let mut largest = logits[start];
    for e in 1..experts {
        largest = f32::max(largest, logits[start + e]);
    }
    let mut total = 0.0f32;
    for e in 0..experts {
        total += f32::exp(logits[start + e] - largest);
    }
    (largest, total)
}

/// One unit a token: there are `experts * top_k` comparisons, less than the projection before them by far.
#[cube(launch)]
fn route(
    logits: &[f32],
    scale: &[f32],
    weights: &mut [f32],
    chosen: &mut [i32],
    tokens: usize,
    experts: usize,
    top_k: usize,
) {
    let token = ABSOLUTE_POS;
    if token < tokens {
        let start = token * experts;
        let (largest, total) = softmax_of(logits, start, experts);
        let mut sum = 0.0f32;
        let mut last = f32::new(3.4e38);
        let mut last_expert = 0usize;
        for j in 0..top_k {
            // The next in the order of falling logits; of equal ones the lower index is first.
            let mut best = f32::new(-3.4e38);
            let mut best_expert = experts;
            for e in 0..experts {
                let z = logits[start + e];
                let after_last = j == 0 || z < last || (z == last && e > last_expert);
                if after_last && (z > best || best_expert == experts) {
                    best = z;
                    best_expert = e;
                }
            }
            // Logits that are no numbers are after nothing: the token then names expert 0, and its weights are no numbers.
            if best_expert == experts {
                best_expert = 0usize;
                best = logits[start];
            }
            let p = f32::exp(best - largest) / total;
            sum += p;
            chosen[token * top_k + j] = best_expert as i32;
            weights[token * top_k + j] = p;
            last = best;
            last_expert = best_expert;
        }
        for j in 0..top_k {
            let place = token * top_k + j;
            weights[place] = weights[place] / sum * scale[chosen[place] as usize];
        }
    }
}

/// The expert that a token chose, and its probability among all.
#[cube]
fn choice(logits: &[f32], chosen: &[i32], start: usize, place: usize, largest: f32, total: f32) -> (usize, f32) {
    let expert = chosen[place] as usize;
    (expert, f32::exp(logits[start + expert] - largest) / total)
}

#[cube(launch)]
fn route_backward(
    logits: &[f32],
    scale: &[f32],
    chosen: &[i32],
    d_weights: &[f32],
    d_logits: &mut [f32],
    tokens: usize,
    experts: usize,
    top_k: usize,
) {
    let token = ABSOLUTE_POS;
    if token < tokens {
        let start = token * experts;
        let (largest, total) = softmax_of(logits, start, experts);
        let mut sum = 0.0f32;
        let mut through_sum = 0.0f32;
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            sum += p;
            through_sum += d_weights[token * top_k + j] * scale[e] * p;
        }
        through_sum /= sum * sum;
        let mut mean = 0.0f32;
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            mean += p * (d_weights[token * top_k + j] * scale[e] / sum - through_sum);
        }
        for e in 0..experts {
            d_logits[start + e] = (0.0f32 - mean) * f32::exp(logits[start + e] - largest) / total;
        }
        for j in 0..top_k {
            let (e, p) = choice(logits, chosen, start, token * top_k + j, largest, total);
            d_logits[start + e] += p * (d_weights[token * top_k + j] * scale[e] / sum - through_sum);
        }
    }
}

/// A stable counting sort, one cube an expert. Each unit counts in its own run of places those of lower experts and those
/// of its own; the first sum is where the expert begins, the running sum over units where each unit's places go.
#[cube(launch)]
fn sort_places(
    chosen: &[i32],
    offsets: &mut [u32],
    order: &mut [u32],
    rows: &mut [u32],
    places: usize,
    experts: usize,
) {
    let mut own = Shared::<[u32]>::new_slice(256usize);
    let mut lower = Shared::<[u32]>::new_slice(256usize);
    let expert = CUBE_POS;
    let unit = UNIT_POS as usize;
    let run = places.div_ceil(UNITS);
    let start = usize::min(unit * run, places);
    let end = usize::min(start + run, places);
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
                rows[place] = next;
                next += 1u32;
            }
        }
    }
}

/// activation = gelu(gate) * up from rows `[gate, up]`.
#[cube(launch)]
fn activate(gate_up: &[f32], activation: &mut [f32], intermediate: usize) {
    let i = ABSOLUTE_POS;
    if i < activation.len() {
        let gate = i / intermediate * intermediate * 2 + i % intermediate;
        activation[i] = gelu(gate_up[gate]) * gate_up[gate + intermediate];
    }
}

/// From rows `[gate, up]` and the gradient of their activation before the router's weight: the gradient of `[gate, up]`, and that
/// of the weight, the activation times its gradient. One cube a row.
#[cube(launch)]
fn activate_backward<E: Float>(
    gate_up: &[E],
    d_activation: &[E],
    weights: &[f32],
    order: &[u32],
    d_gate_up: &mut [E],
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
            d_gate_up[at] = E::cast_from(d * up * gelu_derivative(gate));
            d_gate_up[at + intermediate] = E::cast_from(d * gelu(gate));
        }
        i += UNITS;
    }
    let dot = sum_units(dot, &mut partial);
    if wanted && UNIT_POS == 0u32 {
        d_weights[place] = dot;
    }
}

/// Each token's sum over its rows, weighted or not, in the order of the experts' indices: that of the sorted rows.
#[cube(launch)]
fn combine<E: Float>(
    sorted: &[E],
    rows: &[u32],
    weights: &[f32],
    out: &mut [f32],
    hidden: usize,
    top_k: usize,
    #[comptime] weighted: bool,
    #[define(E)] _kept: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < out.len() {
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
                value *= weights[place];
            }
            sum += value;
            next = best + 1u32;
        }
        out[i] = sum;
    }
}

/// A token's choices in the order of the experts.
struct Sorted {
    /// `[experts + 1]`
    offsets: CubeTensor,
    /// `[places]`: the place of each row.
    order: CubeTensor,
    /// `[places]`: the row of each place.
    rows: CubeTensor,
    places: usize,
    top_k: usize,
}

impl Sorted {
    fn new(chosen: CubeTensor, experts: usize) -> Self {
        assert_eq!(chosen.dtype, DType::I32, "experts: the cubecl kernel takes choices in i32, not {:?}", chosen.dtype);
        let chosen = into_contiguous(chosen);
        let [n, top_k] = chosen.shape().dims();
        let places = n * top_k;
        let column = |len: usize| empty(&chosen, [len], DType::U32);
        let sorted = Self { offsets: column(experts + 1), order: column(places), rows: column(places), places, top_k };
        sort_places::launch(
            &chosen.client.clone(),
            line(experts),
            units(),
            chosen.into_buffer_arg(),
            sorted.offsets.clone().into_buffer_arg(),
            sorted.order.clone().into_buffer_arg(),
            sorted.rows.clone().into_buffer_arg(),
            places,
            experts,
        );
        sorted
    }

    /// Rows of tokens `[n, k]` to rows of places, each times its expert's matrix.
    fn expand(&self, tokens: CubeTensor, matrices: CubeTensor, transposed: bool, math: Math) -> CubeTensor {
        grouped_product(tokens, (matrices, transposed), self.groups(), Some(self.tokens()), math)
    }

    /// Rows of places, each times its expert's matrix.
    fn multiply(&self, rows: CubeTensor, matrices: CubeTensor, transposed: bool, math: Math) -> CubeTensor {
        grouped_product(rows, (matrices, transposed), self.groups(), None, math)
    }

    /// Where a row's token is.
    fn tokens(&self) -> (&CubeTensor, usize) {
        (&self.order, self.top_k)
    }

    fn groups(&self) -> Groups<'_> {
        Groups { offsets: &self.offsets, rows: self.places }
    }

    /// gelu(gate) * up of rows of tokens, a row for each place.
    fn activation(&self, tokens: CubeTensor, gate_up: CubeTensor, math: Math) -> CubeTensor {
        if let Math::Half { operands, unit } = math {
            return grouped_geglu(tokens, gate_up, self.groups(), self.tokens(), operands, unit);
        }
        let made = self.expand(tokens, gate_up, true, math);
        let [_, both] = made.shape().dims();
        let activation = empty(&made, [self.places, both / 2], DType::F32);
        activate::launch(
            &made.client.clone(),
            cover(self.places * both / 2),
            units(),
            made.into_buffer_arg(),
            activation.clone().into_buffer_arg(),
            both / 2,
        );
        activation
    }

    /// `[n, hidden]` from rows of places, with the places' weights where there are some.
    fn combine(&self, rows: CubeTensor, weights: Option<CubeTensor>) -> CubeTensor {
        let [_, hidden] = rows.shape().dims();
        let n = self.places / self.top_k;
        let out = empty(&rows, [n, hidden], DType::F32);
        let weighted = weights.is_some();
        let kept = dtype_to_storage_type(rows.dtype);
        combine::launch(
            &rows.client.clone(),
            cover(n * hidden),
            units(),
            rows.clone().into_buffer_arg(),
            self.rows.clone().into_buffer_arg(),
            weights.unwrap_or(rows).into_buffer_arg(),
            out.clone().into_buffer_arg(),
            hidden,
            self.top_k,
            weighted,
            kept,
        );
        out
    }
}

/// The weighted outputs of each token's experts, `[n, hidden]`.
pub(super) fn forward(
    x: CubeTensor,
    weights: CubeTensor,
    experts: CubeTensor,
    gate_up: CubeTensor,
    down: CubeTensor,
    math: Math,
) -> CubeTensor {
    let [x, weights] = [x, weights].map(|tensor| packed("experts", tensor));
    let sorted = Sorted::new(experts, down.shape()[0]);
    let activation = sorted.activation(x, gate_up, math);
    sorted.combine(sorted.multiply(activation, down, true, math), Some(weights))
}

/// The gradients of `x` and of the weights.
pub(super) fn backward(
    x: CubeTensor,
    weights: CubeTensor,
    experts: CubeTensor,
    gate_up: CubeTensor,
    down: CubeTensor,
    d_out: CubeTensor,
    math: Math,
) -> (CubeTensor, CubeTensor) {
    let [x, weights, d_out] = [x, weights, d_out].map(|tensor| packed("experts", tensor));
    let sorted = Sorted::new(experts, down.shape()[0]);
    let [_, _, intermediate] = down.shape().dims();
    let made = sorted.expand(x, gate_up.clone(), true, math);
    let d_activation = sorted.expand(d_out, down, false, math);
    let (d_made, d_weights) = (empty(&made, made.shape(), made.dtype), empty(&weights, weights.shape(), DType::F32));
    let kept = dtype_to_storage_type(made.dtype);
    activate_backward::launch(
        &made.client.clone(),
        line(sorted.places),
        units(),
        made.into_buffer_arg(),
        d_activation.into_buffer_arg(),
        weights.into_buffer_arg(),
        sorted.order.clone().into_buffer_arg(),
        d_made.clone().into_buffer_arg(),
        d_weights.clone().into_buffer_arg(),
        sorted.places,
        intermediate,
        kept,
    );
    (sorted.combine(sorted.multiply(d_made, gate_up, false, math), None), d_weights)
}

impl MoeOps for CubeBackend {
    fn moe_route(logits: CubeTensor, per_expert_scale: CubeTensor, top_k: usize) -> (CubeTensor, CubeTensor) {
        let [logits, scale] = [logits, per_expert_scale].map(|tensor| packed("route", tensor));
        let [n, experts] = logits.shape().dims();
        let (weights, chosen) = (empty(&logits, [n, top_k], DType::F32), empty(&logits, [n, top_k], DType::I32));
        route::launch(
            &logits.client.clone(),
            cover(n),
            units(),
            logits.into_buffer_arg(),
            scale.into_buffer_arg(),
            weights.clone().into_buffer_arg(),
            chosen.clone().into_buffer_arg(),
            n,
            experts,
            top_k,
        );
        (weights, chosen)
    }

    fn moe_route_backward(
        logits: CubeTensor,
        per_expert_scale: CubeTensor,
        experts: CubeTensor,
        d_weights: CubeTensor,
    ) -> CubeTensor {
        let [logits, scale, d_weights] = [logits, per_expert_scale, d_weights].map(|tensor| packed("route", tensor));
        let chosen = into_contiguous(experts);
        let ([n, experts], [_, top_k]) = (logits.shape().dims(), chosen.shape().dims());
        let d_logits = empty(&logits, [n, experts], DType::F32);
        route_backward::launch(
            &logits.client.clone(),
            cover(n),
            units(),
            logits.into_buffer_arg(),
            scale.into_buffer_arg(),
            chosen.into_buffer_arg(),
            d_weights.into_buffer_arg(),
            d_logits.clone().into_buffer_arg(),
            n,
            experts,
            top_k,
        );
        d_logits
    }

    fn moe_experts(
        x: CubeTensor,
        weights: CubeTensor,
        experts: CubeTensor,
        gate_up: CubeTensor,
        down: CubeTensor,
    ) -> CubeTensor {
        let math = Math::with(&gate_up);
        forward(x, weights, experts, gate_up, down, math)
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
        backward(x, weights, experts, gate_up, down, d_out, math)
    }
}
