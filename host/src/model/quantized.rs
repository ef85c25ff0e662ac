//! Checkpoints whose linear modules are quantised in the layout of compressed-tensors: read as the tensors that they stand
//! for. Experts lie there one by one; here they are the fused tensors of training again.

use super::checkpoint::TensorEntry;
use super::codes::{from_e2m1, from_e4m3};
use crate::error::{Error, Result};
use half::bf16;
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// How the modules of a checkpoint are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// E4M3 with a scale a row; activations are rounded to E4M3 token by token when they are multiplied.
    Fp8,
    /// Symmetric 4-bit integers with a scale for each group of columns.
    Int4,
    /// E2M1 with an E4M3 scale for each group of columns and one scale for the module.
    Nvfp4,
}

impl Format {
    /// As it is called in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Int4 => "w4a16",
            Self::Nvfp4 => "nvfp4a16",
        }
    }

    /// The tensor that holds a module's codes, and those beside it.
    fn parts(self) -> (&'static str, [&'static str; 2]) {
        match self {
            Self::Fp8 => ("weight", ["weight_scale", ""]),
            Self::Int4 => ("weight_packed", ["weight_scale", "weight_shape"]),
            Self::Nvfp4 => ("weight_packed", ["weight_scale", "weight_global_scale"]),
        }
    }
}

/// A tensor that is made of quantised modules, whose rows follow each other.
#[derive(Debug, Clone)]
pub struct QuantizedTensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// How they are stored.
    pub format: Format,
    modules: Vec<String>,
}

/// The format that `config.json` in `dir` names; none where it names no quantisation, or there is no such file.
///
/// # Errors
/// `model::quantization` for one that this host does not read.
pub fn format(dir: &Path) -> Result<Option<Format>> {
    let path = dir.join("config.json");
    let Ok(text) = std::fs::read(&path) else { return Ok(None) };
    // What is wrong with the file otherwise is said where the model's shape is read.
    let config: Value = serde_json::from_slice(&text).unwrap_or_default();
    let quantization = &config["quantization_config"];
    if quantization.is_null() {
        return Ok(None);
    }
    let groups = quantization["config_groups"].as_object().map_or(0, serde_json::Map::len);
    match (quantization["quant_method"].as_str(), quantization["format"].as_str(), groups) {
        (Some("compressed-tensors"), Some("float-quantized"), 1) => Ok(Some(Format::Fp8)),
        (Some("compressed-tensors"), Some("pack-quantized"), 1) => Ok(Some(Format::Int4)),
        (Some("compressed-tensors"), Some("nvfp4-pack-quantized"), 1) => Ok(Some(Format::Nvfp4)),
        (_, _, groups) => Err(Error::new(
            "model::quantization",
            format!(
                "{} says quant_method {}, format {} in {groups} groups",
                path.display(),
                quantization["quant_method"],
                quantization["format"]
            ),
        )
        .expected("compressed-tensors with one group: float-quantized, pack-quantized or nvfp4-pack-quantized")),
    }
}

/// The tensors that the modules of a checkpoint stand for, by name. Their parts leave `entries`.
///
/// # Errors
/// `model::quantization` naming the module whose parts do not fit together.
pub fn assemble(
    format: Format,
    entries: &BTreeMap<String, TensorEntry>,
    read: &dyn Fn(&str) -> Vec<u8>,
) -> Result<BTreeMap<String, QuantizedTensor>> {
    let (codes, _) = format.parts();
    let mut experts: BTreeMap<(String, &str), BTreeMap<usize, String>> = BTreeMap::new();
    let mut out = BTreeMap::new();
    for name in entries.keys() {
        let Some(path) = name.strip_suffix(codes).and_then(|path| path.strip_suffix('.')) else { continue };
        if !entries.contains_key(&format!("{path}.weight_scale")) {
            continue;
        }
        let [rows, width] = shape(path, format, entries, read)?;
        match expert(path) {
            None => {
                let tensor = QuantizedTensor { shape: vec![rows, width], format, modules: vec![path.into()] };
                out.insert(format!("{path}.weight"), tensor);
            }
            Some((layer, number, which)) => {
                experts.entry((layer, which)).or_default().insert(number, path.into());
            }
        }
    }
    let layers: Vec<String> = experts.keys().map(|(layer, _)| layer.clone()).collect();
    for layer in layers {
        for (fused, modules) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
            let columns: Vec<_> = modules.iter().filter_map(|which| experts.get(&(layer.clone(), *which))).collect();
            let count = columns.first().map_or(0, |column| column.len());
            let complete = columns.len() == modules.len()
                && columns.iter().all(|column| column.keys().copied().eq(0..count))
                && count > 0;
            let paths: Vec<String> =
                (0..count).flat_map(|e| columns.iter().filter_map(move |c| c.get(&e).cloned())).collect();
            let shapes: Vec<[usize; 2]> =
                paths.iter().map(|path| shape(path, format, entries, read)).collect::<Result<_>>()?;
            match shapes.first() {
                Some([rows, width]) if complete && shapes.iter().all(|s| s == &shapes[0]) => {
                    let shape = vec![count, modules.len() * rows, *width];
                    out.insert(format!("{layer}.{fused}"), QuantizedTensor { shape, format, modules: paths });
                }
                _ => {
                    let message = format!("the experts of {layer} do not make up a whole {fused}");
                    return Err(Error::new("model::quantization", message)
                        .expected(format!("{} of every expert, of one shape", modules.join(" and "))));
                }
            }
        }
    }
    Ok(out)
}

/// Whether the tensor `name` is a part of one of `tensors`.
pub fn is_part(name: &str, tensors: &BTreeMap<String, QuantizedTensor>, format: Format) -> bool {
    let Some((path, suffix)) = name.rsplit_once('.') else { return false };
    let (codes, others) = format.parts();
    let known = suffix == codes || others.contains(&suffix);
    known && (tensors.contains_key(&format!("{path}.weight")) || expert(path).is_some())
}

/// `<layer>.experts.<number>.<which>`: the path up to `experts`, and the rest.
fn expert(path: &str) -> Option<(String, usize, &'static str)> {
    let (path, which) = path.rsplit_once('.')?;
    let (experts, number) = path.rsplit_once('.')?;
    let which = ["gate_proj", "up_proj", "down_proj"].into_iter().find(|known| *known == which)?;
    experts.ends_with(".experts").then_some((experts.to_string(), number.parse().ok()?, which))
}

fn wrong(path: &str, what: String, expected: &str) -> Error {
    Error::new("model::quantization", format!("module {path}: {what}")).expected(expected)
}

/// Rows and columns of a module, after its parts were found to fit together.
fn shape(
    path: &str,
    format: Format,
    entries: &BTreeMap<String, TensorEntry>,
    read: &dyn Fn(&str) -> Vec<u8>,
) -> Result<[usize; 2]> {
    let part = |suffix: &str, dtype: Dtype| {
        let name = format!("{path}.{suffix}");
        match entries.get(&name) {
            Some(entry) if entry.dtype == dtype => Ok(entry),
            Some(entry) => Err(wrong(path, format!("{suffix} is stored as {:?}", entry.dtype), &format!("{dtype:?}"))),
            None => Err(wrong(path, format!("there is no {suffix}"), "every part of the module")),
        }
    };
    let matrix = |entry: &TensorEntry| -> Result<[usize; 2]> {
        let shape = entry.shape.as_slice();
        shape.try_into().map_err(|_| wrong(path, format!("a part has the shape {shape:?}"), "two dimensions"))
    };
    let (codes, scale_dtype, per_code) = match format {
        Format::Fp8 => (part("weight", Dtype::F8_E4M3)?, Dtype::BF16, 1),
        Format::Int4 => (part("weight_packed", Dtype::I32)?, Dtype::BF16, 8),
        Format::Nvfp4 => (part("weight_packed", Dtype::U8)?, Dtype::F8_E4M3, 2),
    };
    let [rows, columns] = matrix(codes)?;
    let width = columns * per_code;
    let scales = matrix(part("weight_scale", scale_dtype)?)?;
    if scales[0] != rows || scales[1] == 0 || !width.is_multiple_of(scales[1]) {
        return Err(wrong(
            path,
            format!("weight_scale has the shape {scales:?}"),
            "a row for each, and groups of one size",
        ));
    }
    if format == Format::Int4 {
        let stored: Vec<i64> = read(&format!("{path}.weight_shape"))
            .as_chunks()
            .0
            .iter()
            .map(|bytes| i64::from_le_bytes(*bytes))
            .collect();
        if part("weight_shape", Dtype::I64)?.shape != [2] || stored != [rows as i64, width as i64] {
            return Err(wrong(path, format!("weight_shape says {stored:?}"), &format!("[{rows}, {width}]")));
        }
    }
    if format == Format::Nvfp4 {
        part("weight_global_scale", Dtype::F32)?;
    }
    Ok([rows, width])
}

impl QuantizedTensor {
    /// Gives `each` the values of the modules, one after the other; `read` is told the name of a part.
    pub fn modules(&self, read: &dyn Fn(&str) -> Vec<u8>, mut each: impl FnMut(Vec<f32>)) {
        let width = *self.shape.last().expect("a matrix, or several");
        for path in &self.modules {
            let part = |suffix: &str| read(&format!("{path}.{suffix}"));
            let scales = part("weight_scale");
            let (codes, scales) = match self.format {
                Format::Fp8 => (part("weight").into_iter().map(from_e4m3).collect::<Vec<_>>(), from_bf16(&scales)),
                Format::Int4 => {
                    let codes = nibbles(&part("weight_packed")).map(|code| f32::from(code) - 8.0).collect();
                    (codes, from_bf16(&scales))
                }
                Format::Nvfp4 => {
                    let global = part("weight_global_scale");
                    let global = f32::from_le_bytes(*global.first_chunk().expect("an f32"));
                    let scales = scales.into_iter().map(|code| from_e4m3(code) / global).collect();
                    (nibbles(&part("weight_packed")).map(from_e2m1).collect(), scales)
                }
            };
            let group = codes.len() / scales.len().max(1);
            debug_assert!(width.is_multiple_of(group));
            let mut values = codes;
            for (group, scale) in values.chunks_mut(group).zip(&scales) {
                group.iter_mut().for_each(|value| *value *= scale);
            }
            each(values);
        }
    }

    /// Names of the tensors that it is stored in.
    pub fn parts(&self) -> impl Iterator<Item = String> + '_ {
        let (codes, others) = self.format.parts();
        let suffixes = [codes, others[0], others[1]];
        self.modules.iter().flat_map(move |path| {
            suffixes.into_iter().filter(|s| !s.is_empty()).map(move |suffix| format!("{path}.{suffix}"))
        })
    }
}

fn from_bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()
}

/// Four bits each, the low ones first.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::Checkpoint;
    use crate::model::fixtures::fixture;

    fn golden(name: &str) -> Checkpoint {
        Checkpoint::open(&fixture("quantized").join(name)).unwrap()
    }

    #[test]
    fn what_compressed_tensors_packed_is_read_as_it_unpacks_it() {
        for (name, format) in [("fp8", Format::Fp8), ("int4", Format::Int4), ("nvfp4", Format::Nvfp4)] {
            let packed = golden(name);
            assert_eq!(packed.format(), Some(format));
            let expected = std::fs::read(fixture("quantized").join(name).join("expected.safetensors")).unwrap();
            let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
            let shapes = packed.shapes();
            assert!(
                shapes
                    .keys()
                    .map(String::as_str)
                    .eq(expected.iter().map(|(name, _)| name).collect::<std::collections::BTreeSet<_>>())
            );
            for (tensor, view) in expected.iter() {
                assert_eq!(shapes[tensor].0, view.shape(), "{name} {tensor}");
                let ours = packed.read_bf16(tensor).unwrap();
                let theirs: Vec<bf16> =
                    view.data().as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect();
                assert_eq!(ours, theirs, "{name} {tensor}");
                assert!(packed.size_bytes(tensor) > 0);
            }
        }
    }

    #[test]
    fn modules_whose_parts_do_not_fit_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let source = fixture("quantized").join("int4");
        let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let q = "model.layers.0.self_attn.q_proj";
        std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
        let open = |kept: &dyn Fn(&str) -> bool| {
            let views: Vec<_> = tensors.iter().filter(|(name, _)| kept(name)).collect();
            safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
            Checkpoint::open(dir.path())
        };
        assert!(open(&|_| true).is_ok());
        let error = open(&|name| name != format!("{q}.weight_shape")).unwrap_err();
        assert_eq!(error.code(), "model::quantization");
        assert!(error.message().contains(q), "{error}");
        let error = open(&|name| !name.contains("experts.1.up_proj")).unwrap_err();
        assert!(error.message().contains("do not make up a whole gate_up_proj"), "{error}");
        std::fs::write(dir.path().join("config.json"), r#"{"quantization_config": {"quant_method": "gptq"}}"#).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert_eq!(error.code(), "model::quantization");
        assert!(error.message().contains("gptq"), "{error}");
    }
}
