//! Gates on what a run takes and what it is computed with, before its base is read.

use crate::config::{Quantize, WeightDtype};
use crate::error::{Error, Result};
use crate::model::lora::{LoraPlan, group};
use crate::model::spec::ModelSpec;
use crate::plan::memory::{Model, Shape};
use crate::report::bytes;
use crate::run::provenance::Implementation;
use std::collections::BTreeMap;

/// Bytes by what they are for.
pub type Bytes = Vec<(&'static str, u64)>;

/// f32 values of a trained parameter in a checkpoint: itself and two moments.
const VALUES_SAVED_A_PARAMETER: usize = 3;
const F32_BYTES: usize = 4;
/// What the merged model is called among [`Bytes`].
pub const MERGED: &str = "merged model";

/// What a run takes of the device's memory as `tunehost plan` computes it for a micro-batch of `largest_batch` tokens, without the
/// slack that is assumed there, and without what this process holds already.
pub fn planned_memory(model: &Model, largest_batch: usize) -> Bytes {
    let memory = model.memory(Shape { micro_batch: 1, seq_len_tokens: largest_batch });
    let mut parts = vec![
        ("base", memory.base_bytes),
        ("adapters, gradients and moments", memory.adapters_gradients_adamw_bytes),
        ("a checkpoint being written", memory.checkpoint_snapshot_bytes),
        ("layer inputs", memory.layer_inputs_bytes),
        ("what layers keep", memory.kept_bytes),
    ];
    let other = memory.slack_bytes + memory.process_bytes + parts.iter().map(|(_, bytes)| bytes).sum::<usize>();
    parts.push(("a layer's backward pass or the loss head", memory.peak_bytes - other));
    parts.into_iter().map(|(part, bytes)| (part, bytes as u64)).collect()
}

/// What a run writes at the least: `checkpoints` more at once, its logs, and the exports that are asked for; `base_bytes` is the
/// base on disk.
pub fn least_disk(
    lora: &LoraPlan,
    checkpoints: usize,
    logs_bytes: u64,
    adapter: bool,
    merged: bool,
    base_bytes: u64,
) -> Bytes {
    let parameters = (lora.parameters() * F32_BYTES) as u64;
    vec![
        ("checkpoints", checkpoints as u64 * parameters * VALUES_SAVED_A_PARAMETER as u64),
        ("logs", logs_bytes),
        ("adapter", if adapter { parameters } else { 0 }),
        (MERGED, if merged { base_bytes } else { 0 }),
    ]
}

/// Compares what the run takes with the device's free memory; nothing where the device does not tell.
///
/// # Errors
/// `gate::free_memory`, with each part.
pub fn free_memory(least: &Bytes, free: Option<u64>) -> Result<String> {
    enough("gate::free_memory", "memory", least, free).map_err(|e| {
        e.help(
            "--set model.weights=bf16 halves the base, fewer rows (train.micro_batch), shorter records \
             (data.max_seq_len) or a smaller train.loss_chunk_rows the rest",
        )
    })
}

/// Compares what the run writes with the free disk of its folder; nothing where the system does not tell.
///
/// # Errors
/// `gate::free_disk`, with each part.
pub fn free_disk(least: &Bytes, free: Option<u64>) -> Result<String> {
    let merges = least.iter().any(|(part, bytes)| *part == MERGED && *bytes > 0);
    let leaner =
        if merges { ", or --set export.merged=false" } else { ", or keep fewer checkpoints (checkpoint.keep_last)" };
    enough("gate::free_disk", "disk", least, free)
        .map_err(|e| e.help(format!("make room, name another folder (run.root, --run-dir){leaner}")))
}

fn enough(code: &'static str, what: &str, least: &Bytes, free: Option<u64>) -> Result<String> {
    let total: u64 = least.iter().map(|(_, n)| n).sum();
    let size = |n: u64| bytes(n as usize);
    let parts = least.iter().filter(|(_, n)| *n > 0).map(|(part, n)| format!("{part} {}", size(*n)));
    let takes = format!("takes {} at the least ({})", size(total), parts.collect::<Vec<_>>().join(", "));
    match free {
        None => Ok(format!("{takes}; free {what} is not known")),
        Some(free) if free >= total => Ok(takes),
        Some(free) => Err(Error::new(code, format!("the run {takes} and {} of {what} are free", size(free)))
            .expected(format!("{} of free {what} or more", size(total)))),
    }
}

/// Compares each kernel with what was asked for: the number format, and that its operands are multiplied in it.
///
/// # Errors
/// `gate::kernels`, naming each that resolved to something else.
pub fn kernels_as_asked(kernels: &BTreeMap<String, Implementation>) -> Result<String> {
    const FORMATS: [&str; 3] = ["f32", "f16", "bf16"];
    let as_asked = |kernel: &Implementation| {
        let resolved: Vec<&str> = kernel.resolved.split('-').collect();
        let asked = kernel.requested.split(' ').find(|word| FORMATS.contains(word));
        asked.is_none_or(|format| resolved.contains(&format)) && !resolved.contains(&"widened")
    };
    let others: Vec<String> = kernels
        .iter()
        .filter(|(_, kernel)| !as_asked(kernel))
        .map(|(name, kernel)| format!("{name}: asked for {}, resolved to {}", kernel.requested, kernel.resolved))
        .collect();
    if others.is_empty() {
        return Ok(format!("all {} are what was asked for", kernels.len()));
    }
    Err(Error::new("gate::kernels", others.join("; ")).expected("what was asked for").help(
        "this processor cannot multiply in the format that the weights are kept in: results are right, and slower",
    ))
}

/// Refuses 4-bit weights: no kernel of this build takes them, so that every weight would stay as it is. The fused experts,
/// which hold most of a mixture's weights and are no linear modules, are listed as what they are.
///
/// # Errors
/// `gate::unquantised`, with tensors and bytes as `weights` keeps them.
pub fn quantised(quantize: Option<Quantize>, spec: &ModelSpec, weights: WeightDtype) -> Result<()> {
    let Some(quantize) = quantize else { return Ok(()) };
    let mut kinds: BTreeMap<(String, &[usize]), usize> = BTreeMap::new();
    for (name, shape) in &spec.tensors {
        let of_any_layer: Vec<&str> =
            name.split('.').map(|part| if part.bytes().all(|c| c.is_ascii_digit()) { "*" } else { part }).collect();
        *kinds.entry((of_any_layer.join("."), shape)).or_insert(0) += 1;
    }
    let values = |((_, shape), tensors): &((String, &[usize]), usize)| tensors * shape.iter().product::<usize>();
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse(values(kind)));
    let total = spec.parameters();
    let lines = kinds.iter().map(|kind| {
        let ((name, shape), tensors) = kind;
        let (size, share) = (bytes(values(kind) * weights.size_bytes()), 100.0 * values(kind) as f64 / total as f64);
        let fused = if shape.len() == 3 { ", fused experts" } else { "" };
        format!("\n  {name}: {tensors} of shape {shape:?}{fused}, {size} ({share:.1}%)")
    });
    let message = format!(
        "{} weights were asked for, and all {} ({} in {}) would stay unquantised:{}",
        quantize.name(),
        group(total),
        bytes(total * weights.size_bytes()),
        weights.name(),
        lines.collect::<String>()
    );
    Err(Error::new("gate::unquantised", message)
        .expected("every weight in four bits, or none asked for: this build has no 4-bit kernels")
        .help("take model.quantize out; --set model.weights=bf16 keeps the base in two bytes a weight"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LoraConfig, TrainConfig};
    use crate::model::config::TextConfig;
    use crate::model::fixtures::large_model_headers;
    use tunehost_kernels::Runtime;

    /// The text configuration and the tensors of the 26B-A4B model, from its headers.
    fn large() -> (TextConfig, ModelSpec) {
        let (config, _) = large_model_headers();
        let spec = ModelSpec::new(&config, "model.language_model.");
        (config, spec)
    }

    #[test]
    fn a_4_bit_request_is_refused_with_every_weight_it_would_leave() {
        let (_, spec) = large();
        quantised(None, &spec, WeightDtype::Bf16).unwrap();
        let error = quantised(Some(Quantize::Nf4), &spec, WeightDtype::Bf16).unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("gate::unquantised", 7));
        let lines: Vec<&str> = error.message().lines().collect();
        assert!(
            lines[0].starts_with("nf4 weights were asked for, and all 25,233,141,790 (47.0 GiB in bf16)"),
            "{error}"
        );
        // Two thirds of the fused 42.5 GiB are gate and up.
        let experts =
            "  model.language_model.layers.*.experts.gate_up_proj: 30 of shape [128, 1408, 2816], fused experts";
        assert!(lines[1].starts_with(experts) && lines[1].contains("28.4 GiB"), "{error}");
        assert!(lines[2].contains("experts.down_proj") && lines[2].contains("14.2 GiB"), "{error}");
        let tensors =
            |line: &&str| line.split_once(": ").unwrap().1.split_once(' ').unwrap().0.parse::<usize>().unwrap();
        let listed: usize = lines[1..].iter().map(tensors).sum();
        assert_eq!(listed, spec.tensors.len(), "every tensor is listed");
    }

    #[test]
    fn a_run_that_does_not_fit_is_refused_with_what_takes_the_room() {
        let (text, spec) = large();
        let lora = LoraConfig { rank: 64, ..LoraConfig::default() };
        let lora = LoraPlan::new(&lora, &spec).unwrap();
        let model = Model {
            text: &text,
            lora: &lora,
            train: &TrainConfig::default(),
            base_bytes: 2 * spec.parameters(),
            process_bytes: 7 << 30,
            runtime: Runtime::Cpu { threads: 2 },
            dropout: false,
        };
        let least = planned_memory(&model, 16_384);
        let total: u64 = least.iter().map(|(_, n)| n).sum();
        // As `plan` has it, but for its slack and what is held already.
        let memory = model.memory(Shape { micro_batch: 1, seq_len_tokens: 16_384 });
        assert_eq!(total as usize + memory.slack_bytes + (7 << 30), memory.peak_bytes);
        assert!(total > 47 << 30 && total < 128 << 30, "{least:?}");
        let error = free_memory(&least, Some(40 << 30)).unwrap_err();
        assert_eq!(error.code(), "gate::free_memory");
        assert!(
            error.message().contains("base 47.0 GiB") && error.message().ends_with("40.0 GiB of memory are free"),
            "{error}"
        );
        assert!(free_memory(&least, Some(total)).unwrap().starts_with("takes"));
        assert!(free_memory(&least, None).unwrap().ends_with("free memory is not known"));

        let disk = least_disk(&lora, 1, 0, true, true, 48 << 30);
        let error = free_disk(&disk, Some(10 << 30)).unwrap_err();
        assert_eq!(error.code(), "gate::free_disk");
        assert!(
            error.message().contains("merged model 48.0 GiB") && error.to_string().contains("export.merged"),
            "{error}"
        );
        free_disk(&least_disk(&lora, 1, 0, true, false, 48 << 30), Some(10 << 30)).unwrap();
        // Of 851 MiB each.
        let error = free_disk(&least_disk(&lora, 20, 3 << 20, true, false, 0), Some(10 << 30)).unwrap_err();
        assert!(error.message().contains("checkpoints 16.6 GiB, logs 3.0 MiB, adapter"), "{error}");
        assert!(!error.to_string().contains("export.merged"), "{error}");
    }

    #[test]
    fn a_kernel_that_is_not_what_was_asked_for_is_named() {
        let kernels = |requested: &str, resolved: &str| {
            BTreeMap::from([(
                "moe_experts".to_string(),
                Implementation { requested: requested.into(), resolved: resolved.into() },
            )])
        };
        for (requested, resolved) in [
            ("cpu bf16", "cpu-bf16-avx512-bf16"),
            ("cpu f32", "cpu-f32-avx2"),
            ("cpu", "cpu-f32-avx2"),
            ("wgpu f32", "cubecl-f32-vulkan"),
        ] {
            kernels_as_asked(&kernels(requested, resolved)).unwrap();
        }
        for (requested, resolved) in [("cpu bf16", "cpu-bf16-widened-avx2"), ("wgpu bf16", "cubecl-f32-vulkan")] {
            let error = kernels_as_asked(&kernels(requested, resolved)).unwrap_err();
            assert_eq!(error.code(), "gate::kernels");
            assert_eq!(error.message(), format!("moe_experts: asked for {requested}, resolved to {resolved}"));
        }
    }
}
