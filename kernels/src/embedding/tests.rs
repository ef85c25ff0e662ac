use super::*;
use crate::testing::{close, device, halves, same_on_one_and_two_threads, wide};
use burn::tensor::{DType, TensorData};

/// What a table is kept in beside f32 where it is tested; WGSL has no bf16.
const HALF: DType = if cfg!(feature = "wgpu") { DType::F16 } else { DType::BF16 };

fn ids(rows: usize, count: usize) -> Vec<u32> {
    (0..count).map(|i| (i * 7 % rows) as u32).collect()
}

fn table(values: &[f32], shape: [usize; 2]) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &device())
}

#[test]
fn rows_of_a_table_in_either_dtype_are_those_of_the_reference_in_f32() {
    for (seed, (rows, cols, count)) in [(1, 1, 1), (7, 3, 20), (50, 300, 40), (9, 512, 700)].into_iter().enumerate() {
        let (values, ids) = (halves(rows * cols, seed as u64), ids(rows, count));
        let expected = reference::forward(&wide(&values), cols, &ids, 53.066);
        for dtype in [DType::F32, HALF] {
            let y = embedding(table(&values, [rows, cols]).cast(dtype), &ids, 53.066);
            assert_eq!((y.dims(), y.dtype()), ([count, cols], DType::F32));
            close(&y.into_data().try_into_vec::<f32>().unwrap(), &expected, 1e-6);
        }
    }
}

#[test]
fn a_transposed_table_is_read_as_it_is_meant() {
    let values = halves(6 * 5, 1);
    let y = embedding(table(&values, [5, 6]).transpose(), &[4, 0], 2.0);
    let expected: Vec<f32> =
        [4, 0].iter().flat_map(|row| values.iter().skip(*row).step_by(6).map(|x| 2.0 * x)).collect();
    assert_eq!(y.into_data().try_into_vec::<f32>().unwrap(), expected);
}

#[test]
#[should_panic(expected = "id 5 is none of the 5 rows")]
fn an_id_beyond_the_table_is_refused() {
    embedding(table(&[0.0; 10], [5, 2]), &[4, 5], 1.0);
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let (values, ids) = (halves(90 * 130, 1), ids(90, 1_001));
    same_on_one_and_two_threads(|| cpu::embedding(crate::matmul::Weights::F32(&values), 130, &ids, 0.5));
}
