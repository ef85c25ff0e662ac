//! What a base is made of, and which of its blocks each quantisation takes.

use crate::config::WeightDtype;
use crate::model::spec::{ModelSpec, Slot, Towers};
use serde::Serialize;
use std::collections::BTreeMap;

/// A part of a base whose tensors are treated alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Block {
    /// Fused 3-D tensors: no linear modules.
    Experts,
    /// Linear modules of attention.
    Attention,
    /// Linear modules of the dense MLP.
    DenseMlp,
    /// Embedding, and a head that is not tied to it.
    Embedding,
    /// Router, norms and scalars, kept in f32.
    RouterAndNorms,
    /// Vision and audio, which stay on disk.
    Towers,
}

impl Block {
    /// All, in the order of the table.
    pub const ALL: [Self; 6] =
        [Self::Experts, Self::Attention, Self::DenseMlp, Self::Embedding, Self::RouterAndNorms, Self::Towers];

    /// As tables call it.
    pub fn name(self) -> &'static str {
        ["experts", "attention", "dense MLP", "embedding", "router, norms", "towers"][self as usize]
    }

    /// Bytes of a value on the device.
    fn value_bytes(self, weights: WeightDtype) -> usize {
        match self {
            Self::Towers => 0,
            Self::RouterAndNorms => size_of::<f32>(),
            _ => weights.size_bytes(),
        }
    }
}

/// A way to store a base in fewer bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// The exporter's `fp8`: E4M3, a bf16 scale a row.
    Fp8,
    /// The exporter's `w4a16`: four bits, a bf16 scale for each group of columns, the shape as two i64.
    W4a16 {
        /// Columns of a group.
        group: usize,
    },
    /// The exporter's `nvfp4a16`: E2M1, an E4M3 scale for 16 columns, one f32 for the module.
    Nvfp4a16,
    /// A 4-bit base as loaders make it that replace linear modules, four bits a weight and scales not counted.
    LinearModules4Bit,
}

/// Columns of a group of `w4a16`, from the exporter's default down to its least.
const GROUPS: [usize; 4] = [64, 32, 16, 8];
const NVFP4_GROUP: usize = 16;

impl Scheme {
    /// As tables and JSON call it.
    pub fn name(self) -> String {
        match self {
            Self::Fp8 => "fp8".into(),
            Self::W4a16 { group } => format!("w4a16_g{group}"),
            Self::Nvfp4a16 => "nvfp4a16".into(),
            Self::LinearModules4Bit => "4bit_linear_modules".into(),
        }
    }

    /// The schemes that the matrices of `spec` allow: a group must divide every width, else an exporter refuses.
    pub fn of(spec: &ModelSpec) -> Vec<Self> {
        let widths: Vec<usize> = spec
            .tensors
            .iter()
            .filter(|(name, _)| block_of(spec, name).is_some_and(quantised_on_export))
            .filter_map(|(_, shape)| shape.last().copied())
            .collect();
        let divides = |group: &usize| widths.iter().all(|width| width.is_multiple_of(*group));
        let w4a16 = GROUPS.into_iter().find(divides).map(|group| Self::W4a16 { group });
        let nvfp4 = divides(&NVFP4_GROUP).then_some(Self::Nvfp4a16);
        [Some(Self::Fp8), w4a16, nvfp4, Some(Self::LinearModules4Bit)].into_iter().flatten().collect()
    }

    /// Bytes of the tensor of `block` under this scheme; `None` where the scheme leaves it as it is.
    fn bytes(self, block: Block, name: &str, shape: &[usize]) -> Option<usize> {
        let values: usize = shape.iter().product();
        let takes = match self {
            Self::LinearModules4Bit => {
                matches!(block, Block::Attention | Block::DenseMlp)
                    || block == Block::Towers && shape.len() == 2 && name.ends_with(".weight")
            }
            _ => quantised_on_export(block),
        };
        if !takes {
            return None;
        }
        let width = *shape.last()?;
        // Fused experts leave as one module for each gate, up and down.
        let modules = match shape {
            [experts, ..] if shape.len() == 3 && name.ends_with("gate_up_proj") => 2 * experts,
            [experts, ..] if shape.len() == 3 => *experts,
            _ => 1,
        };
        Some(match self {
            Self::Fp8 => values + 2 * values / width,
            Self::W4a16 { group } => values / 2 + 2 * values / group + modules * 2 * size_of::<i64>(),
            Self::Nvfp4a16 => values / 2 + values / NVFP4_GROUP + modules * size_of::<f32>(),
            Self::LinearModules4Bit => values / 2,
        })
    }
}

fn quantised_on_export(block: Block) -> bool {
    matches!(block, Block::Experts | Block::Attention | Block::DenseMlp)
}

/// A block in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockSize {
    /// Which block.
    pub block: Block,
    /// Tensors in it.
    pub tensors: usize,
    /// Their values.
    pub parameters: usize,
    /// Bytes on disk.
    pub disk_bytes: usize,
    /// Bytes on the device, as the run keeps them.
    pub device_bytes: usize,
    /// Bytes under each scheme, by its name; null where it leaves the whole block as it is on disk.
    pub quantised_bytes: BTreeMap<String, Option<usize>>,
}

/// The blocks of a base whose tensors are `found` (shapes by name), without those that have none.
///
/// `disk_bytes` tells the size of a tensor on disk.
pub fn blocks(
    spec: &ModelSpec,
    towers: &Towers,
    found: &BTreeMap<String, (Vec<usize>, String)>,
    disk_bytes: impl Fn(&str) -> usize,
    weights: WeightDtype,
) -> Vec<BlockSize> {
    let schemes = Scheme::of(spec);
    let text = spec.tensors.iter().filter_map(|(name, shape)| Some((block_of(spec, name)?, name, shape)));
    let other = towers.names.iter().filter_map(|name| Some((Block::Towers, name, &found.get(name)?.0)));
    let tensors: Vec<(Block, &String, &Vec<usize>)> = text.chain(other).collect();
    let sized = Block::ALL.map(|block| {
        let mut size = BlockSize {
            block,
            tensors: 0,
            parameters: 0,
            disk_bytes: 0,
            device_bytes: 0,
            quantised_bytes: schemes.iter().map(|scheme| (scheme.name(), None)).collect(),
        };
        for (_, name, shape) in tensors.iter().filter(|(of, ..)| *of == block) {
            size.tensors += 1;
            size.parameters += shape.iter().product::<usize>();
            size.disk_bytes += disk_bytes(name);
        }
        size.device_bytes = size.parameters * block.value_bytes(weights);
        for scheme in &schemes {
            let of = tensors.iter().filter(|(of, ..)| *of == block);
            let parts: Vec<(Option<usize>, &String)> =
                of.map(|(_, name, shape)| (scheme.bytes(block, name, shape), *name)).collect();
            if parts.iter().any(|(quantised, _)| quantised.is_some()) {
                let bytes = parts.iter().map(|(quantised, name)| quantised.unwrap_or_else(|| disk_bytes(name))).sum();
                size.quantised_bytes.insert(scheme.name(), Some(bytes));
            }
        }
        size
    });
    sized.into_iter().filter(|size| size.tensors > 0).collect()
}

/// Bytes of the text stack of `spec` on the device.
pub fn device_bytes(spec: &ModelSpec, weights: WeightDtype) -> usize {
    spec.tensors.keys().map(|name| tensor_device_bytes(spec, name, weights)).sum()
}

/// Bytes of one tensor of it on the device; 0 for a name that is not in it.
pub fn tensor_device_bytes(spec: &ModelSpec, name: &str, weights: WeightDtype) -> usize {
    let values = spec.tensors.get(name).map_or(0, |shape| shape.iter().product());
    block_of(spec, name).map_or(0, |block| values * block.value_bytes(weights))
}

/// The block of a tensor of the text stack; `None` for a name that is not in it.
fn block_of(spec: &ModelSpec, name: &str) -> Option<Block> {
    let rest = name.strip_prefix(&spec.prefix).unwrap_or(name);
    let slot = || {
        let path = rest.strip_suffix(".weight")?;
        let slot = Slot::ALL.into_iter().find(|slot| path.ends_with(&format!(".{}", slot.name())))?;
        Some(if slot <= Slot::O { Block::Attention } else { Block::DenseMlp })
    };
    match rest {
        _ if !spec.tensors.contains_key(name) => None,
        "embed_tokens.weight" | "lm_head.weight" => Some(Block::Embedding),
        _ if rest.contains(".experts.") => Some(Block::Experts),
        _ => Some(slot().unwrap_or(Block::RouterAndNorms)),
    }
}
