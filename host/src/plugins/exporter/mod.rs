//! Plugins of the kind `exporter`: they lay out an export, the host carries it out.

mod check;

use std::ops::Range;

use super::reference::{Identity, PluginRef};
use super::runtime::Plugin;
use super::since_v0_1_0::exporting;
use crate::error::Result;
use crate::model::ggml::Stored;
use crate::model::gguf;
use check::Check;

/// A tuned model, without its weights.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tuned {
    /// The base's tensors.
    pub base_tensors: Vec<BaseTensor>,
    /// The base's `config.json`.
    pub base_config: String,
    /// Where the base is.
    pub base_path: String,
    /// Path of each adapted module.
    pub modules: Vec<String>,
    /// The base tensor that each module's update belongs to.
    pub module_tensors: Vec<u32>,
    /// A full-match regular expression over module paths that selects just these modules.
    pub modules_regex: String,
    /// Rank r.
    pub rank: u32,
    /// LoRA's alpha.
    pub alpha: f64,
    /// The update is alpha / sqrt(r) B A, not alpha / r B A.
    pub rslora: bool,
    /// Dropout that was trained with.
    pub dropout: f64,
    /// Of each module, the Frobenius norm of the base's weight.
    pub weight_norms: Vec<f64>,
    /// Of each module, the Frobenius norm of the update.
    pub update_norms: Vec<f64>,
    /// The chat template that was trained with.
    pub chat_template: Option<String>,
}

/// Name, storage and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseTensor {
    /// Its name.
    pub name: String,
    /// As safetensors spells it: `BF16`.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// What an export consists of; every file is named once, every index exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportPlan {
    /// Files of tensors.
    pub tensor_files: Vec<TensorFile>,
    /// Values of the plan's own, which [`Source::Constant`] counts.
    pub constants: Vec<Vec<f32>>,
    /// The metadata of a GGUF file, but the vocabulary's.
    pub gguf_metadata: Vec<(String, gguf::Value)>,
    /// Name and text of each text file.
    pub texts: Vec<(String, String)>,
    /// Files copied from the base's folder, where they exist.
    pub copied_files: Vec<String>,
    /// Lines for the user.
    pub notes: Vec<String>,
}

/// A file of tensors: safetensors, or GGUF after its name.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorFile {
    /// Its name.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<PlannedTensor>,
    /// The modules that it holds quantised.
    pub quantized: Vec<QuantizedModule>,
}

/// A linear module that is stored quantised; every number fits the base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedModule {
    /// Its path, the first part of its tensors' names.
    pub path: String,
    /// The base tensor, by index.
    pub tensor: usize,
    /// Its rows of that tensor, as a matrix as wide as its last dimension.
    pub rows: Range<usize>,
    /// How its weight is stored.
    pub scheme: Scheme,
    /// Modules of one number share a scale that covers a whole module.
    pub shared_scale: u32,
}

/// How a weight is stored in the compressed-tensors layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// E4M3 with a bf16 scale a row.
    Fp8,
    /// Symmetric 4-bit integers with a bf16 scale for each group of this many columns.
    Int4(usize),
    /// E2M1 with an E4M3 scale for each 16 columns and an f32 scale a module.
    Nvfp4,
}

impl TensorFile {
    /// Whether it is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.name.ends_with(GGUF)
    }
}

/// The end of a GGUF file's name.
const GGUF: &str = ".gguf";

impl Scheme {
    /// Last parts of the names of a module's tensors.
    pub fn suffixes(self) -> [&'static str; 3] {
        match self {
            Self::Fp8 => ["weight", "weight_scale", ""],
            Self::Int4(_) => ["weight_packed", "weight_scale", "weight_shape"],
            Self::Nvfp4 => ["weight_packed", "weight_scale", "weight_global_scale"],
        }
    }
}

/// A tensor that is written.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTensor {
    /// Its name in the file.
    pub name: String,
    /// Where it comes from.
    pub source: Source,
    /// How it is stored; `None` for the base's own, and f32 for A, B and constants.
    pub stored: Option<Stored>,
}

/// Where a written tensor comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// A tensor of the base, by index.
    Base(usize),
    /// A tensor of the base with this much of the update of its modules.
    Merged(usize, f64),
    /// A of a module, by index.
    A(usize),
    /// B of a module, by index.
    B(usize),
    /// A constant of the plan, by index.
    Constant(usize),
}

/// A running exporter.
pub struct Exporter {
    plugin: Plugin<exporting::Guest>,
}

impl Exporter {
    /// Start an exporter with its settings, `[plugins.config.exporter]`.
    ///
    /// # Errors
    /// `plugin::config_refused`, `plugin::wrong_contract`, and those of a failed call.
    pub fn load(reference: &PluginRef, config: Option<&serde_json::Value>) -> Result<Self> {
        let plugin = Plugin::load(reference, config, |component, store, instance| {
            exporting::GuestIndices::new(component)?.load(store, instance)
        })?;
        Ok(Self { plugin })
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        self.plugin.identity()
    }

    /// Lay out the export of a tuned model. The plan that comes back keeps every rule of `wit/exporter.wit`.
    ///
    /// # Errors
    /// `plugin::refused`, `plugin::invalid_export` naming the file, tensor or module, and those of a failed call.
    pub fn plan(&mut self, tuned: &Tuned) -> Result<ExportPlan> {
        let names: Vec<&str> = tuned.base_tensors.iter().map(|t| t.name.as_str()).collect();
        let dtypes: Vec<&str> = tuned.base_tensors.iter().map(|t| t.dtype.as_str()).collect();
        let dims: Vec<u64> = tuned.base_tensors.iter().flat_map(|t| t.shape.iter().copied()).collect();
        let mut end = 0;
        let dim_ends: Vec<u32> = tuned
            .base_tensors
            .iter()
            .map(|t| {
                end += t.shape.len() as u32;
                end
            })
            .collect();
        let modules: Vec<&str> = tuned.modules.iter().map(String::as_str).collect();
        let columns = exporting::Tuned {
            base_tensors: &names,
            base_dtypes: &dtypes,
            base_dims: &dims,
            base_dim_ends: &dim_ends,
            base_config: &tuned.base_config,
            base_path: &tuned.base_path,
            modules: &modules,
            module_tensors: &tuned.module_tensors,
            modules_regex: &tuned.modules_regex,
            rank: tuned.rank,
            alpha: tuned.alpha,
            rslora: tuned.rslora,
            dropout: tuned.dropout,
            weight_norms: &tuned.weight_norms,
            update_norms: &tuned.update_norms,
            chat_template: tuned.chat_template.as_deref(),
        };
        let answer = self.plugin.call("plan", |functions, store| functions.call_plan(store, columns))?;
        Check { tuned, identity: self.plugin.identity() }.plan(answer)
    }
}
