//! Plugins of the kind `exporter`: they lay out an export, the host carries it out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::reference::{Identity, PluginRef};
use super::runtime::{Plugin, shown};
use super::since_v0_1_0::exporting;
use crate::error::{Error, Result};

const FILE_NAME_BYTES_MAX: usize = 200;
/// How often an export may hold a tensor of the base, or A or B of a module: once, and a tied copy.
const TIMES_WRITTEN_MAX: u32 = 2;
/// Most columns that share a scale.
const INT4_GROUP_MAX: usize = 256;

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
    /// safetensors files.
    pub tensor_files: Vec<TensorFile>,
    /// Name and text of each text file.
    pub texts: Vec<(String, String)>,
    /// Files copied from the base's folder, where they exist.
    pub copied_files: Vec<String>,
}

/// A safetensors file.
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
    /// How it is stored; `None` for the base's own, and f32 for A and B.
    pub dtype: Option<safetensors::Dtype>,
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
            chat_template: tuned.chat_template.as_deref(),
        };
        let answer = self.plugin.call("plan", |functions, store| functions.call_plan(store, columns))?;
        Check { tuned, identity: self.plugin.identity() }.plan(answer)
    }
}

struct Check<'a> {
    tuned: &'a Tuned,
    identity: &'a Identity,
}

impl Check<'_> {
    fn invalid(&self, what: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::new("plugin::invalid_export", format!("{}: plan: {}", self.identity, what.into()))
            .expected(expected)
            .help("this is a bug in the plugin: use another exporter, or tell its author")
    }

    fn plan(&self, answer: exporting::ExportPlan) -> Result<ExportPlan> {
        let count = answer.names.len();
        for (column, length) in [
            ("sources", answer.sources.len()),
            ("indices", answer.indices.len()),
            ("dtypes", answer.dtypes.len()),
            ("strengths", answer.strengths.len()),
        ] {
            if length != count {
                return Err(self.invalid(format!("{column} has {length} elements"), format!("{count}, as names has")));
            }
        }
        for (column, texts, into, expected) in [
            ("tensor-file-ends", answer.tensor_file_ends.len(), "tensor-files", answer.tensor_files.len()),
            ("texts", answer.texts.len(), "text-files", answer.text_files.len()),
        ] {
            if texts != expected {
                return Err(
                    self.invalid(format!("{column} has {texts} elements"), format!("{expected}, as {into} has"))
                );
            }
        }
        self.file_names(&answer)?;
        let tensors: Vec<PlannedTensor> = (0..count).map(|at| self.tensor(&answer, at)).collect::<Result<_>>()?;
        let quantized: Vec<QuantizedModule> =
            answer.quantized.iter().map(|module| self.quantized(module)).collect::<Result<_>>()?;
        self.disjoint(&quantized)?;
        self.coverage(&tensors, &quantized)?;
        self.repeats(&tensors)?;
        let tensor_files = self.cut(&answer, tensors, quantized)?;
        let texts = answer.text_files.into_iter().zip(answer.texts).collect();
        Ok(ExportPlan { tensor_files, texts, copied_files: answer.copied_files })
    }

    fn file_names(&self, answer: &exporting::ExportPlan) -> Result<()> {
        let mut seen = BTreeSet::new();
        for name in answer.tensor_files.iter().chain(&answer.text_files).chain(&answer.copied_files) {
            let plain = |c: char| !c.is_control() && !"/\\:".contains(c);
            let fits = (1..=FILE_NAME_BYTES_MAX).contains(&name.len());
            if !fits || name.starts_with('.') || !name.chars().all(plain) {
                let what = format!("{:?} is no name for a file of an export", shown(name));
                return Err(self.invalid(what, "a file name without a folder, not hidden"));
            }
            if !seen.insert(name) {
                return Err(self.invalid(format!("the file {name:?} is named twice"), "each file once"));
            }
        }
        match answer.tensor_files.iter().find(|name| !name.ends_with(".safetensors")) {
            None => Ok(()),
            Some(name) => Err(self.invalid(format!("{name:?} is to hold tensors"), "a name that ends in .safetensors")),
        }
    }

    fn tensor(&self, answer: &exporting::ExportPlan, at: usize) -> Result<PlannedTensor> {
        let name = shown(&answer.names[at]);
        if name.is_empty() || name != answer.names[at] || name == "__metadata__" {
            return Err(self.invalid(format!("names[{at}] is {name:?}"), "a name for a tensor"));
        }
        let (source, index, strength) = (answer.sources[at], answer.indices[at] as usize, answer.strengths[at]);
        let (of, count) = match source {
            exporting::Source::Base | exporting::Source::Merged => ("base tensor", self.tuned.base_tensors.len()),
            exporting::Source::LoraA | exporting::Source::LoraB => ("module", self.tuned.modules.len()),
        };
        if index >= count {
            return Err(self.invalid(format!("tensor {name} is made of {of} {index}"), format!("a {of} below {count}")));
        }
        if !strength.is_finite() || (source != exporting::Source::Merged && strength != 1.0) {
            let expected = match source {
                exporting::Source::Merged => "a finite number",
                _ => "1, since it is not merged",
            };
            return Err(self.invalid(format!("tensor {name} has the strength {strength}"), expected));
        }
        let source = match source {
            exporting::Source::Base => Source::Base(index),
            exporting::Source::Merged => Source::Merged(index, strength),
            exporting::Source::LoraA => Source::A(index),
            exporting::Source::LoraB => Source::B(index),
        };
        let dtype = match answer.dtypes[at] {
            exporting::Dtype::Unchanged => None,
            exporting::Dtype::Float32 => Some(safetensors::Dtype::F32),
            exporting::Dtype::Bfloat16 => Some(safetensors::Dtype::BF16),
            exporting::Dtype::Float16 => Some(safetensors::Dtype::F16),
        };
        Ok(PlannedTensor { name, source, dtype })
    }

    fn quantized(&self, module: &exporting::QuantizedModule) -> Result<QuantizedModule> {
        let path = shown(&module.path);
        let bad =
            |what: String, expected: String| Err(self.invalid(format!("the quantised module {path} {what}"), expected));
        if path.is_empty() || path != module.path {
            return Err(self.invalid(format!("a quantised module is called {path:?}"), "a module's path"));
        }
        let count = self.tuned.base_tensors.len();
        let tensor = module.base_tensor as usize;
        let Some(base) = self.tuned.base_tensors.get(tensor) else {
            return bad(format!("is made of base tensor {tensor}"), format!("a base tensor below {count}"));
        };
        let (height, width) = match base.shape.as_slice() {
            [rows @ .., width] if !rows.is_empty() => (rows.iter().product::<u64>(), *width),
            shape => return bad(format!("is made of {}, of shape {shape:?}", base.name), "a matrix".into()),
        };
        let end = module.first_row.saturating_add(module.rows);
        if module.rows == 0 || end > height {
            let rows = format!("takes {} rows from row {} of {}", module.rows, module.first_row, base.name);
            return bad(rows, format!("rows below {height}, and at least one"));
        }
        let group = module.group_size as usize;
        let (scheme, allowed) = match module.scheme {
            exporting::Scheme::Fp8 => (Scheme::Fp8, group == 0),
            exporting::Scheme::Int4 => {
                let divides = group > 0 && (width as usize).is_multiple_of(group);
                (Scheme::Int4(group), divides && group.is_multiple_of(8) && group <= INT4_GROUP_MAX)
            }
            exporting::Scheme::Nvfp4 => (Scheme::Nvfp4, group == 16 && width.is_multiple_of(16)),
        };
        if !allowed {
            let what = format!("is {width} columns wide and has groups of {group}");
            return bad(
                what,
                "groups that divide the width: for int4 of a multiple of 8 up to 256, for nvfp4 of 16, for fp8 0"
                    .into(),
            );
        }
        Ok(QuantizedModule {
            path,
            tensor,
            rows: module.first_row as usize..end as usize,
            scheme,
            shared_scale: module.shared_scale,
        })
    }

    /// No row of a base tensor is quantised twice, which would let a small plan fill the disk.
    fn disjoint(&self, quantized: &[QuantizedModule]) -> Result<()> {
        let mut rows: Vec<_> = quantized.iter().map(|m| (m.tensor, m.rows.start, m.rows.end, &m.path)).collect();
        rows.sort_unstable();
        match rows.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) {
            None => Ok(()),
            Some(pair) => {
                let what = format!("the quantised modules {} and {} share rows", pair[0].3, pair[1].3);
                Err(self.invalid(what, "each row of a base tensor quantised once"))
            }
        }
    }

    /// A small plan must not make the host fill the disk.
    fn repeats(&self, tensors: &[PlannedTensor]) -> Result<()> {
        let mut written: BTreeMap<(bool, bool, usize), u32> = BTreeMap::new();
        for tensor in tensors {
            let key = match tensor.source {
                Source::Base(index) | Source::Merged(index, _) => (false, false, index),
                Source::A(index) => (true, false, index),
                Source::B(index) => (true, true, index),
            };
            let times = written.entry(key).or_default();
            *times += 1;
            if *times > TIMES_WRITTEN_MAX {
                let what = format!("what tensor {} is made of is written {times} times", tensor.name);
                return Err(self.invalid(what, format!("at most {TIMES_WRITTEN_MAX} times")));
            }
        }
        Ok(())
    }

    /// Every module's update must leave with the export, as A and B or merged: a part of a tune that is silently left
    /// behind is what nobody looks for.
    fn coverage(&self, tensors: &[PlannedTensor], quantized: &[QuantizedModule]) -> Result<()> {
        let modules = self.tuned.modules.len();
        let (mut a, mut b) = (vec![false; modules], vec![false; modules]);
        let mut merged = BTreeSet::new();
        for tensor in tensors {
            match tensor.source {
                Source::A(index) => a[index] = true,
                Source::B(index) => b[index] = true,
                Source::Merged(index, strength) if strength != 0.0 => drop(merged.insert(index)),
                Source::Merged(..) | Source::Base(_) => {}
            }
        }
        let mut rows: BTreeMap<usize, u64> = BTreeMap::new();
        for module in quantized {
            *rows.entry(module.tensor).or_default() += module.rows.len() as u64;
        }
        let whole = |tensor: usize| {
            let shape = &self.tuned.base_tensors[tensor].shape;
            shape[..shape.len() - 1].iter().product::<u64>()
        };
        merged.extend(rows.into_iter().filter(|(tensor, rows)| *rows == whole(*tensor)).map(|(tensor, _)| tensor));
        for (index, path) in self.tuned.modules.iter().enumerate() {
            let in_merged = merged.contains(&(self.tuned.module_tensors[index] as usize));
            let what = match (a[index] && b[index] || in_merged, a[index], b[index]) {
                (true, ..) => continue,
                (_, true, _) => format!("of module {path} only A is written"),
                (_, _, true) => format!("of module {path} only B is written"),
                _ => format!("the update of module {path} is left out"),
            };
            return Err(self.invalid(what, "A and B of every adapted module, or its tensor merged"));
        }
        Ok(())
    }

    fn cut(
        &self,
        answer: &exporting::ExportPlan,
        tensors: Vec<PlannedTensor>,
        quantized: Vec<QuantizedModule>,
    ) -> Result<Vec<TensorFile>> {
        let files = answer.tensor_files.len();
        let mut modules: Vec<Vec<QuantizedModule>> = vec![Vec::new(); files];
        for (module, planned) in quantized.into_iter().zip(&answer.quantized) {
            let Some(file) = modules.get_mut(planned.file as usize) else {
                let what = format!("the quantised module {} is in file {}", module.path, planned.file);
                return Err(self.invalid(what, format!("a file below {files}")));
            };
            file.push(module);
        }
        let (mut files, mut start, count) = (Vec::new(), 0, tensors.len());
        let mut tensors = tensors.into_iter();
        for ((file, &end), quantized) in answer.tensor_files.iter().zip(&answer.tensor_file_ends).zip(modules) {
            let end = end as usize;
            if end < start || end > count || (end == start && quantized.is_empty()) {
                let what = format!("the tensors of {file} end at {end}");
                return Err(self.invalid(what, format!("more than the {start} before it, and at most {count}")));
            }
            let tensors: Vec<PlannedTensor> = tensors.by_ref().take(end - start).collect();
            let parts = quantized.iter().flat_map(|m| m.scheme.suffixes().map(|suffix| format!("{}.{suffix}", m.path)));
            let mut seen = BTreeSet::new();
            if let Some(twice) =
                tensors.iter().map(|t| t.name.clone()).chain(parts).find(|name| !seen.insert(name.clone()))
            {
                let what = format!("the tensor {twice} stands twice in {file}");
                return Err(self.invalid(what, "each name once in a file"));
            }
            files.push(TensorFile { name: file.clone(), tensors, quantized });
            start = end;
        }
        match start == count {
            true => Ok(files),
            false => Err(self.invalid(format!("{} tensors are in no file", count - start), "each tensor in a file")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::Kind;

    #[test]
    fn a_tensor_is_written_twice_at_most() {
        let plugin = PluginRef::resolve(Kind::Exporter, "peft-adapter", &[]).unwrap();
        let tuned = Tuned::default();
        let check = Check { tuned: &tuned, identity: plugin.identity() };
        let tensors = |times: usize, source: Source| -> Vec<PlannedTensor> {
            (0..times).map(|at| PlannedTensor { name: format!("t{at}"), source, dtype: None }).collect()
        };
        for source in [Source::Base(3), Source::Merged(3, 1.0), Source::A(0), Source::B(7)] {
            assert!(check.repeats(&tensors(2, source)).is_ok());
            let error = check.repeats(&tensors(3, source)).unwrap_err();
            assert_eq!(error.code(), "plugin::invalid_export");
            assert!(error.message().contains("what tensor t2 is made of is written 3 times"), "{error}");
        }
        let both = [tensors(2, Source::A(0)), tensors(2, Source::B(0)), tensors(2, Source::A(1))].concat();
        assert!(check.repeats(&both).is_ok());
    }
}
