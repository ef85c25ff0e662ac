//! What the kernels resolve to. Nothing else is tried if that fails.

#[cfg(feature = "cubecl")]
pub(crate) mod cube;

use crate::simd::Isa;
use burn::tensor::DType;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Every kernel of a step by its name, with its implementation: who computes and in what.
pub type Table = [(&'static str, String); 8];

/// The table of the CPU, on the instruction set that was detected, with frozen matrices kept as `weights`.
pub fn cpu(weights: DType) -> Table {
    let isa = Isa::detect();
    let f32 = format!("cpu-f32-{}", isa.name());
    let products = match weights {
        DType::BF16 if isa.multiplies_bf16() => format!("cpu-bf16-{}-bf16", isa.name()),
        DType::BF16 => format!("cpu-bf16-widened-{}", isa.name()),
        _ => f32.clone(),
    };
    table(f32.clone(), f32, products)
}

/// The table of a device of cubecl's `runtime` with frozen matrices kept as `weights`, and why they are widened where the device
/// lacks something of what multiplies bf16.
pub(crate) fn cubecl(runtime: &str, lacks_bf16: Option<&str>, weights: DType) -> Table {
    let f32 = format!("cubecl-f32-{runtime}");
    let by_matrix_instructions = format!("cubecl-bf16-mma-{runtime}");
    let (attention, products) = match (weights, lacks_bf16) {
        (DType::BF16, None) => (by_matrix_instructions.clone(), by_matrix_instructions),
        (DType::BF16, Some(lacked)) => {
            (format!("{f32} (no {lacked})"), format!("cubecl-bf16-widened-{runtime} (no {lacked})"))
        }
        _ => (f32.clone(), f32.clone()),
    };
    table(attention, f32, products)
}

/// The implementation `f32`, that of `attention`, or `products` where a kernel multiplies frozen matrices.
fn table(attention: String, f32: String, products: String) -> Table {
    [
        ("embedding", f32.clone()),
        ("windowed_attention", attention),
        ("rms_norm", f32.clone()),
        ("rope", f32.clone()),
        ("geglu", f32),
        ("lora_linear", products.clone()),
        ("moe_experts", products.clone()),
        ("linear_cross_entropy", products),
    ]
}

/// SHA-256 over kernels and what they resolve to, in any order: the same where every kernel is computed by the same
/// implementation. A run, a benchmark, and what is compiled for CUDA without a device are held against each other by it.
pub fn sha256<'a>(resolved: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let by_name: BTreeMap<_, _> = resolved.into_iter().collect();
    let lines: String = by_name.into_iter().map(|(kernel, resolved)| format!("{kernel} {resolved}\n")).collect();
    Sha256::digest(lines.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_table_is_that_of_its_kernels_and_nothing_else() {
        let table = cpu(DType::F32);
        let hash = |table: &[(&'static str, String)]| sha256(table.iter().map(|(name, by)| (*name, &by[..])));
        let mut changed = table.to_vec();
        changed.reverse();
        assert_eq!(hash(&table), hash(&changed));
        changed[0].1 = "another".into();
        assert_ne!(hash(&table), hash(&changed));
        // printf 'a 1\nb 2\n' | sha256sum
        let expected = "2951835de33689a441bfa61bc7af99b1f0305ca8ec0ab4dd508f14f57b27ca23";
        assert_eq!(sha256([("b", "2"), ("a", "1")]), expected);
    }
}
