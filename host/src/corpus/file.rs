//! One file's records, encoded on all cores, chunk by chunk.

use super::encode::{Encoder, Record};
use super::reader::{self, Columns};
use super::{FileInfo, split};
use crate::config::SplitBy;
use crate::error::{Error, Result};
use rayon::prelude::*;
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
}

/// Encodes a file and hands its lines to `each` in their order, a chunk at a time.
///
/// # Errors
/// Class `corpus` for a line that cannot be read, and those of `each`.
pub fn encode_file(
    encoder: &Encoder,
    path: &Path,
    columns: &Columns,
    root: u32,
    by: SplitBy,
    mut each: impl FnMut(Vec<Encoded>) -> Result<()>,
) -> Result<FileInfo> {
    let mut rows = reader::Rows::open(path)?;
    let (format, compression) = (rows.format(), rows.compression());
    let mut records = 0;
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            break;
        }
        let encode =
            |(line, bytes): (u64, Vec<u8>)| encode_line(encoder, path, columns, root, by, line, bytes).transpose();
        let encoded: Vec<Option<Result<Encoded>>> = chunk.into_par_iter().map(encode).collect();
        let encoded: Vec<Encoded> = encoded.into_iter().flatten().collect::<Result<_>>()?;
        records += encoded.len() as u64;
        each(encoded)?;
    }
    if records == 0 {
        return Err(Error::new("corpus::empty_file", format!("{} has no records", path.display()))
            .expected("JSON objects, one a line or in an array"));
    }
    let (bytes, sha256) = rows.finish()?;
    Ok(FileInfo { path: path.into(), root: String::new(), format, compression, bytes, sha256, records })
}

/// The line's outcome; `None` where it is blank.
pub fn encode_line(
    encoder: &Encoder,
    path: &Path,
    columns: &Columns,
    root: u32,
    by: SplitBy,
    line: u64,
    bytes: Vec<u8>,
) -> Result<Option<Encoded>> {
    let Some(raw) = reader::parse_row(path, line, &bytes, columns)? else { return Ok(None) };
    let record = encoder.encode(path, root, &raw);
    let key = split::key(by, &raw.id, &raw.content);
    let json = String::from_utf8(bytes).expect("a line that was parsed is UTF-8").trim().to_string();
    Ok(Some((Line { id: raw.id, named: raw.named, line, json, key }, record)))
}
