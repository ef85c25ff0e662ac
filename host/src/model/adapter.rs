//! The trainable tensors of a run: one pair A `[r, in]`, B `[out, r]` (f32) for each adapted module, all in one buffer.

use super::flat::{Flat, Place};
use super::lora::{LoraPlan, never_adapted};
use super::rng::{SplitMix64, derive_seed};
use super::spec::{LinearModule, Slot};
use crate::error::{Error, Result};
use burn::tensor::{Device, Tensor, TensorData};
use std::collections::BTreeMap;
use tunehost_kernels::linear::{Adapter as LinearAdapter, Dropout};

/// A and B of one module.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// `[r, in]`.
    pub a: Tensor<2>,
    /// `[out, r]`.
    pub b: Tensor<2>,
}

/// The adapters of one layer, by [`Slot`], as the kernels take them.
pub type LayerAdapters = [Option<LinearAdapter>; 7];

/// Every adapter of a model.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// What is adapted.
    pub plan: LoraPlan,
    /// A and B of each of `plan.modules`.
    pub flat: Flat,
}

/// Values and shape of one adapter tensor under its PEFT name.
pub type NamedTensor = (String, [usize; 2], Vec<f32>);

/// Shape and values of 2-D tensors, by name.
pub type TensorMap = BTreeMap<String, ([usize; 2], Vec<f32>)>;

/// What a reader asks first where an adapter does not fit.
pub(super) const OTHER_BASE: &str = "was the adapter trained on another base?";

impl Adapter {
    /// Fresh adapters: A uniform in +-1/sqrt(in) (the Kaiming initialisation that PEFT uses), B zero. Each module draws from a
    /// stream named after its path, so that adapting one module more changes no other.
    pub fn init(plan: LoraPlan, seed: u64, device: &Device) -> Self {
        let fresh = |index: usize, [a, b]: &[Place; 2]| {
            let module = &plan.modules[index];
            let mut rng = SplitMix64::new(seed, &module.path);
            let bound = 1.0 / (module.input as f64).sqrt();
            let a = a.range().map(|_| ((2.0 * rng.next_f64() - 1.0) * bound) as f32).collect();
            Ok([a, vec![0.0; b.range().len()]])
        };
        let flat = Flat::read(&plan, device, fresh).expect("nothing is read");
        Self { plan, flat }
    }

    /// Adapters from tensors under their PEFT names.
    ///
    /// # Errors
    /// `model::adapter_tensor` naming the tensor that is missing, left over, wrongly shaped or not finite.
    pub fn from_tensors(plan: LoraPlan, mut tensors: TensorMap, device: &Device) -> Result<Self> {
        let wrong = |message: String| Error::new("model::adapter_tensor", message);
        let mut take = |Place { name, shape, .. }: &Place| -> Result<Vec<f32>> {
            let (found, values) = tensors.remove(name).ok_or_else(|| {
                wrong(format!("the adapter has no tensor {name}"))
                    .expected(format!("{name} {shape:?}"))
                    .help("its settings name a module that its tensors leave out: take both from one training")
            })?;
            if found != *shape {
                // Rows of A and columns of B are the rank.
                let of_rank =
                    (0..2).any(|at| found[at] != shape[at] && found[1 - at] == shape[1 - at] && shape[at] == plan.rank);
                return Err(wrong(format!("adapter tensor {name} has shape {found:?}"))
                    .expected(format!("{shape:?}, from the base and the rank"))
                    .help(if of_rank {
                        "the rank of its settings (`r`) is not that of its tensors: take both from one training"
                    } else {
                        OTHER_BASE
                    }));
            }
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(wrong(format!("adapter tensor {name} holds {} at element {at}", values[at]))
                    .expected("finite values")
                    .help("the training that wrote it went astray: take an earlier checkpoint of it, or train again"));
            }
            Ok(values)
        };
        let flat = Flat::read(&plan, device, |_, [a, b]| Ok([take(a)?, take(b)?]))?;
        match tensors.keys().next() {
            Some(name) => Err(wrong(format!("adapter tensor {name} belongs to no adapted module of this base"))
                .help(never_adapted(name).unwrap_or(OTHER_BASE))),
            None => Ok(Self { plan, flat }),
        }
    }

    /// Every tensor under its PEFT name, A before B, in module order.
    pub fn tensors(&self) -> Vec<NamedTensor> {
        self.flat.tensors().map(|(name, tensor)| (name.into(), tensor.dims(), values(&tensor))).collect()
    }

    /// A and B of module `index`: views, as [`Flat::pair`] gives them.
    pub fn pair(&self, index: usize) -> LowRank {
        self.flat.pair(index)
    }

    /// A and B of every module.
    pub fn pairs(&self) -> impl Iterator<Item = LowRank> {
        (0..self.plan.modules.len()).map(|index| self.pair(index))
    }

    /// The adapters of `layer` as the kernels take them. `dropout_seed` turns dropout on; it must be the same for a layer and
    /// its recompute.
    pub fn layer(&self, layer: usize, dropout_seed: Option<u64>) -> LayerAdapters {
        self.layer_of(layer, dropout_seed, |pair| pair)
    }

    /// Like [`Adapter::layer`], with every tensor passed through `map`: how the engine marks them as differentiable.
    pub fn layer_of(
        &self,
        layer: usize,
        dropout_seed: Option<u64>,
        mut map: impl FnMut(LowRank) -> LowRank,
    ) -> LayerAdapters {
        let mut out: LayerAdapters = Default::default();
        for (index, module) in self.plan.modules.iter().enumerate().filter(|(_, m)| m.layer == layer) {
            let LowRank { a, b } = map(self.pair(index));
            let seed = dropout_seed.filter(|_| self.plan.dropout > 0.0);
            let dropout = seed.map(|seed| Dropout { p: self.plan.dropout, seed: derive_seed(seed, &module.path) });
            out[module.slot as usize] = Some(LinearAdapter { a, b, scale: self.plan.scale, dropout });
        }
        out
    }

    /// Indices into `modules` of the adapters of `layer`, in slot order.
    pub fn indices_of(&self, layer: usize) -> impl Iterator<Item = (usize, Slot)> + '_ {
        let modules = self.plan.modules.iter().enumerate();
        modules.filter(move |(_, m)| m.layer == layer).map(|(i, m)| (i, m.slot))
    }
}

/// Names of a module's A and B in `adapter_model.safetensors`.
pub fn peft_names(module: &LinearModule) -> [String; 2] {
    ["lora_A", "lora_B"].map(|which| format!("base_model.model.{}.{which}.weight", module.path))
}

/// An f32 tensor from its values.
pub fn tensor<const D: usize>(shape: [usize; D], values: Vec<f32>, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// A tensor's f32 values, row-major.
pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.try_to_vec_as::<f32>().expect("an f32 tensor on a device that answers")
}
