//! Head and loss on cubecl: a chunk of rows at a time.
//!
//! Chunks of rows rather than tiles of the vocabulary: the logits of a chunk are made once, become their own gradient (in
//! place, or rounded to the operand of a matrix instruction), and meet the weight again while both are whole, so there are two
//! products in all; tiles of the vocabulary would make every logit a second time for the gradient, or keep one partial gradient a
//! tile.

use super::{CrossEntropyOps, Head, IGNORED, logits_bytes};
use crate::cube::{UNITS, activations, cover, empty, line, max_units, sum_units, units, upload};
use crate::matmul::cube::product;
use crate::resolve::cube::Math;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows `places[..]` of `x`, or, with `scatter`, rows of `x` to `places[..]`, in the dtype of `y`.
#[cube(launch)]
fn move_rows<X: Float, Y: Float>(
    x: &[X],
    places: &[u32],
    y: &mut [Y],
    rows: usize,
    cols: usize,
    #[comptime] scatter: bool,
    #[define(X, Y)] _dtypes: [ElemType; 2],
) {
    let i = ABSOLUTE_POS;
    if i < rows * cols {
        let place = places[i / cols] as usize * cols + i % cols;
        if comptime!(scatter) {
            y[place] = Y::cast_from(x[i]);
        } else {
            y[i] = Y::cast_from(x[place]);
        }
    }
}

/// `z` where it is no finite number, else 0. By its bits: a device's minimum, maximum and exponential may each make a number of it.
#[cube]
fn not_finite(z: f32) -> f32 {
    let exponent = u32::reinterpret(z) & 0x7f80_0000u32;
    select(exponent == 0x7f80_0000u32, z, 0.0f32)
}

/// cap * tanh(z / cap), and `z` where it is no finite number. The device's tanh of a large argument may be no number.
#[cube]
fn capped(z: f32, cap: f32) -> f32 {
    cap * f32::tanh(f32::max(f32::min(z / cap, 15.0f32), -15.0f32)) + not_finite(z)
}

/// What becomes of the gradient of a row's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Gradient {
    Unwanted,
    /// It takes the place of the logits.
    InPlace,
    /// It is the operand of a product in fewer bits, and written as that.
    Rounded,
}

/// The loss of a row of raw logits a cube, and `factor` times its gradient.
#[cube(launch)]
fn row_loss<E: Float>(
    logits: &mut [f32],
    rounded: &mut [E],
    targets: &[u32],
    places: &[u32],
    loss: &mut [f32],
    rows: usize,
    classes: usize,
    cap: f32,
    factor: f32,
    #[comptime] softcap: bool,
    #[comptime] gradient: Gradient,
    #[define(E)] _operands: ElemType,
) {
    let mut partial = Shared::<[f32]>::new_slice(256usize);
    let wanted = CUBE_POS < rows;
    let row = select(wanted, CUBE_POS, 0usize);
    let start = row * classes;
    let target = targets[row] as usize;

    let mut largest = f32::new(-3.0e38);
    let mut lost = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < classes {
        let mut z = logits[start + i];
        lost += not_finite(z);
        if comptime!(softcap) {
            z = capped(z, cap);
        }
        largest = f32::max(largest, z);
        i += UNITS;
    }
    let largest = max_units(largest, &mut partial);
    // 0, or no finite number, and then the loss is none either.
    let lost = sum_units(lost, &mut partial);
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < classes {
        let mut z = logits[start + i];
        if comptime!(softcap) {
            z = capped(z, cap);
        }
        sum += f32::exp(z - largest);
        i += UNITS;
    }
    let sum = sum_units(sum, &mut partial);
    let mut at_target = logits[start + target];
    if comptime!(softcap) {
        at_target = capped(at_target, cap);
    }
    sync_cube();
    if wanted {
        if UNIT_POS == 0u32 {
            loss[places[row] as usize] = f32::ln(sum) + largest - at_target + lost;
        }
        if comptime!(gradient != Gradient::Unwanted) {
            let mut i = UNIT_POS as usize;
            while i < classes {
                let mut z = logits[start + i];
                let mut slope = 1.0f32;
                if comptime!(softcap) {
                    z = capped(z, cap);
                    // The slope of the softcap: d z / d raw = 1 - (z / cap)^2.
                    slope = 1.0f32 - (z / cap) * (z / cap);
                }
                let hit = select(i == target, 1.0f32, 0.0f32);
                let value = factor * slope * (f32::exp(z - largest) / sum - hit);
                if comptime!(gradient == Gradient::Rounded) {
                    rounded[start + i] = E::cast_from(value);
                } else {
                    logits[start + i] = value;
                }
                i += UNITS;
            }
        }
    }
}

#[cube(launch)]
fn cap_logits(logits: &mut [f32], cap: f32) {
    let i = ABSOLUTE_POS;
    if i < logits.len() {
        logits[i] = capped(logits[i], cap);
    }
}

/// Launches [`move_rows`] over `rows` rows.
fn move_to(y: CubeTensor, x: CubeTensor, places: CubeTensor, rows: usize, scatter: bool) {
    let [_, cols] = x.shape().dims();
    let dtypes = [x.dtype, y.dtype].map(dtype_to_storage_type);
    let client = x.client.clone();
    let (x, places, y) = (x.into_buffer_arg(), places.into_buffer_arg(), y.into_buffer_arg());
    move_rows::launch(&client, cover(rows * cols), units(), x, places, y, rows, cols, scatter, dtypes);
}

/// Losses `[n]` in f32 and, for a `factor`, the gradient `[n, h]` in the dtype of `hidden`, with products in `math`; ignored rows
/// are neither read nor multiplied.
pub(super) fn loss_and_gradient(
    hidden: CubeTensor,
    weight: CubeTensor,
    targets: &[i32],
    head: Head,
    factor: Option<f64>,
    math: Math,
) -> (CubeTensor, Option<CubeTensor>) {
    let hidden = activations("linear_cross_entropy", hidden);
    let ([n, h], [classes, _]) = (hidden.shape().dims(), weight.shape().dims());
    let gradient = match (factor, math) {
        (None, _) => Gradient::Unwanted,
        (_, Math::F32) => Gradient::InPlace,
        (_, Math::Half { .. }) => Gradient::Rounded,
    };
    let operands = math.kept(DType::F32);
    let (client, device) = (hidden.client.clone(), hidden.device.clone());
    let loss = zeros_client(client.clone(), device.clone(), [n].into(), DType::F32);
    let d_hidden = factor.map(|_| zeros_client(client.clone(), device, [n, h].into(), hidden.dtype));
    let kept: Vec<u32> = (0..n as u32).filter(|&row| targets[row as usize] != IGNORED).collect();
    for kept in kept.chunks(head.chunk_rows) {
        let rows = kept.len();
        let places = upload(&hidden, kept);
        let kept_targets: Vec<u32> = kept.iter().map(|&row| targets[row as usize] as u32).collect();
        // Gathered as operands of the product: they are widened or rounded on their way.
        let gathered = empty(&hidden, [rows, h], operands);
        move_to(gathered.clone(), hidden.clone(), places.clone(), rows, false);
        let logits = product((gathered, false), (weight.clone(), true), 1.0, DType::F32, math);
        debug_assert_eq!(logits.shape().num_elements() * size_of::<f32>(), logits_bytes(rows, classes));
        let rounded = empty(&hidden, if gradient == Gradient::Rounded { [rows, classes] } else { [1, 1] }, operands);
        row_loss::launch(
            &client,
            line(rows),
            units(),
            logits.clone().into_buffer_arg(),
            rounded.clone().into_buffer_arg(),
            upload(&hidden, &kept_targets).into_buffer_arg(),
            places.clone().into_buffer_arg(),
            loss.clone().into_buffer_arg(),
            rows,
            classes,
            head.softcap.unwrap_or(1.0) as f32,
            factor.unwrap_or(1.0) as f32,
            head.softcap.is_some(),
            gradient,
            dtype_to_storage_type(operands),
        );
        if let Some(d_hidden) = &d_hidden {
            let d_logits = match gradient {
                Gradient::Rounded => {
                    // Makes room for the parts of a sum over the vocabulary.
                    drop(logits);
                    rounded
                }
                _ => logits,
            };
            let part = product((d_logits, false), (weight.clone(), false), 1.0, hidden.dtype, math);
            move_to(d_hidden.clone(), part, places, rows, true);
        }
    }
    (loss, d_hidden)
}

impl CrossEntropyOps for CubeBackend {
    fn linear_cross_entropy(hidden: CubeTensor, weight: CubeTensor, targets: Vec<i32>, head: Head) -> CubeTensor {
        let math = Math::with(&weight);
        loss_and_gradient(hidden, weight, &targets, head, None, math).0
    }

    fn linear_cross_entropy_grad(
        hidden: CubeTensor,
        weight: CubeTensor,
        targets: Vec<i32>,
        head: Head,
        grad_scale: f64,
    ) -> (CubeTensor, CubeTensor) {
        let math = Math::with(&weight);
        let (loss, d_hidden) = loss_and_gradient(hidden, weight, &targets, head, Some(grad_scale), math);
        (loss, d_hidden.expect("a gradient was asked for"))
    }

    fn head_logits(hidden: CubeTensor, weight: CubeTensor, softcap: Option<f64>) -> CubeTensor {
        let math = Math::with(&weight);
        let hidden = activations("linear_cross_entropy", hidden);
        let logits = product((hidden, false), (weight, true), 1.0, DType::F32, math);
        if let Some(cap) = softcap {
            let elements = logits.shape().num_elements();
            let client = logits.client.clone();
            cap_logits::launch(&client, cover(elements), units(), logits.clone().into_buffer_arg(), cap as f32);
        }
        logits
    }
}
