//! Plugins of the kind `exporter`: they lay out an export, the host carries it out.

use std::collections::{BTreeMap, BTreeSet};

use super::reference::{Identity, PluginRef};
use super::runtime::{Plugin, shown};
use super::since_v0_1_0::exporting;
use crate::error::{Error, Result};

const FILE_NAME_BYTES_MAX: usize = 200;
/// How often an export may hold a tensor of the base, or A or B of a module: once, and a tied copy.
const TIMES_WRITTEN_MAX: u32 = 2;

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
        self.coverage(&tensors)?;
        self.repeats(&tensors)?;
        let tensor_files = self.cut(&answer, tensors)?;
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
    fn coverage(&self, tensors: &[PlannedTensor]) -> Result<()> {
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

    fn cut(&self, answer: &exporting::ExportPlan, tensors: Vec<PlannedTensor>) -> Result<Vec<TensorFile>> {
        let (mut files, mut start, count) = (Vec::new(), 0, tensors.len());
        let mut tensors = tensors.into_iter();
        for (file, &end) in answer.tensor_files.iter().zip(&answer.tensor_file_ends) {
            let end = end as usize;
            if end <= start || end > count {
                let what = format!("the tensors of {file} end at {end}");
                return Err(self.invalid(what, format!("more than the {start} before it, and at most {count}")));
            }
            let tensors: Vec<PlannedTensor> = tensors.by_ref().take(end - start).collect();
            let mut seen = BTreeSet::new();
            if let Some(twice) = tensors.iter().find(|tensor| !seen.insert(&tensor.name)) {
                let what = format!("the tensor {} stands twice in {file}", twice.name);
                return Err(self.invalid(what, "each name once in a file"));
            }
            files.push(TensorFile { name: file.clone(), tensors });
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
