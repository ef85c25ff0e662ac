//! What the kernels resolve to. Nothing else is tried if that fails.

#[cfg(feature = "cubecl")]
pub(crate) mod cube;

use crate::simd::Isa;
use burn::tensor::DType;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Every kernel of a step by its name, with its implementation: who computes and in what.
pub type Table = [(&'static str, String); 9];

/// What a step's tensors are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtypes {
    /// Frozen matrices.
    pub weights: DType,
    /// What operations pass to each other.
    pub activations: DType,
}

/// Why a device does not compute in what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kernel that does not.
    pub kernel: &'static str,
    /// Why, as the end of a sentence whose subject is the kernel.
    pub why: String,
    /// The nearest that the device computes in.
    pub takes: Dtypes,
}

/// The table of the CPU, on the instruction set that was detected.
///
/// # Errors
/// On activations that are not f32.
pub fn cpu(dtypes: Dtypes) -> Result<Table, Refusal> {
    let Dtypes { weights, activations } = dtypes;
    if activations != DType::F32 {
        let why = format!("on a CPU it takes and gives f32, not {}", activations.name());
        return Err(Refusal { kernel: "rms_norm", why, takes: Dtypes { activations: DType::F32, ..dtypes } });
    }
    let isa = Isa::detect();
    let f32 = format!("cpu-f32-{}", isa.name());
    let products = match weights {
        DType::BF16 if isa.multiplies_bf16() => format!("cpu-bf16-{}-bf16", isa.name()),
        DType::BF16 => format!("cpu-bf16-widened-{}", isa.name()),
        _ => f32.clone(),
    };
    Ok(table(f32.clone(), f32, products, activations))
}

/// What a device of cubecl has beside f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Tensors in f16.
    pub(crate) f16: bool,
    /// Tensors in bf16.
    pub(crate) bf16: bool,
    /// What it lacks of the instructions that multiply bf16.
    pub(crate) lacks_mma: Option<&'static str>,
}

/// The table of a device of cubecl's `runtime`, which says why bf16 is widened where the device lacks something of what multiplies it.
///
/// # Errors
/// On what the device does not have, and on what its kernels were neither compiled nor tested in: beside matrix instructions activations
/// are in f32, or in bf16 as the matrices are; elsewhere in f32 or f16, beside matrices in f32.
pub(crate) fn cubecl(runtime: &str, has: Capabilities, dtypes: Dtypes) -> Result<Table, Refusal> {
    let Dtypes { weights, activations } = dtypes;
    let refusal = |kernel, why: String, takes| Err(Refusal { kernel, why, takes });
    if weights == DType::BF16 && !has.bf16 {
        let takes = Dtypes { weights: DType::F32, activations: DType::F32 };
        return refusal("lora_linear", format!("{runtime} has no bf16 to keep its weights in"), takes);
    }
    let in_f32 = Dtypes { activations: DType::F32, ..dtypes };
    match activations {
        DType::F32 => {}
        DType::BF16 if !has.bf16 => {
            let takes = if has.f16 { Dtypes { activations: DType::F16, ..dtypes } } else { in_f32 };
            return refusal("rms_norm", format!("{runtime} has no bf16 to pass on"), takes);
        }
        DType::F16 if !has.f16 => return refusal("rms_norm", format!("{runtime} has no f16 to pass on"), in_f32),
        DType::BF16 => {
            if let Some(lacked) = has.lacks_mma {
                return refusal("lora_linear", format!("it multiplies in f32, for want of {lacked}"), in_f32);
            }
            if weights != DType::BF16 {
                let takes = Dtypes { weights: DType::BF16, activations };
                return refusal("lora_linear", "with weights in f32 it multiplies in f32".into(), takes);
            }
        }
        _ if has.lacks_mma.is_none() => {
            let takes = Dtypes { weights: DType::BF16, activations: DType::BF16 };
            return refusal("lora_linear", "on matrix instructions it multiplies bf16, not f16".into(), takes);
        }
        _ if weights != DType::F32 => {
            let takes = Dtypes { weights: DType::F32, activations };
            return refusal("lora_linear", "beside f16 its weights are in f32".into(), takes);
        }
        _ => {}
    }
    let f32 = format!("cubecl-f32-{runtime}");
    let by_matrix_instructions = format!("cubecl-bf16-mma-{runtime}");
    let (attention, products) = match (weights, has.lacks_mma) {
        (DType::BF16, None) => (by_matrix_instructions.clone(), by_matrix_instructions),
        (DType::BF16, Some(lacked)) => {
            (format!("{f32} (no {lacked})"), format!("cubecl-bf16-widened-{runtime} (no {lacked})"))
        }
        _ => (f32.clone(), f32.clone()),
    };
    Ok(table(attention, f32, products, activations))
}

/// The implementation `f32`, that of `attention`, or `products` where a kernel multiplies frozen matrices, each with the activations that
/// it takes and gives where those are not f32. The embedding gives the residual stream, and adapters are updated, in f32.
fn table(attention: String, f32: String, products: String, activations: DType) -> Table {
    let passing = |by: &String| match activations {
        DType::F32 => by.clone(),
        narrow => format!("{by}, {} in and out", narrow.name()),
    };
    [
        ("embedding", f32.clone()),
        ("windowed_attention", passing(&attention)),
        ("rms_norm", passing(&f32)),
        ("rope", passing(&f32)),
        ("geglu", passing(&f32)),
        ("lora_linear", passing(&products)),
        ("moe_experts", passing(&products)),
        ("linear_cross_entropy", passing(&products)),
        ("adamw", f32),
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
    use DType::{BF16, F16};

    const F32: Dtypes = Dtypes { weights: DType::F32, activations: DType::F32 };
    const CARD: Capabilities = Capabilities { f16: true, bf16: true, lacks_mma: None };
    const OLDER: Capabilities = Capabilities { lacks_mma: Some("mma.m16n8k16"), ..CARD };
    const WGSL: Capabilities = Capabilities { bf16: false, ..OLDER };

    /// What computes the kernel of norms and that of products, or which kernel refuses.
    fn resolved(has: Capabilities, weights: DType, activations: DType) -> Result<[String; 2], Refusal> {
        let table = BTreeMap::from(cubecl("x", has, Dtypes { weights, activations })?);
        assert_eq!(table["embedding"], "cubecl-f32-x", "the stream is f32");
        Ok([table["rms_norm"].clone(), table["moe_experts"].clone()])
    }

    #[test]
    fn what_a_device_computes_in_is_told_with_what_it_passes_on() {
        let of = |by: [&str; 2]| Ok(by.map(String::from));
        let f32 = "cubecl-f32-x";
        assert_eq!(resolved(CARD, DType::F32, DType::F32), of([f32, f32]));
        assert_eq!(resolved(CARD, BF16, DType::F32), of([f32, "cubecl-bf16-mma-x"]));
        let [norm, products] = ["cubecl-f32-x, bf16 in and out", "cubecl-bf16-mma-x, bf16 in and out"];
        assert_eq!(resolved(CARD, BF16, BF16), of([norm, products]));
        assert_eq!(resolved(OLDER, BF16, DType::F32), of([f32, "cubecl-bf16-widened-x (no mma.m16n8k16)"]));
        assert_eq!(resolved(WGSL, DType::F32, F16), of(["cubecl-f32-x, f16 in and out"; 2]));
    }

    #[test]
    fn what_no_kernel_was_tested_in_is_refused_with_the_nearest_that_is_taken() {
        let none = Capabilities { f16: false, ..WGSL };
        for (has, weights, activations, kernel, takes) in [
            (WGSL, BF16, DType::F32, "lora_linear", (DType::F32, DType::F32)),
            (WGSL, DType::F32, BF16, "rms_norm", (DType::F32, F16)),
            (none, DType::F32, BF16, "rms_norm", (DType::F32, DType::F32)),
            (none, DType::F32, F16, "rms_norm", (DType::F32, DType::F32)),
            (OLDER, BF16, BF16, "lora_linear", (BF16, DType::F32)),
            (OLDER, BF16, F16, "lora_linear", (DType::F32, F16)),
            (CARD, DType::F32, BF16, "lora_linear", (BF16, BF16)),
            (CARD, DType::F32, F16, "lora_linear", (BF16, BF16)),
            (CARD, BF16, F16, "lora_linear", (BF16, BF16)),
        ] {
            let refusal = resolved(has, weights, activations).unwrap_err();
            assert_eq!((refusal.kernel, refusal.takes.weights, refusal.takes.activations), (kernel, takes.0, takes.1));
            resolved(has, takes.0, takes.1).expect("what is proposed is taken");
        }
        for activations in [F16, BF16] {
            let refusal = cpu(Dtypes { weights: BF16, activations }).unwrap_err();
            assert_eq!(
                (refusal.kernel, refusal.takes),
                ("rms_norm", Dtypes { weights: BF16, activations: DType::F32 })
            );
        }
    }

    #[test]
    fn the_hash_of_a_table_is_that_of_its_kernels_and_nothing_else() {
        let table = cpu(F32).unwrap();
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
