//! What a checkpoint of a given configuration must hold: every text tensor by name and shape, and every linear module that
//! an adapter can target. Computed from the configuration alone, so that it works from headers without weights.

use super::config::{LayerConfig, LayerKind, TextConfig};
use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// The seven adaptable linear modules of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Slot {
    /// Queries.
    Q,
    /// Keys; on layers with `attention_k_eq_v` keys and values.
    K,
    /// Values; absent on layers with `attention_k_eq_v`.
    V,
    /// Attention output.
    O,
    /// Dense MLP gate.
    Gate,
    /// Dense MLP up.
    Up,
    /// Dense MLP down.
    Down,
}

impl Slot {
    /// All slots, in the order of the tables.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// Last component of the module's path.
    pub fn name(self) -> &'static str {
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"][self as usize]
    }

    fn parent(self) -> &'static str {
        match self {
            Self::Q | Self::K | Self::V | Self::O => "self_attn",
            Self::Gate | Self::Up | Self::Down => "mlp",
        }
    }
}

/// A frozen linear module `y = x W^T`, W `[output, input]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearModule {
    /// Module path as the checkpoint spells it, without `.weight`.
    pub path: String,
    /// Layer index.
    pub layer: usize,
    /// Kind of that layer.
    pub kind: LayerKind,
    /// Which module of the layer.
    pub slot: Slot,
    /// Input features.
    pub input: usize,
    /// Output features.
    pub output: usize,
}

/// Names and shapes of the text stack under one prefix.
#[derive(Debug, Clone)]
pub struct ModelSpec {
    /// `model.` or `model.language_model.`.
    pub prefix: String,
    /// Every text tensor and its shape.
    pub tensors: BTreeMap<String, Vec<usize>>,
    /// The adaptable modules, by layer, then in the order of [`Slot::ALL`].
    pub modules: Vec<LinearModule>,
}

/// Prefixes of tensors that belong to other towers of a multimodal checkpoint.
const TOWERS: [&str; 5] = [
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
];

/// The head, which some writers store although it is tied to the embedding.
pub const TIED_COPY: &str = "lm_head.weight";

/// Tensors of a checkpoint that the text engine leaves on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Towers {
    /// Their names.
    pub names: Vec<String>,
    /// Their values in all.
    pub parameters: usize,
}

impl ModelSpec {
    /// The tensors that `config` asks for under `prefix`.
    pub fn new(config: &TextConfig, prefix: &str) -> Self {
        let mut spec = Self { prefix: prefix.into(), tensors: BTreeMap::new(), modules: Vec::new() };
        let hidden = config.hidden_size;
        spec.add("embed_tokens.weight", &[config.vocab_size, hidden]);
        spec.add("norm.weight", &[hidden]);
        if !config.tied_head {
            spec.tensors.insert("lm_head.weight".into(), vec![config.vocab_size, hidden]);
        }
        for (index, layer) in config.layers.iter().enumerate() {
            spec.add_layer(config, index, layer);
        }
        spec
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.tensors.insert(format!("{}{name}", self.prefix), shape.to_vec());
    }

    fn add_layer(&mut self, config: &TextConfig, index: usize, layer: &LayerConfig) {
        let hidden = config.hidden_size;
        let at = |name: &str| format!("layers.{index}.{name}");
        for (slot, input, output) in layer_modules(config, layer) {
            let path = format!("{}layers.{index}.{}.{}", self.prefix, slot.parent(), slot.name());
            self.tensors.insert(format!("{path}.weight"), vec![output, input]);
            self.modules.push(LinearModule { path, layer: index, kind: layer.kind, slot, input, output });
        }
        for name in ["q_norm", "k_norm"] {
            self.add(&at(&format!("self_attn.{name}.weight")), &[layer.head_dim]);
        }
        for name in
            ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
        {
            self.add(&at(&format!("{name}.weight")), &[hidden]);
        }
        self.add(&at("layer_scalar"), &[1]);
        let Some(moe) = layer.moe else { return };
        for name in ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"] {
            self.add(&at(&format!("{name}.weight")), &[hidden]);
        }
        self.add(&at("router.proj.weight"), &[moe.experts, hidden]);
        self.add(&at("router.scale"), &[hidden]);
        self.add(&at("router.per_expert_scale"), &[moe.experts]);
        self.add(&at("experts.gate_up_proj"), &[moe.experts, 2 * moe.intermediate_size, hidden]);
        self.add(&at("experts.down_proj"), &[moe.experts, hidden, moe.intermediate_size]);
    }

    /// The spec that fits the names of a checkpoint, after every name and shape was compared.
    ///
    /// `found` maps a tensor's name to its shape and the file that holds it.
    ///
    /// # Errors
    /// `model::missing_tensor`, `model::wrong_shape`, `model::extra_tensor`, each naming the tensor, what was expected and
    /// the file.
    pub fn check(config: &TextConfig, found: &BTreeMap<String, (Vec<usize>, String)>) -> Result<(Self, Towers)> {
        let multimodal = found.keys().any(|name| name.starts_with("model.language_model."));
        let spec = Self::new(config, if multimodal { "model.language_model." } else { "model." });
        for (name, shape) in &spec.tensors {
            match found.get(name) {
                None => {
                    let files: BTreeSet<&str> = found.values().map(|(_, file)| file.as_str()).collect();
                    let files = files.into_iter().collect::<Vec<_>>().join(", ");
                    return Err(Error::new("model::missing_tensor", format!("there is no tensor {name} in {files}"))
                        .expected(format!("{name} of shape {shape:?}"))
                        .help("compare config.json with the weight files; a shard may be missing"));
                }
                Some((other, file)) if other != shape => {
                    return Err(Error::new(
                        "model::wrong_shape",
                        format!("tensor {name} in {file} has shape {other:?}"),
                    )
                    .expected(format!("{shape:?}, from config.json")));
                }
                Some(_) => {}
            }
        }
        let mut towers = Towers::default();
        for (name, (shape, file)) in found.iter().filter(|(name, _)| !spec.tensors.contains_key(*name)) {
            // Some writers store the tied head a second time.
            let tied_copy = name == TIED_COPY && config.tied_head;
            if TOWERS.iter().any(|tower| name.starts_with(tower)) {
                towers.parameters += shape.iter().product::<usize>();
                towers.names.push(name.clone());
            } else if tied_copy && *shape != [config.vocab_size, config.hidden_size] {
                return Err(Error::new("model::wrong_shape", format!("tensor {name} in {file} has shape {shape:?}"))
                    .expected("a copy of the embedding, to which config.json ties it"));
            } else if !tied_copy {
                return Err(Error::new(
                    "model::extra_tensor",
                    format!("tensor {name} in {file} is not part of this model"),
                )
                .expected("the text stack that config.json describes, and vision or audio towers")
                .help("config.json may describe fewer layers or another family than the weights"));
            }
        }
        Ok((spec, towers))
    }

    /// Number of text parameters.
    pub fn parameters(&self) -> usize {
        self.tensors.values().map(|shape| shape.iter().product::<usize>()).sum()
    }
}

fn layer_modules(config: &TextConfig, layer: &LayerConfig) -> Vec<(Slot, usize, usize)> {
    let hidden = config.hidden_size;
    let q = config.heads * layer.head_dim;
    let kv = layer.kv_heads * layer.head_dim;
    let mut modules = vec![(Slot::Q, hidden, q), (Slot::K, hidden, kv)];
    if !layer.k_eq_v {
        modules.push((Slot::V, hidden, kv));
    }
    modules.push((Slot::O, q, hidden));
    modules.push((Slot::Gate, hidden, config.intermediate_size));
    modules.push((Slot::Up, hidden, config.intermediate_size));
    modules.push((Slot::Down, config.intermediate_size, hidden));
    modules
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::{fixture, large_model_headers};

    #[test]
    fn the_published_26b_checkpoint_is_described_exactly() {
        let (config, found) = large_model_headers();
        let (spec, towers) = ModelSpec::check(&config, &found).unwrap();
        assert_eq!(found.len(), 1013);
        assert_eq!(spec.tensors.len() + towers.names.len(), 1013);
        assert_eq!(spec.parameters() + towers.parameters, 25_805_936_206);
        assert_eq!(towers.parameters, 572_794_416);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (config, found) = large_model_headers();
        let name = "model.language_model.layers.3.experts.down_proj";
        let mut missing = found.clone();
        missing.remove(name);
        let e = ModelSpec::check(&config, &missing).unwrap_err();
        assert_eq!(e.code(), "model::missing_tensor");
        assert!(e.to_string().contains("[128, 2816, 704]") && e.message().contains("shard"), "{e}");
        let mut wrong = found.clone();
        wrong.get_mut(name).unwrap().0 = vec![128, 704, 2816];
        let e = ModelSpec::check(&config, &wrong).unwrap_err();
        assert_eq!(e.code(), "model::wrong_shape");
        assert!(e.message().contains(name) && e.message().contains("shard"), "{e}");
        let mut extra = found.clone();
        // A full-attention layer has no v_proj of its own.
        extra
            .insert("model.language_model.layers.5.self_attn.v_proj.weight".into(), (vec![1024, 2816], "shard".into()));
        let e = ModelSpec::check(&config, &extra).unwrap_err();
        assert_eq!(e.code(), "model::extra_tensor");
        assert!(e.message().contains("layers.5.self_attn.v_proj"), "{e}");
    }

    #[test]
    fn a_dense_text_only_model_has_no_expert_tensors() {
        let mut config = TextConfig::read(&fixture("golden/model")).unwrap();
        for layer in &mut config.layers {
            layer.moe = None;
        }
        let spec = ModelSpec::new(&config, "model.");
        assert!(
            !spec.tensors.keys().any(|name| name.contains("expert") || name.contains("router") || name.contains("_1."))
        );
        assert!(spec.tensors.contains_key("model.layers.0.mlp.gate_proj.weight"));
        let found = spec.tensors.iter().map(|(n, s)| (n.clone(), (s.clone(), "file".into()))).collect();
        assert!(ModelSpec::check(&config, &found).is_ok());
    }
}
