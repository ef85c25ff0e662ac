//! The rows of a table on cubecl: one cube a row.

use super::EmbeddingOps;
use crate::cube::{UNITS, empty, line, require_float, units, upload};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Row r of `y` is row `ids[r]` of `table`, whose rows begin `distance` values apart.
#[cube(launch)]
fn embedding<W: Float>(
    table: &[W],
    ids: &[u32],
    y: &mut [f32],
    rows: usize,
    cols: usize,
    distance: usize,
    scale: f32,
    #[define(W)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row < rows {
        let start = ids[row] as usize * distance;
        let mut i = UNIT_POS as usize;
        while i < cols {
            y[row * cols + i] = f32::cast_from(table[start + i]) * scale;
            i += UNITS;
        }
    }
}

impl EmbeddingOps for CubeBackend {
    fn scaled_embedding(table: CubeTensor, ids: Vec<u32>, scale: f32) -> CubeTensor {
        require_float("embedding", table.dtype);
        // A table whose rows lie further apart than they are long is read as it is: it is far larger than what is wanted of it.
        let table = if table.meta.strides()[1] == 1 { table } else { into_contiguous(table) };
        let (distance, dtype) = (table.meta.strides()[0], dtype_to_storage_type(table.dtype));
        let (rows, [_, cols]) = (ids.len(), table.shape().dims());
        let (ids, y) = (upload(&table, &ids), empty(&table, [rows, cols], DType::F32));
        embedding::launch(
            &table.client.clone(),
            line(rows),
            units(),
            table.into_buffer_arg(),
            ids.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            rows,
            cols,
            distance,
            scale,
            dtype,
        );
        y
    }
}
