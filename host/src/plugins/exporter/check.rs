//! Every rule of `wit/exporter.wit` held against a plan, before anything is written.

use std::collections::{BTreeMap, BTreeSet};

use super::super::reference::Identity;
use super::super::runtime::shown;
use super::super::since_v0_1_0::exporting;
use super::{ExportPlan, GGUF, PlannedTensor, QuantizedModule, Scheme, Source, TensorFile, Tuned};
use crate::error::{Error, Result};
use crate::model::ggml::{Block, Stored};
use crate::model::gguf;
use safetensors::Dtype;

const FILE_NAME_BYTES_MAX: usize = 200;
/// How often an export may hold a tensor of the base, or A or B of a module: once, and a tied copy.
const TIMES_WRITTEN_MAX: u32 = 2;
/// Most columns that share a scale.
const INT4_GROUP_MAX: usize = 256;
/// Most lines for the user, and most bytes of each.
const NOTES_MAX: usize = 100;
const NOTE_BYTES_MAX: usize = 1_000;

pub(super) struct Check<'a> {
    pub tuned: &'a Tuned,
    pub identity: &'a Identity,
}

impl Check<'_> {
    fn invalid(&self, what: impl Into<String>, expected: impl Into<String>) -> Error {
        Error::new("plugin::invalid_export", format!("{}: plan: {}", self.identity, what.into()))
            .expected(expected)
            .help("this is a bug in the plugin: use another exporter, or tell its author")
    }

    pub fn plan(&self, answer: exporting::ExportPlan) -> Result<ExportPlan> {
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
        self.notes(&answer.notes)?;
        let constants = self.constants(&answer)?;
        let tensors: Vec<PlannedTensor> = (0..count).map(|at| self.tensor(&answer, at)).collect::<Result<_>>()?;
        let quantized: Vec<QuantizedModule> =
            answer.quantized.iter().map(|module| self.quantized(module)).collect::<Result<_>>()?;
        self.disjoint(&quantized)?;
        self.coverage(&tensors, &quantized)?;
        self.repeats(&tensors)?;
        let tensor_files = self.cut(&answer, tensors, quantized)?;
        self.gguf(&tensor_files, &answer)?;
        let gguf_metadata = answer.gguf_metadata.into_iter().map(metadata).collect();
        let texts = answer.text_files.into_iter().zip(answer.texts).collect();
        let (copied_files, notes) = (answer.copied_files, answer.notes);
        Ok(ExportPlan { tensor_files, constants, gguf_metadata, texts, copied_files, notes })
    }

    fn notes(&self, notes: &[String]) -> Result<()> {
        let long = notes.iter().find(|note| note.len() > NOTE_BYTES_MAX || shown(note) != **note);
        match (notes.len() > NOTES_MAX, long) {
            (false, None) => Ok(()),
            (true, _) => Err(self.invalid(format!("there are {} notes", notes.len()), format!("at most {NOTES_MAX}"))),
            (_, Some(note)) => {
                let what = format!("the note {:?} is too long or not plain", shown(note));
                Err(self.invalid(what, format!("a line of text of at most {NOTE_BYTES_MAX} bytes")))
            }
        }
    }

    fn constants(&self, answer: &exporting::ExportPlan) -> Result<Vec<Vec<f32>>> {
        let (mut constants, mut start) = (Vec::new(), 0);
        for &end in &answer.constant_ends {
            let Some(values) = answer.constants.get(start..end as usize) else {
                let what = format!("constant {} ends at {end}", constants.len());
                return Err(self.invalid(what, format!("from {start} to {}, rising", answer.constants.len())));
            };
            constants.push(values.to_vec());
            start = end as usize;
        }
        match start == answer.constants.len() {
            true => Ok(constants),
            false => Err(self.invalid("constants has values that no constant ends after", "each in a constant")),
        }
    }

    /// A GGUF file has types of ggml in whole blocks, a safetensors file has none of its blocks.
    fn gguf(&self, files: &[TensorFile], answer: &exporting::ExportPlan) -> Result<()> {
        let count = files.iter().filter(|file| file.is_gguf()).count();
        let mut seen = BTreeSet::new();
        if let Some(twice) = answer.gguf_metadata.iter().find(|entry| !seen.insert(&entry.key)) {
            return Err(self.invalid(format!("the metadata has {:?} twice", shown(&twice.key)), "each key once"));
        }
        if count > 1 || (count == 0 && !answer.gguf_metadata.is_empty()) {
            let what = format!("there are {count} GGUF files and {} entries for one", answer.gguf_metadata.len());
            return Err(self.invalid(what, "one GGUF file and its metadata, or neither"));
        }
        for file in files {
            if file.is_gguf() && !file.quantized.is_empty() {
                return Err(self.invalid(format!("{} holds quantised modules", file.name), "them in safetensors files"));
            }
            for tensor in &file.tensors {
                let (stored, width) = self.stored(tensor);
                let fits = match file.is_gguf() {
                    true => stored.ggml_id().is_some() && width.is_multiple_of(stored.block_values()),
                    false => matches!(stored, Stored::Plain(_)),
                };
                if !fits {
                    let what = format!("tensor {} of {} has rows of {width}", tensor.name, file.name);
                    let expected = "a float, or in a GGUF file a type whose blocks divide a row";
                    return Err(self.invalid(format!("{what} and is to be stored as {}", stored.name()), expected));
                }
            }
        }
        Ok(())
    }

    /// What a tensor is stored as, and the values of its rows.
    fn stored(&self, tensor: &PlannedTensor) -> (Stored, usize) {
        let (own, width) = match tensor.source {
            Source::Base(index) | Source::Merged(index, _) => {
                let base = &self.tuned.base_tensors[index];
                (dtype(&base.dtype), base.shape.last().map_or(1, |width| *width as usize))
            }
            // Of no block type, since the rank divides by nothing in particular.
            Source::A(_) | Source::B(_) | Source::Constant(_) => (Dtype::F32, 1),
        };
        (tensor.stored.unwrap_or(Stored::Plain(own)), width)
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
        let unknown = |name: &&String| ![".safetensors", GGUF].iter().any(|end| name.ends_with(end));
        match answer.tensor_files.iter().find(unknown) {
            None => Ok(()),
            Some(name) => {
                Err(self.invalid(format!("{name:?} is to hold tensors"), "a name that ends in .safetensors or .gguf"))
            }
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
            exporting::Source::Constant => ("constant", answer.constant_ends.len()),
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
            exporting::Source::Constant => Source::Constant(index),
        };
        Ok(PlannedTensor { name, source, stored: stored(answer.dtypes[at]) })
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
        let mut written: BTreeMap<(u8, usize), u32> = BTreeMap::new();
        for tensor in tensors {
            let key = match tensor.source {
                Source::Base(index) | Source::Merged(index, _) => (0, index),
                Source::A(index) => (1, index),
                Source::B(index) => (2, index),
                Source::Constant(index) => (3, index),
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
                Source::Merged(..) | Source::Base(_) | Source::Constant(_) => {}
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

fn stored(dtype: exporting::Dtype) -> Option<Stored> {
    Some(match dtype {
        exporting::Dtype::Unchanged => return None,
        exporting::Dtype::Float32 => Stored::Plain(Dtype::F32),
        exporting::Dtype::Bfloat16 => Stored::Plain(Dtype::BF16),
        exporting::Dtype::Float16 => Stored::Plain(Dtype::F16),
        exporting::Dtype::Q80 => Stored::Blocks(Block::Q8_0),
        exporting::Dtype::Q50 => Stored::Blocks(Block::Q5_0),
        exporting::Dtype::Q51 => Stored::Blocks(Block::Q5_1),
        exporting::Dtype::Q4K => Stored::Blocks(Block::Q4K),
        exporting::Dtype::Q5K => Stored::Blocks(Block::Q5K),
        exporting::Dtype::Q6K => Stored::Blocks(Block::Q6K),
    })
}

/// A base's dtype as safetensors spells it. What is no float has no place in a GGUF file, whichever it is.
fn dtype(name: &str) -> Dtype {
    [Dtype::F32, Dtype::BF16, Dtype::F16].into_iter().find(|dtype| format!("{dtype:?}") == name).unwrap_or(Dtype::U8)
}

fn metadata(entry: exporting::GgufEntry) -> (String, gguf::Value) {
    let value = match entry.value {
        exporting::GgufValue::Text(text) => gguf::Value::Text(text),
        exporting::GgufValue::Count(n) => gguf::Value::U32(n),
        exporting::GgufValue::Real(x) => gguf::Value::F32(x),
        exporting::GgufValue::Truth(flag) => gguf::Value::Flag(flag),
        exporting::GgufValue::Counts(all) => gguf::Value::U32s(all),
        exporting::GgufValue::Truths(all) => gguf::Value::Flags(all),
    };
    (entry.key, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::{Kind, PluginRef};

    #[test]
    fn a_tensor_is_written_twice_at_most() {
        let plugin = PluginRef::resolve(Kind::Exporter, "peft-adapter", &[]).unwrap();
        let tuned = Tuned::default();
        let check = Check { tuned: &tuned, identity: plugin.identity() };
        let tensors = |times: usize, source: Source| -> Vec<PlannedTensor> {
            (0..times).map(|at| PlannedTensor { name: format!("t{at}"), source, stored: None }).collect()
        };
        for source in [Source::Base(3), Source::Merged(3, 1.0), Source::A(0), Source::B(7), Source::Constant(1)] {
            assert!(check.repeats(&tensors(2, source)).is_ok());
            let error = check.repeats(&tensors(3, source)).unwrap_err();
            assert_eq!(error.code(), "plugin::invalid_export");
            assert!(error.message().contains("what tensor t2 is made of is written 3 times"), "{error}");
        }
        let both = [tensors(2, Source::A(0)), tensors(2, Source::B(0)), tensors(2, Source::A(1))].concat();
        assert!(check.repeats(&both).is_ok());
    }

    #[test]
    fn what_a_gguf_file_and_notes_may_hold() {
        let plugin = PluginRef::resolve(Kind::Exporter, "peft-adapter", &[]).unwrap();
        let tuned = crate::plugins::check::inputs::tuned(1, 1);
        let plan = |spoil: &dyn Fn(&mut exporting::ExportPlan)| {
            let entry = |key: &str| exporting::GgufEntry { key: key.into(), value: exporting::GgufValue::Truth(true) };
            // Rows of 32 values, and a constant of two.
            let mut answer = exporting::ExportPlan {
                names: vec!["w".into(), "c".into()],
                sources: vec![exporting::Source::Merged, exporting::Source::Constant],
                indices: vec![0, 0],
                dtypes: vec![exporting::Dtype::Q80, exporting::Dtype::Unchanged],
                strengths: vec![1.0; 2],
                constants: vec![1.0, 2.0],
                constant_ends: vec![2],
                tensor_files: vec!["model.gguf".into()],
                tensor_file_ends: vec![2],
                gguf_metadata: vec![entry("a"), entry("b")],
                quantized: vec![],
                text_files: vec![],
                texts: vec![],
                copied_files: vec![],
                notes: vec!["said".into()],
            };
            spoil(&mut answer);
            Check { tuned: &tuned, identity: plugin.identity() }.plan(answer)
        };
        let whole = plan(&|_| {}).unwrap();
        assert_eq!((&whole.constants, whole.gguf_metadata.len()), (&vec![vec![1.0, 2.0]], 2));
        let refused = |part: &str, spoil: &dyn Fn(&mut exporting::ExportPlan)| {
            let error = plan(spoil).expect_err(part);
            assert_eq!(error.code(), "plugin::invalid_export");
            assert!(error.message().contains(part), "{error}");
        };
        refused("is to be stored as Q4_K", &|plan| plan.dtypes[0] = exporting::Dtype::Q4K);
        refused("is to be stored as Q8_0", &|plan| {
            plan.tensor_files[0] = "model.safetensors".into();
            plan.gguf_metadata.clear();
        });
        refused("0 GGUF files and 2 entries", &|plan| plan.tensor_files[0] = "model.safetensors".into());
        refused("the metadata has \"a\" twice", &|plan| plan.gguf_metadata[1].key = "a".into());
        refused("constant 0 ends at 3", &|plan| plan.constant_ends[0] = 3);
        refused("values that no constant ends after", &|plan| plan.constant_ends[0] = 1);
        refused("made of constant 1", &|plan| plan.indices[1] = 1);
        refused("there are 101 notes", &|plan| plan.notes = vec![String::new(); 101]);
        refused("is too long", &|plan| plan.notes[0] = "x".repeat(1001));
    }
}
