//! One file's records, encoded on all cores, chunk by chunk.

use super::cache::CachedEncoder;
use super::duplicates::Sketch;
use super::encode::Record;
use super::reader::{self, Columns, RawRecord, Shape};
use super::{FileInfo, split};
use crate::config::SplitBy;
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::Path;

/// A line that is a record, and the record at full length or why there is none.
pub type Encoded = (Line, Result<Record>);

/// What a line says of its record.
pub struct Line {
    /// Its id; so far unique in its file alone.
    pub id: String,
    /// Whether the id is the record's own.
    pub named: bool,
    /// Number of the line, from 1.
    pub line: u64,
    /// The line without its end: the record's JSON object.
    pub json: String,
    /// What the held-out split goes by.
    pub key: u64,
    /// What it is compared with other records by.
    pub sketch: Sketch,
    /// What it was taken for.
    pub shape: Shape,
    /// Whether it has a thought that the template does not print.
    pub unshown_thought: bool,
}

/// The file that lines stand in.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// Its path.
    pub path: &'a Path,
    /// Its columns.
    pub columns: &'a Columns,
    /// The root of its records.
    pub root: u32,
    /// What the held-out split goes by.
    pub by: SplitBy,
}

/// Encodes a file and hands its lines to `each` in their order, a chunk at a time, with the bytes of the file read so far.
///
/// # Errors
/// Class `corpus` for a line that cannot be read, and those of `each`.
pub fn encode_file(
    encoder: &mut CachedEncoder,
    file: Place,
    mut each: impl FnMut(&mut CachedEncoder, Vec<Encoded>, u64) -> Result<()>,
) -> Result<FileInfo> {
    let path = file.path;
    let mut rows = reader::Rows::open(path, file.columns)?;
    let (format, compression) = (rows.format(), rows.compression());
    let mut records = 0;
    let mut shapes = BTreeSet::new();
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            break;
        }
        let encoded: Vec<Encoded> = encode_lines(encoder, file, chunk).into_iter().collect::<Result<_>>()?;
        records += encoded.len() as u64;
        shapes.extend(encoded.iter().map(|(line, _)| line.shape));
        each(encoder, encoded, rows.bytes_read())?;
        encoder.release();
    }
    if records == 0 {
        return Err(empty(path));
    }
    let (bytes, sha256) = rows.finish()?;
    Ok(FileInfo { path: path.into(), root: String::new(), format, compression, shapes, bytes, sha256, records })
}

/// A file without records.
pub fn empty(path: &Path) -> Error {
    Error::new("corpus::empty_file", format!("{} has no records", path.display()))
        .expected("JSON objects, one a line or in an array, or the rows of a Parquet file")
}

/// The outcome of each line that is not blank; lines come with their numbers.
pub fn encode_lines(encoder: &mut CachedEncoder, file: Place, lines: Vec<(u64, Vec<u8>)>) -> Vec<Result<Encoded>> {
    let rules = encoder.encoder();
    let parse = |(line, bytes): (u64, Vec<u8>)| {
        let raw = reader::parse_row(file.path, line, &bytes, file.columns).transpose()?;
        Some(raw.map(|raw| {
            let json = String::from_utf8(bytes).expect("a line that was parsed is UTF-8").trim().to_string();
            let key = split::key(file.by, &raw.id, &raw.content);
            let sketch = Sketch::of(&raw.content);
            let unshown_thought = rules.leaves_out_thoughts(&raw.content);
            (
                Line {
                    id: raw.id.clone(),
                    named: raw.named,
                    line,
                    json,
                    key,
                    sketch,
                    shape: raw.shape,
                    unshown_thought,
                },
                raw,
            )
        }))
    };
    let parsed: Vec<Result<(Line, RawRecord)>> = lines.into_par_iter().filter_map(parse).collect();
    let raws: Vec<&RawRecord> = parsed.iter().flatten().map(|(_, raw)| raw).collect();
    let mut records = encoder.encode(file.path, file.root, &raws).into_iter();
    let mut with_record = |(line, _)| (line, records.next().expect("a record for each line"));
    parsed.into_iter().map(|parsed| parsed.map(&mut with_record)).collect()
}
