//! A Hugging Face checkpoint on disk: one `model.safetensors` or shards with an index, memory-mapped, nothing copied.

use super::ggml::{Block, Stored};
use super::gguf;
use super::quantized::{self, Format, QuantizedTensor};
use crate::error::{Error, Result};
use crate::mapped::release_pages;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Bytes of a file that are converted at once; a multiple of every element's size.
const READ_BYTES: usize = 8 << 20;

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Element type as stored; bytes where it is stored in blocks.
    pub dtype: Dtype,
    /// The blocks that a GGUF file stores it in; none where elements are stored one by one.
    pub blocks: Option<Block>,
    /// Shape as stored.
    pub shape: Vec<usize>,
    start: usize,
    end: usize,
}

impl TensorEntry {
    /// Bytes on disk.
    pub fn size_bytes(&self) -> usize {
        self.end - self.start
    }
}

/// An open checkpoint: the headers are read, the values stay in the mapped files.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    entries: BTreeMap<String, TensorEntry>,
    format: Option<Format>,
    quantized: BTreeMap<String, QuantizedTensor>,
}

impl Checkpoint {
    /// Opens `dir/model.safetensors`, or the shards that `dir/model.safetensors.index.json` lists, or the one GGUF file.
    ///
    /// # Errors
    /// `model::not_found`, `model::bad_index`, `model::bad_safetensors`, `model::bad_gguf`, `model::quantization`, each naming
    /// the file or module.
    pub fn open(dir: &Path) -> Result<Self> {
        let index = dir.join("model.safetensors.index.json");
        let single = dir.join("model.safetensors");
        let mut checkpoint = Self {
            dir: dir.into(),
            files: Vec::new(),
            entries: BTreeMap::new(),
            format: quantized::format(dir)?,
            quantized: BTreeMap::new(),
        };
        if index.exists() {
            let weight_map = read_index(&index)?;
            let mut shards: Vec<&String> = weight_map.values().collect();
            shards.sort();
            shards.dedup();
            for shard in shards {
                checkpoint.add_file(&dir.join(shard))?;
            }
            checkpoint.check_index(&index, &weight_map)?;
        } else if single.exists() {
            checkpoint.add_file(&single)?;
        } else if let Some(file) = the_gguf_file(dir) {
            checkpoint.add_gguf(&file)?;
        } else {
            return Err(Error::new("model::not_found", format!("{} holds no model weights", dir.display()))
                .expected("model.safetensors, or model.safetensors.index.json with its shards, or one .gguf file")
                .help("set `model.base` to a folder in Hugging Face layout"));
        }
        if let Some(format) = checkpoint.format {
            let read = |name: &str| checkpoint.bytes(name).unwrap_or_default().to_vec();
            checkpoint.quantized = quantized::assemble(format, &checkpoint.entries, &read)?;
        }
        Ok(checkpoint)
    }

    /// The tensors of a GGUF file under Hugging Face's names.
    fn add_gguf(&mut self, path: &Path) -> Result<()> {
        let map = map(path)?;
        let broken = |what: String| {
            Error::new("model::bad_gguf", format!("{}: {what}", path.display()))
                .expected("a whole GGUF file with weights in F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K")
                .help("the file may be cut short: compare its size with the original and copy it again")
        };
        for listed in gguf::read(&map).map_err(broken)? {
            let Some(name) = gguf::hugging_face(&listed.name) else { continue };
            let (dtype, blocks) = match listed.stored {
                Stored::Plain(dtype) => (dtype, None),
                Stored::Blocks(block) => (Dtype::U8, Some(block)),
            };
            let (start, end) = (listed.bytes.start, listed.bytes.end);
            let entry = TensorEntry { file: self.files.len(), dtype, blocks, shape: listed.shape, start, end };
            if self.entries.insert(name, entry).is_some() {
                return Err(broken(format!("tensor {} stands in it twice", listed.name)));
            }
        }
        self.files.push((path.into(), map));
        Ok(())
    }

    /// [`Checkpoint::open`] for a base to be tuned.
    ///
    /// # Errors
    /// As there, and `model::quantization` for a quantised one.
    pub fn open_trainable(dir: &Path) -> Result<Self> {
        let checkpoint = Self::open(dir)?;
        match checkpoint.quantized_as() {
            None => Ok(checkpoint),
            Some(format) => {
                Err(Error::new("model::quantization", format!("{} is quantised as {format}", dir.display()))
                    .expected("a base in BF16, F16 or F32")
                    .help("tune the checkpoint that it was made from, and quantise the tuned model: `tunehost export`"))
            }
        }
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let map = map(path)?;
        let broken = |e: safetensors::SafeTensorError| {
            Error::new("model::bad_safetensors", format!("{}: {e}", path.display()))
                .expected("a whole safetensors file")
                .help("the file may be cut short: compare its size with the original and copy it again")
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(broken)?;
        // read_metadata alone accepts a file whose data is cut off; deserialize checks the length against the header.
        SafeTensors::deserialize(&map).map_err(broken)?;
        let data_start = header + 8;
        let index = self.files.len();
        for (name, info) in metadata.tensors() {
            let entry = TensorEntry {
                file: index,
                dtype: info.dtype,
                blocks: None,
                shape: info.shape.clone(),
                start: data_start + info.data_offsets.0,
                end: data_start + info.data_offsets.1,
            };
            if let Some(other) = self.entries.insert(name.clone(), entry) {
                return Err(Error::new(
                    "model::duplicate_tensor",
                    format!("tensor {name} stands in {} and in {}", self.files[other.file].0.display(), path.display()),
                ));
            }
        }
        self.files.push((path.into(), map));
        Ok(())
    }

    fn check_index(&self, index: &Path, weight_map: &BTreeMap<String, String>) -> Result<()> {
        for (name, shard) in weight_map {
            let found = self.entries.get(name).is_some_and(|e| self.files[e.file].0 == self.dir.join(shard));
            if !found {
                return Err(Error::new(
                    "model::bad_index",
                    format!("{} says tensor {name} is in {shard}, and it is not", index.display()),
                ));
            }
        }
        match self.entries.keys().find(|name| !weight_map.contains_key(*name)) {
            Some(name) => Err(Error::new(
                "model::bad_index",
                format!("{} does not list tensor {name} of {}", index.display(), self.file_of(name).display()),
            )),
            None => Ok(()),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The weight files, sorted by name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// How the linear modules are quantised; none where they are not, or the file is a GGUF file.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// What the checkpoint is quantised as, for messages; none where it can be tuned and merged into.
    pub fn quantized_as(&self) -> Option<&'static str> {
        let gguf = || self.entries.values().any(|entry| entry.blocks.is_some()).then_some("GGUF");
        self.format.map(Format::name).or_else(gguf)
    }

    /// Every stored tensor by name.
    pub fn entries(&self) -> &BTreeMap<String, TensorEntry> {
        &self.entries
    }

    /// Shape and file of every tensor, as [`super::spec::ModelSpec::check`] takes them; a quantised one as what it stands for.
    pub fn shapes(&self) -> BTreeMap<String, (Vec<usize>, String)> {
        let file = |name: &str| self.file_of(name).display().to_string();
        let stored = self
            .entries
            .iter()
            .filter(|(name, _)| self.format.is_none_or(|format| !quantized::is_part(name, &self.quantized, format)));
        let stored = stored.map(|(name, entry)| (name.clone(), (entry.shape.clone(), file(name))));
        let first_part = |tensor: &QuantizedTensor| tensor.parts().next().unwrap_or_default();
        let quantized = self.quantized.iter();
        stored.chain(quantized.map(|(name, t)| (name.clone(), (t.shape.clone(), file(&first_part(t)))))).collect()
    }

    /// Bytes on disk of a tensor, of a quantised one with its scales; 0 where there is none.
    pub fn size_bytes(&self, name: &str) -> usize {
        let stored = |name: &str| self.entries.get(name).map_or(0, TensorEntry::size_bytes);
        match self.quantized.get(name) {
            Some(tensor) => tensor.parts().map(|part| stored(&part)).sum(),
            None => stored(name),
        }
    }

    /// The file that holds `name`; the folder when there is no such tensor.
    pub fn file_of(&self, name: &str) -> &Path {
        self.entries.get(name).map_or(&self.dir, |e| &self.files[e.file].0)
    }

    /// The stored bytes of a tensor.
    ///
    /// # Errors
    /// `model::missing_tensor`.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let entry = self.entry(name)?;
        Ok(&self.files[entry.file].1[entry.start..entry.end])
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        self.entries
            .get(name)
            .ok_or_else(|| Error::new("model::missing_tensor", format!("{} has no tensor {name}", self.dir.display())))
    }

    /// A tensor's values as f32, whatever of bf16, f16, f32 and the quantised formats they are stored as. The mapped pages are
    /// given back piece by piece, so that host memory holds the values and one piece, not the stored tensor too.
    ///
    /// # Errors
    /// `model::missing_tensor`, `model::unsupported_dtype`.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.elements(name)?);
        self.read_pieces(name, |piece| values.extend_from_slice(&piece))?;
        Ok(values)
    }

    /// As [`Checkpoint::read_f32`], rounded to bf16, to nearest even.
    pub fn read_bf16(&self, name: &str) -> Result<Vec<bf16>> {
        let mut values = Vec::with_capacity(self.elements(name)?);
        self.read_pieces(name, |piece| values.extend(piece.into_iter().map(bf16::from_f32)))?;
        Ok(values)
    }

    fn elements(&self, name: &str) -> Result<usize> {
        match self.quantized.get(name) {
            Some(tensor) => Ok(tensor.shape.iter().product()),
            None => Ok(self.entry(name)?.shape.iter().product()),
        }
    }

    /// Gives `each` a tensor's values piece by piece, as [`Checkpoint::read_f32`] reads them.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_f32`].
    pub fn read_pieces(&self, name: &str, mut each: impl FnMut(Vec<f32>)) -> Result<()> {
        if let Some(tensor) = self.quantized.get(name) {
            tensor.modules(&|part| self.take(part), each);
            return Ok(());
        }
        let entry = self.entry(name)?;
        let bytes = self.bytes(name)?;
        let size = entry.blocks.map_or(READ_BYTES, |block| READ_BYTES / block.bytes() * block.bytes());
        for (piece, start) in bytes.chunks(size).zip((0..).step_by(size)) {
            let values = match entry.blocks {
                Some(block) => Some(block.decode(piece)),
                None => to_f32(piece, entry.dtype),
            };
            each(values.ok_or_else(|| {
                Error::new(
                    "model::unsupported_dtype",
                    format!("tensor {name} in {} is stored as {:?}", self.file_of(name).display(), entry.dtype),
                )
                .expected("BF16, F16 or F32")
            })?);
            release_pages(&self.files[entry.file].1, entry.start + start, piece.len());
        }
        Ok(())
    }

    /// The bytes of a stored tensor, whose pages are given back; none where there is none.
    fn take(&self, name: &str) -> Vec<u8> {
        let Some(entry) = self.entries.get(name) else { return Vec::new() };
        let bytes = self.files[entry.file].1[entry.start..entry.end].to_vec();
        self.release(name);
        bytes
    }

    /// Gives the mapped pages of a stored tensor back, once it was read.
    pub fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            release_pages(&self.files[entry.file].1, entry.start, entry.size_bytes());
        }
    }
}

/// The GGUF file in `dir`; none where there are none or several.
fn the_gguf_file(dir: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files = files.filter(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.next().filter(|_| files.next().is_none())
}

fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    // SAFETY: the mapping is read-only and private to this process; a file that another process shortens while it is
    // mapped would end in a signal, not in silently wrong numbers, and provenance records its hash.
    #[allow(unsafe_code)]
    unsafe { Mmap::map(&file) }.map_err(|e| Error::io("map", path, e))
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| {
        Error::new("model::bad_index", format!("{}: {e}", path.display())).expected("{\"weight_map\": {tensor: file}}")
    })?;
    let bad = |what: String| Error::new("model::bad_index", format!("{} {what}", path.display()));
    if let Some(shard) = index.weight_map.values().find(|shard| shard.contains(['/', '\\'])) {
        return Err(bad(format!("names the shard {shard}, outside its own folder")));
    }
    let Some((tensor, shard)) = index.weight_map.iter().find(|(_, shard)| !path.with_file_name(shard).exists()) else {
        return match index.weight_map.is_empty() {
            true => Err(bad("names no tensor".into()).expected("{\"weight_map\": {tensor: file}}")),
            false => Ok(index.weight_map),
        };
    };
    let count = index.weight_map.values().filter(|of| *of == shard).count();
    Err(bad(format!("names {shard} for {count} tensors, {tensor} among them, and it is not there"))
        .expected("every shard beside its index")
        .help("copy the missing file: a download may have been cut short"))
}

/// Little-endian bytes of `dtype` as f32; `None` for a dtype that is not BF16, F16 or F32.
pub fn to_f32(bytes: &[u8], dtype: Dtype) -> Option<Vec<f32>> {
    const PIECE: usize = 1 << 16;
    fn convert<const W: usize>(bytes: &[u8], f: impl Fn([u8; W]) -> f32 + Sync) -> Vec<f32> {
        let mut out = vec![0.0; bytes.len() / W];
        out.par_chunks_mut(PIECE).zip(bytes.par_chunks(PIECE * W)).for_each(|(out, bytes)| {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<W>().0) {
                *o = f(*b);
            }
        });
        out
    }
    Some(match dtype {
        Dtype::F32 => convert(bytes, f32::from_le_bytes),
        Dtype::BF16 => convert(bytes, |b| bf16::from_le_bytes(b).to_f32()),
        Dtype::F16 => convert(bytes, |b| f16::from_le_bytes(b).to_f32()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
        let views: Vec<_> = tensors
            .iter()
            .map(|(n, d, s, b)| (n.to_string(), safetensors::tensor::TensorView::new(*d, s.clone(), b).unwrap()))
            .collect();
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn f32_bytes(v: &[f32]) -> Vec<u8> {
        v.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn reads_every_dtype() {
        let dir = tempfile::tempdir().unwrap();
        let bf: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        let hf: Vec<u8> = [0.25f32].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        write(
            &dir.path().join("model.safetensors"),
            &[
                ("a", Dtype::BF16, vec![2], bf),
                ("b", Dtype::F16, vec![1], hf),
                ("c", Dtype::F32, vec![1], f32_bytes(&[3.0])),
                ("d", Dtype::I32, vec![1], vec![0; 4]),
            ],
        );
        let ck = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(ck.read_f32("a").unwrap(), [1.5, -2.0]);
        assert_eq!(ck.read_f32("b").unwrap(), [0.25]);
        assert_eq!(ck.read_f32("c").unwrap(), [3.0]);
        assert_eq!(ck.read_f32("d").unwrap_err().code(), "model::unsupported_dtype");
        // Read again after its pages were given back.
        assert_eq!(ck.read_f32("a").unwrap(), [1.5, -2.0]);
        assert_eq!(ck.read_f32("e").unwrap_err().code(), "model::missing_tensor");
    }

    #[test]
    fn reads_shards_and_checks_the_index() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("one.safetensors"), &[("a", Dtype::F32, vec![1], f32_bytes(&[1.0]))]);
        write(&dir.path().join("two.safetensors"), &[("b", Dtype::F32, vec![1], f32_bytes(&[2.0]))]);
        let index = dir.path().join("model.safetensors.index.json");
        std::fs::write(&index, r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#).unwrap();
        let ck = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(ck.read_f32("b").unwrap(), [2.0]);
        assert_eq!(ck.files().count(), 2);
        for (text, says) in [
            (r#"{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}"#, "tensor b is in one.safetensors"),
            (r#"{"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}"#, "tensor c"),
            (r#"{"weight_map": {"a": "one.safetensors", "x": "../one.safetensors"}}"#, "outside its own folder"),
            (r#"{}"#, "weight_map"),
        ] {
            std::fs::write(&index, text).unwrap();
            let e = Checkpoint::open(dir.path()).unwrap_err();
            assert_eq!(e.code(), "model::bad_index");
            assert!(e.message().contains(says), "{e}");
        }
    }

    #[test]
    fn a_file_cut_short_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        write(&path, &[("a", Dtype::F32, vec![64], f32_bytes(&[1.0; 64]))]);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        assert_eq!(Checkpoint::open(dir.path()).unwrap_err().code(), "model::bad_safetensors");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Checkpoint::open(dir.path()).unwrap_err().code(), "model::not_found");
    }

    #[test]
    fn one_gguf_file_is_read_under_the_names_of_training() {
        let dir = tempfile::tempdir().unwrap();
        let scale = half::f16::from_f32(0.5).to_le_bytes();
        let tensors = [
            ("blk.0.attn_q.weight".to_string(), vec![1, 32], Stored::Blocks(Block::Q8_0)),
            ("rope_freqs.weight".into(), vec![1], Stored::Plain(Dtype::F32)),
        ];
        let mut file = gguf::head(&[], &tensors);
        file.extend([&scale[..], &[2; 32], &[0; 30], &f32_bytes(&[1.0])[..]].concat());
        std::fs::write(dir.path().join("model.gguf"), &file).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let name = "model.layers.0.self_attn.q_proj.weight";
        assert!(checkpoint.entries().keys().eq([name]));
        assert_eq!(checkpoint.read_f32(name).unwrap(), [1.0; 32]);
        assert_eq!((checkpoint.shapes()[name].0.as_slice(), checkpoint.quantized_as()), (&[1, 32][..], Some("GGUF")));
        std::fs::write(dir.path().join("model.gguf"), &file[..file.len() - 5]).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert_eq!(error.code(), "model::bad_gguf");
        assert!(error.message().contains("model.gguf: tensor rope_freqs.weight ends after"), "{error}");
        // Which of two is meant is not guessed.
        std::fs::write(dir.path().join("other.gguf"), &file).unwrap();
        assert_eq!(Checkpoint::open(dir.path()).unwrap_err().code(), "model::not_found");
    }
}
