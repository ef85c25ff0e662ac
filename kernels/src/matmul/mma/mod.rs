//! Products on matrix instructions: 16-bit operands, f32 sums, whole matrices and rows grouped by the matrix that multiplies
//! them in one kernel. A long inner dimension is cut where the result alone has too few tiles for a device, and the parts are added in order.

mod kernel;

use super::PART_OF_ROWS;
use super::cube::{Layout, Product, Rows};
use crate::cube::{cover, empty, units};
use crate::mma::{COPIED, LANES, SCRATCH, Unit};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{mma_product, sum_parts};

/// Depth of the tiles in shared memory.
const DEPTH: usize = 32;
/// Units of a cube.
const UNITS: usize = 256;
/// Depth of a part of other sums, of which only those over a vocabulary are longer. It does not depend on the rows beside a row.
const PART: usize = 32_768;

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// They are written.
    Write,
    /// The right matrix, stored transposed, is of gates and, behind them, of as many ups: gelu(gate) * up is written. Tiles have
    /// eight columns of gates, then their ups, so that both are sums of the same lane.
    ///
    /// For 131,072 rows of the 26B-A4B 0.2 GB are written. Gates and ups in f32, read by a kernel that writes the activation in
    /// bf16, would be 1.7 GB.
    Geglu,
}

/// Which of the kernel's variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    layout: Layout,
    epilogue: Epilogue,
    /// Lines begin at multiples of 16 bytes.
    aligned: bool,
    unit: Unit,
}

impl Plan {
    /// Rows and columns of a cube's part of the result. The emulation's is smaller: its devices may have 32 KiB of shared
    /// memory.
    fn side(&self) -> usize {
        match self.unit {
            Unit::Native => 128,
            Unit::Emulated => 64,
        }
    }

    /// Distance of lines in shared memory, where lines run along the depth or not.
    fn pitch(&self, along_depth: bool) -> usize {
        COPIED + if along_depth { DEPTH } else { self.side() }
    }

    /// Elements of a stage of one operand, whichever way it lies.
    fn stage(&self) -> usize {
        self.side() * (DEPTH + COPIED)
    }

    fn scratch(&self) -> usize {
        match self.unit {
            Unit::Native => 1,
            Unit::Emulated => UNITS / LANES * SCRATCH,
        }
    }
}

/// A matrix, or matrices one behind the other, whose lines begin `distance` elements apart: devices may begin each at a
/// multiple of their own.
#[derive(Clone)]
struct Lines {
    tensor: CubeTensor,
    distance: usize,
}

impl Lines {
    /// `operand` as it lies, if lines are all that lies apart in it, else a copy.
    fn new(operand: CubeTensor) -> Self {
        let (shape, strides) = (operand.meta.shape(), operand.meta.strides());
        let last = shape.num_dims() - 1;
        let distance = strides[last - 1];
        if strides[last] == 1 && (last < 2 || strides[last - 2] == shape[last - 1] * distance) {
            return Self { tensor: operand, distance };
        }
        let distance = shape[last];
        Self { tensor: into_contiguous(operand), distance }
    }
}

/// Writes `product` to `c [m, n]`, with operands rounded to `operands`, of 16 bits.
pub(super) fn write(product: Product, epilogue: Epilogue, operands: DType, unit: Unit, c: &CubeTensor) {
    let (layout, k2) = (product.layout(), product.second_depth());
    let Product { a: (a, _), b: (b, _), shape: [m, n, k], beside, grouping, factor } = product;
    let lines = |operand| Lines::new(cast(operand, operands));
    let [a, b] = [a, b].map(lines);
    // What is absent is not read: something else stands in.
    let [a2, b2] = beside.map_or_else(|| [a.clone(), b.clone()], |operands| operands.map(lines));
    let plan = Plan {
        layout,
        epilogue,
        aligned: [&a, &b, &a2, &b2].iter().all(|lines| lines.distance.is_multiple_of(COPIED)),
        unit,
    };
    let distances = [&a, &b, &a2, &b2].map(|lines| lines.distance);
    let [a, b, a2, b2] = [a, b, a2, b2].map(|lines| lines.tensor);
    let b_matrix = distances[1] * b.shape()[b.shape().num_dims() - 2];
    let Rows { offsets, sources, groups, divisor, tiles } = Rows::new(grouping, m, plan.side(), c);
    let tile_cols = if epilogue == Epilogue::Geglu { n.div_ceil(8) * 16 } else { n }.div_ceil(plan.side());
    let part = match layout.a_transposed {
        _ if layout.beside || layout.grouped => k,
        true => PART_OF_ROWS.min(k),
        false => PART.min(k),
    };
    let parts = k.div_ceil(part);
    let made = if parts == 1 { c.clone() } else { empty(c, [parts, m, n], DType::F32) };
    // SAFETY: the kernel reads and writes inside the bounds that it is given, which are those of the buffers.
    unsafe {
        mma_product::launch_unchecked(
            &c.client.clone(),
            CubeCount::Static(tile_cols as u32, tiles as u32, parts as u32),
            CubeDim::new_1d(UNITS as u32),
            if n.is_multiple_of(2) { 2 } else { 1 },
            a.into_buffer_arg(),
            b.into_buffer_arg(),
            a2.into_buffer_arg(),
            b2.into_buffer_arg(),
            made.clone().into_buffer_arg(),
            offsets.into_buffer_arg(),
            sources.into_buffer_arg(),
            m,
            n,
            k,
            k2,
            distances[0],
            distances[1],
            distances[2],
            distances[3],
            b_matrix,
            part,
            groups,
            divisor,
            factor,
            plan,
            [operands, made.dtype].map(dtype_to_storage_type),
        );
    }
    if parts > 1 {
        let (made, dtype) = (made.into_buffer_arg(), dtype_to_storage_type(c.dtype));
        sum_parts::launch(&c.client, cover(m * n), units(), made, c.clone().into_buffer_arg(), parts, dtype);
    }
}
