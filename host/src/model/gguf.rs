//! GGUF files: their head, written and read. Integers are little-endian; strings and arrays have their length before them.

use super::ggml::Stored;
use std::ops::Range;

#[path = "../../../plugins/gguf/src/names.rs"]
mod names;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// What tensors, and the first of them, are aligned to.
pub const ALIGNMENT: usize = 32;
/// Most dimensions that ggml knows.
const DIMENSIONS_MAX: u32 = 4;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    U32(u32),
    /// A real number.
    F32(f32),
    /// True or false.
    Flag(bool),
    /// A text.
    Text(String),
    /// Several unsigned integers.
    U32s(Vec<u32>),
    /// Several integers.
    I32s(Vec<i32>),
    /// Several real numbers.
    F32s(Vec<f32>),
    /// Several of true and false.
    Flags(Vec<bool>),
    /// Several texts.
    Texts(Vec<String>),
}

/// Numbers of the types in a file.
mod kind {
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const FLAG: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const ARRAY: u32 = 9;
}

/// A tensor as a file lists it.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its shape, rows first.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub stored: Stored,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

/// Everything before the first tensor, for tensors of these names, shapes and types that follow one another, each aligned.
pub fn head(metadata: &[(String, Value)], tensors: &[(String, Vec<usize>, Stored)]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(&mut out, key);
        self::value(&mut out, value);
    }
    let mut offset = 0u64;
    for (name, shape, stored) in tensors {
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
        out.extend(stored.ggml_id().expect("only what ggml knows is written").to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += stored.size_bytes(shape).next_multiple_of(ALIGNMENT) as u64;
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn value(out: &mut Vec<u8>, value: &Value) {
    fn array<T>(out: &mut Vec<u8>, kind: u32, values: &[T], mut each: impl FnMut(&mut Vec<u8>, &T)) {
        out.extend([kind::ARRAY, kind].iter().flat_map(|n| n.to_le_bytes()));
        out.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| each(out, value));
    }
    let mut one = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U32(n) => one(kind::U32, &n.to_le_bytes()),
        Value::F32(x) => one(kind::F32, &x.to_le_bytes()),
        Value::Flag(flag) => one(kind::FLAG, &[u8::from(*flag)]),
        Value::Text(of) => {
            one(kind::TEXT, &[]);
            text(out, of);
        }
        Value::U32s(all) => array(out, kind::U32, all, |out, n| out.extend(n.to_le_bytes())),
        Value::I32s(all) => array(out, kind::I32, all, |out, n| out.extend(n.to_le_bytes())),
        Value::F32s(all) => array(out, kind::F32, all, |out, x| out.extend(x.to_le_bytes())),
        Value::Flags(all) => array(out, kind::FLAG, all, |out, flag| out.push(u8::from(*flag))),
        Value::Texts(all) => array(out, kind::TEXT, all, |out, of| text(out, of)),
    }
}

/// The tensors of a file, or what is wrong with it.
pub fn read(file: &[u8]) -> Result<Vec<Listed>, String> {
    let mut reader = Reader { file, at: 0 };
    if reader.take(4)? != MAGIC {
        return Err("it does not begin with GGUF".into());
    }
    let version = reader.u32()?;
    if !(2..=VERSION).contains(&version) {
        return Err(format!("it has the version {version}, and 2 and 3 are known"));
    }
    let (tensors, entries) = (reader.u64()?, reader.u64()?);
    let mut alignment = ALIGNMENT;
    for _ in 0..entries {
        let key = reader.text()?;
        let kind = reader.u32()?;
        if key == "general.alignment" && kind == kind::U32 {
            alignment = reader.u32()? as usize;
        } else {
            reader.skip(kind)?;
        }
    }
    if alignment == 0 || !alignment.is_power_of_two() {
        return Err(format!("its alignment is {alignment}"));
    }
    let mut listed = Vec::new();
    for _ in 0..tensors {
        let name = reader.text()?;
        let dimensions = reader.u32()?;
        if dimensions > DIMENSIONS_MAX {
            return Err(format!("tensor {name} has {dimensions} dimensions"));
        }
        let mut shape = (0..dimensions).map(|_| reader.u64()).collect::<Result<Vec<u64>, _>>()?;
        shape.reverse();
        let (id, offset) = (reader.u32()?, reader.u64()?);
        let stored =
            Stored::from_ggml_id(id).ok_or_else(|| format!("tensor {name} has the type {id}, which is not read"))?;
        let elements =
            shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n)).filter(|n| *n <= file.len() as u64 * 8);
        let row = shape.last().copied().unwrap_or(1);
        if elements.is_none() || !row.is_multiple_of(stored.block_values() as u64) {
            return Err(format!("tensor {name} has the shape {shape:?}, stored as {}", stored.name()));
        }
        let shape: Vec<usize> = shape.into_iter().map(|n| n as usize).collect();
        listed.push((name, shape, stored, offset));
    }
    let start = reader.at.next_multiple_of(alignment);
    let place = |(name, shape, stored, offset): (String, Vec<usize>, Stored, u64)| {
        let from = usize::try_from(offset).ok().and_then(|offset| start.checked_add(offset));
        let end = from.and_then(|from| from.checked_add(stored.size_bytes(&shape))).filter(|end| *end <= file.len());
        match (from, end) {
            (Some(from), Some(end)) => Ok(Listed { name, shape, stored, bytes: from..end }),
            _ => Err(format!("tensor {name} ends after the file's {} bytes", file.len())),
        }
    };
    listed.into_iter().map(place).collect()
}

struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let end = usize::try_from(count).ok().and_then(|count| self.at.checked_add(count));
        let bytes = end.and_then(|end| self.file.get(self.at..end)).ok_or("its head is cut short")?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(*self.take(4)?.first_chunk().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(*self.take(8)?.first_chunk().expect("eight bytes")))
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        String::from_utf8(bytes.into()).map_err(|_| "a name in it is not UTF-8".into())
    }

    fn skip(&mut self, kind: u32) -> Result<(), String> {
        if kind != kind::ARRAY {
            return self.skip_many(kind, 1);
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        self.skip_many(kind, count)
    }

    fn skip_many(&mut self, kind: u32, count: u64) -> Result<(), String> {
        let width = match kind {
            0 | 1 | kind::FLAG => 1,
            2 | 3 => 2,
            kind::U32 | kind::I32 | kind::F32 => 4,
            10..=12 => 8,
            kind::TEXT => {
                for _ in 0..count {
                    let length = self.u64()?;
                    self.take(length)?;
                }
                return Ok(());
            }
            _ => return Err(format!("its metadata has a value of type {kind}, which is not known")),
        };
        self.take(count.saturating_mul(width)).map(drop)
    }
}

/// Hugging Face's name of the tensor that llama.cpp calls `name`; none for the rotary factors, which `config.json` says too. A
/// name that is not known stays, for others to refuse.
pub fn hugging_face(name: &str) -> Option<String> {
    if name == names::ROPE_FACTORS {
        return None;
    }
    let in_table = |table: &[(&str, &str)], part: &str| {
        table.iter().find(|(_, theirs)| *theirs == part).map(|(ours, _)| ours.to_string())
    };
    let known = match name.strip_prefix("blk.").and_then(|layer| layer.split_once('.')) {
        Some((layer, part)) => in_table(&names::LAYER, part).map(|part| format!("model.layers.{layer}.{part}")),
        None => {
            in_table(&names::TOP, name).map(|top| if top == "lm_head.weight" { top } else { format!("model.{top}") })
        }
    };
    Some(known.unwrap_or_else(|| name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ggml::Block;
    use safetensors::Dtype;

    fn file() -> Vec<u8> {
        let metadata = [
            ("general.architecture", Value::Text("gemma4".into())),
            ("a.flag", Value::Flag(true)),
            ("a.count", Value::U32(7)),
            ("a.real", Value::F32(0.5)),
            ("tokens", Value::Texts(vec!["a".into(), "▁b".into()])),
            ("scores", Value::F32s(vec![1.0, 2.0])),
            ("types", Value::I32s(vec![1, -1])),
            ("heads", Value::U32s(vec![4, 2])),
            ("sliding", Value::Flags(vec![true, false])),
        ];
        let tensors = [
            ("output_norm.weight".to_string(), vec![5], Stored::Plain(Dtype::F32)),
            ("blk.3.ffn_down.weight".into(), vec![3, 64], Stored::Blocks(Block::Q8_0)),
        ];
        let mut file = head(&metadata.map(|(key, value)| (key.to_string(), value)), &tensors);
        file.resize(file.len() + 32 + 3 * 2 * 34, 1);
        file
    }

    #[test]
    fn what_is_written_is_read() {
        let read = read(&file()).unwrap();
        let shapes: Vec<(&str, &[usize], usize)> =
            read.iter().map(|t| (t.name.as_str(), t.shape.as_slice(), t.bytes.len())).collect();
        assert_eq!(shapes, [("output_norm.weight", &[5][..], 20), ("blk.3.ffn_down.weight", &[3, 64], 204)]);
        assert!(read.iter().all(|t| t.bytes.start.is_multiple_of(ALIGNMENT)));
        assert_eq!(hugging_face(&read[1].name).unwrap(), "model.layers.3.mlp.down_proj.weight");
        assert_eq!(hugging_face("output.weight").unwrap(), "lm_head.weight");
        assert_eq!(hugging_face("rope_freqs.weight"), None);
        assert_eq!(hugging_face("blk.0.what.weight").unwrap(), "blk.0.what.weight");
    }

    #[test]
    fn a_file_that_is_cut_short_or_spoilt_is_refused() {
        let whole = file();
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "cut to {length}");
        }
        for at in 0..whole.len() - 236 {
            let mut spoilt = whole.clone();
            spoilt[at] ^= 0xff;
            // Whatever is made of it lies within the file.
            if let Ok(tensors) = read(&spoilt) {
                assert!(tensors.iter().all(|t| t.bytes.end <= spoilt.len()), "spoilt at {at}");
            }
        }
    }
}
