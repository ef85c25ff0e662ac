//! The frozen base on its device. Tensors stream from the mapped file one at a time: the host never holds more than the
//! largest tensor beside what the device holds.

use super::adapter::tensor;
use super::checkpoint::Checkpoint;
use super::config::TextConfig;
use super::quantized::Format;
use super::spec::{ModelSpec, Slot, TIED_COPY, Towers};
use crate::config::WeightDtype;
use crate::error::{Error, Result};
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};

/// Router and fused experts of a layer.
#[derive(Debug, Clone)]
pub struct MoeWeights {
    /// Norm of the dense branch's output `[H]`.
    pub post_dense_norm: Tensor<1>,
    /// Norm of the expert branch's input `[H]`.
    pub pre_norm: Tensor<1>,
    /// Norm of the expert branch's output `[H]`.
    pub post_norm: Tensor<1>,
    /// Router scale times H^-1/2, `[H]`: applied as the weight of the router's norm.
    pub router_scale: Tensor<1>,
    /// `[E, H]`.
    pub router: Tensor<2>,
    /// `[E]`.
    pub per_expert_scale: Tensor<1>,
    /// `[E, 2I, H]`, gate rows first.
    pub gate_up: Tensor<3>,
    /// `[E, H, I]`.
    pub down: Tensor<3>,
}

/// One decoder layer.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    /// The linear modules by [`Slot`], each `[out, in]`.
    pub linear: [Option<Tensor<2>>; 7],
    /// `[head_dim]`.
    pub q_norm: Tensor<1>,
    /// `[head_dim]`.
    pub k_norm: Tensor<1>,
    /// `[H]`.
    pub input_norm: Tensor<1>,
    /// `[H]`.
    pub post_attention_norm: Tensor<1>,
    /// `[H]`.
    pub pre_feedforward_norm: Tensor<1>,
    /// `[H]`.
    pub post_feedforward_norm: Tensor<1>,
    /// Multiplies the residual stream at the end of the layer.
    pub layer_scalar: f32,
    /// What is multiplied with a quantised matrix is rounded to E4M3 first, as a server does.
    pub fp8_activations: bool,
    /// Experts beside the dense MLP.
    pub moe: Option<MoeWeights>,
}

impl LayerWeights {
    /// The matrix of a module that the layer has.
    pub fn matrix(&self, slot: Slot) -> &Tensor<2> {
        self.linear[slot as usize].as_ref().expect("the spec lists the module")
    }
}

/// A loaded base.
#[derive(Debug, Clone)]
pub struct Model {
    /// Shape.
    pub config: TextConfig,
    /// Names.
    pub spec: ModelSpec,
    /// What was left on disk.
    pub towers: Towers,
    /// Embedding `[V, H]`; also the head when that is tied.
    pub embed: Tensor<2>,
    /// Final norm `[H]`.
    pub norm: Tensor<1>,
    /// Head `[V, H]`.
    pub head: Tensor<2>,
    /// Layers.
    pub layers: Vec<LayerWeights>,
    /// What the operations of a layer and the head pass to each other; f32 as it is loaded.
    pub activations: DType,
    /// Where the tensors are.
    pub device: Device,
}

impl Model {
    /// Streams the text stack of `checkpoint` to `device`, its matrices as `weights`. `progress` is told the bytes read so
    /// far.
    ///
    /// # Errors
    /// Those of [`WeightReader::open`] and [`Checkpoint::read_f32`].
    pub fn load(
        config: TextConfig,
        checkpoint: &Checkpoint,
        device: &Device,
        weights: WeightDtype,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        Self::read(WeightReader::open(&config, checkpoint, device, weights, progress)?)
    }

    /// A base of this shape that knows nothing, made on the device and of no file: for measuring. Norms and scales are 1, all other
    /// values uniform in +-0.02.
    pub fn random(config: &TextConfig, device: &Device, weights: WeightDtype) -> Self {
        let (source, spec, towers) = (Source::Random, ModelSpec::new(config, "model."), Towers::default());
        let progress = &mut |_| {};
        Self::read(WeightReader { config, source, device, weights, spec, towers, read_bytes: 0, progress })
            .expect("nothing is read that could fail")
    }

    fn read(mut reader: WeightReader) -> Result<Self> {
        let embed = reader.embed()?;
        let norm = reader.norm()?;
        let head = match reader.config.tied_head {
            true => embed.clone(),
            false => reader.head()?,
        };
        let layers = (0..reader.config.layers.len()).map(|i| reader.layer(i)).collect::<Result<Vec<_>>>()?;
        let WeightReader { config, device, spec, towers, .. } = reader;
        let (activations, config, device) = (DType::F32, config.clone(), device.clone());
        Ok(Self { config, spec, towers, embed, norm, head, layers, activations, device })
    }
}

/// A head that config.json ties to the embedding, and that the file stores with other values, is neither one nor the other.
fn refuse_other_head(config: &TextConfig, spec: &ModelSpec, checkpoint: &Checkpoint) -> Result<()> {
    let embed = format!("{}embed_tokens.weight", spec.prefix);
    let stored = config.tied_head && checkpoint.entries().contains_key(TIED_COPY);
    if stored && checkpoint.bytes(TIED_COPY)? != checkpoint.bytes(&embed)? {
        let file = checkpoint.file_of(TIED_COPY).display();
        return Err(Error::new("model::extra_tensor", format!("tensor {TIED_COPY} in {file} differs from {embed}"))
            .expected("the same bytes: config.json has `tie_word_embeddings` true")
            .help("set `tie_word_embeddings` to false in config.json if the head is its own"));
    }
    Ok(())
}

/// Where values come from.
enum Source<'a> {
    Checkpoint(&'a Checkpoint),
    Random,
}

/// The tensors of the text stack one by one, for who does not hold them all at once.
pub struct WeightReader<'a> {
    config: &'a TextConfig,
    source: Source<'a>,
    device: &'a Device,
    weights: WeightDtype,
    spec: ModelSpec,
    towers: Towers,
    read_bytes: usize,
    progress: &'a mut dyn FnMut(usize),
}

impl<'a> WeightReader<'a> {
    /// A reader of `checkpoint` to `device`, matrices as `weights`. `progress` is told the bytes read so far.
    ///
    /// # Errors
    /// Those of [`ModelSpec::check`]; `model::extra_tensor`.
    pub fn open(
        config: &'a TextConfig,
        checkpoint: &'a Checkpoint,
        device: &'a Device,
        weights: WeightDtype,
        progress: &'a mut dyn FnMut(usize),
    ) -> Result<Self> {
        let (spec, towers) = ModelSpec::check(config, &checkpoint.shapes())?;
        refuse_other_head(config, &spec, checkpoint)?;
        let source = Source::Checkpoint(checkpoint);
        Ok(Self { config, source, device, weights, spec, towers, read_bytes: 0, progress })
    }

    /// Embedding `[V, H]`.
    pub fn embed(&mut self) -> Result<Tensor<2>> {
        self.matrix("embed_tokens.weight")
    }

    /// Final norm `[H]`.
    pub fn norm(&mut self) -> Result<Tensor<1>> {
        self.read("norm.weight")
    }

    /// Head `[V, H]`; the embedding where that is tied.
    pub fn head(&mut self) -> Result<Tensor<2>> {
        if self.config.tied_head { self.embed() } else { self.matrix_absolute("lm_head.weight") }
    }

    fn read<const D: usize>(&mut self, name: &str) -> Result<Tensor<D>> {
        self.read_absolute(&format!("{}{name}", self.spec.prefix))
    }

    /// A frozen matrix, or several stacked.
    fn matrix<const D: usize>(&mut self, name: &str) -> Result<Tensor<D>> {
        self.matrix_absolute(&format!("{}{name}", self.spec.prefix))
    }

    fn read_absolute<const D: usize>(&mut self, name: &str) -> Result<Tensor<D>> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(self.random(name, DType::F32)) };
        let values = checkpoint.read_f32(name)?;
        self.note_read(checkpoint, name);
        Ok(tensor(self.shape(name), values, self.device))
    }

    fn matrix_absolute<const D: usize>(&mut self, name: &str) -> Result<Tensor<D>> {
        if self.weights == WeightDtype::F32 {
            return self.read_absolute(name);
        }
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(self.random(name, DType::BF16)) };
        let values = checkpoint.read_bf16(name)?;
        self.note_read(checkpoint, name);
        let data = TensorData::new(values, self.shape::<D>(name));
        Ok(Tensor::from_data(data, (self.device, DType::BF16)))
    }

    fn random<const D: usize>(&self, name: &str, dtype: DType) -> Tensor<D> {
        let shape = self.shape::<D>(name);
        match D {
            1 => Tensor::ones(shape, self.device),
            _ => Tensor::<D>::random(shape, Distribution::Uniform(-0.02, 0.02), self.device).cast(dtype),
        }
    }

    fn shape<const D: usize>(&self, name: &str) -> [usize; D] {
        self.spec.tensors[name].as_slice().try_into().expect("shapes were compared with the spec")
    }

    /// Tells the progress.
    fn note_read(&mut self, checkpoint: &Checkpoint, name: &str) {
        self.read_bytes += checkpoint.size_bytes(name);
        (self.progress)(self.read_bytes);
    }

    /// Layer `index`.
    pub fn layer(&mut self, index: usize) -> Result<LayerWeights> {
        let config = self.config;
        let at = |name: &str| format!("layers.{index}.{name}");
        let mut linear: [Option<Tensor<2>>; 7] = Default::default();
        for slot in Slot::ALL {
            let parent = if slot <= Slot::O { "self_attn" } else { "mlp" };
            if slot != Slot::V || !config.layers[index].k_eq_v {
                linear[slot as usize] = Some(self.matrix(&at(&format!("{parent}.{}.weight", slot.name())))?);
            }
        }
        let moe = match config.layers[index].moe {
            None => None,
            Some(_) => Some(MoeWeights {
                post_dense_norm: self.read(&at("post_feedforward_layernorm_1.weight"))?,
                pre_norm: self.read(&at("pre_feedforward_layernorm_2.weight"))?,
                post_norm: self.read(&at("post_feedforward_layernorm_2.weight"))?,
                router_scale: self.read::<1>(&at("router.scale"))?.mul_scalar((config.hidden_size as f64).powf(-0.5)),
                router: self.read(&at("router.proj.weight"))?,
                per_expert_scale: self.read(&at("router.per_expert_scale"))?,
                gate_up: self.matrix(&at("experts.gate_up_proj"))?,
                down: self.matrix(&at("experts.down_proj"))?,
            }),
        };
        let (layer_scalar, fp8_activations) = match self.source {
            Source::Checkpoint(checkpoint) => {
                let scalar = checkpoint.read_f32(&format!("{}{}", self.spec.prefix, at("layer_scalar")))?[0];
                (scalar, checkpoint.format() == Some(Format::Fp8))
            }
            Source::Random => (1.0, false),
        };
        Ok(LayerWeights {
            linear,
            q_norm: self.read(&at("self_attn.q_norm.weight"))?,
            k_norm: self.read(&at("self_attn.k_norm.weight"))?,
            input_norm: self.read(&at("input_layernorm.weight"))?,
            post_attention_norm: self.read(&at("post_attention_layernorm.weight"))?,
            pre_feedforward_norm: self.read(&at("pre_feedforward_layernorm.weight"))?,
            post_feedforward_norm: self.read(&at("post_feedforward_layernorm.weight"))?,
            layer_scalar,
            fp8_activations,
            moe,
        })
    }
}
