//! Files to rows, whatever their format is.

use super::parquet::{self, ParquetRows};
use super::stream::{Compression, Stream};
use super::text::TextRows;
use super::{files, shape};
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// The longest row that is read, in bytes: longer than any context, and tokenised in under 2 GiB of memory.
pub const ROW_BYTES_MAX: usize = 16 << 20;
/// A chunk of rows ends with the row that takes it past this many bytes.
const CHUNK_BYTES: usize = 16 << 20;
/// A chunk holds at most this many rows.
const CHUNK_ROWS: usize = 4096;

/// How a file holds its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// One JSON object a line; a row's number is that of its line.
    Jsonl,
    /// One array of objects, alone or as the one array among an object's values; rows are counted.
    Json,
    /// Apache Parquet; rows are counted.
    Parquet,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Jsonl => "jsonl",
            Format::Json => "json",
            Format::Parquet => "parquet",
        })
    }
}

/// A file's rows in chunks, each row as the JSON object that it is or stands for.
pub struct Rows {
    source: Source,
    format: Format,
    row: u64,
}

enum Source {
    Text(TextRows),
    Parquet(ParquetRows),
}

impl Rows {
    /// Opens `path`, of which `columns` names columns anew: Parquet where its first bytes say so, JSON where its text begins
    /// with `[`, or where its name says so and its first line is no record.
    ///
    /// # Errors
    /// Class `io`, `corpus::bad_compression`, `corpus::bad_parquet`, `corpus::unsupported_parquet`.
    pub fn open(path: &Path, columns: &super::Columns) -> Result<Self> {
        let mut stream = Stream::open(path)?;
        let start = stream.fill()?;
        let (source, format) = if parquet::is_parquet(start) || files::is_parquet(path) && !start.is_empty() {
            (Source::Parquet(ParquetRows::open(stream, columns)?), Format::Parquet)
        } else {
            let format = text_format(path, &mut stream)?;
            // what the guess has read of the stream is read once more
            (Source::Text(TextRows::new(Stream::open(path)?, format)), format)
        };
        Ok(Self { source, format, row: 0 })
    }

    /// How the file holds its rows.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How the file is compressed as a whole.
    pub fn compression(&self) -> Compression {
        match &self.source {
            Source::Text(text) => text.stream().compression(),
            Source::Parquet(_) => Compression::None,
        }
    }

    /// The next rows with their numbers from 1, blank lines among them; an empty chunk is the end of the file.
    ///
    /// # Errors
    /// `corpus::row_too_long`, `corpus::bad_json` (the frame of a JSON file), `corpus::bad_compression`, `corpus::bad_parquet`,
    /// class `io`.
    pub fn next_chunk(&mut self) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut chunk = Vec::new();
        let mut size = 0;
        while size < CHUNK_BYTES && chunk.len() < CHUNK_ROWS {
            let row = match &mut self.source {
                Source::Text(text) => text.next_row()?,
                Source::Parquet(parquet) => parquet.next_row()?,
            };
            let Some(bytes) = row else { break };
            self.row += 1;
            size += bytes.len();
            chunk.push((self.row, bytes));
        }
        Ok(chunk)
    }

    /// How much of the file, as it lies on disk, has been read; of a Parquet file by its rows.
    pub fn bytes_read(&self) -> u64 {
        match &self.source {
            Source::Text(text) => text.stream().bytes_read(),
            Source::Parquet(parquet) => parquet.bytes_read(),
        }
    }

    /// Size in bytes and sha256 of the file.
    ///
    /// # Errors
    /// Class `io`.
    pub fn finish(self) -> Result<(u64, String)> {
        match self.source {
            Source::Text(text) => text.finish(),
            Source::Parquet(parquet) => parquet.finish(),
        }
    }
}

/// JSON or JSONL: a file called `.json` may well hold a record a line.
fn text_format(path: &Path, stream: &mut Stream) -> Result<Format> {
    loop {
        let bytes = stream.fill()?;
        match bytes.iter().position(|byte| !byte.is_ascii_whitespace()) {
            None if bytes.is_empty() => return Ok(Format::Jsonl),
            None => {
                let blank = bytes.len();
                stream.consume(blank);
            }
            Some(at) => {
                stream.consume(at);
                break;
            }
        }
    }
    Ok(match stream.fill()?.first() {
        Some(b'[') => Format::Json,
        Some(b'{') if files::is_json(path) => {
            let line = stream.line(ROW_BYTES_MAX)?;
            match serde_json::from_slice::<Value>(&line).is_ok_and(|value| shape::is_record(&value)) {
                true => Format::Jsonl,
                false => Format::Json,
            }
        }
        _ => Format::Jsonl,
    })
}

/// A row of more than [`ROW_BYTES_MAX`].
pub fn too_long(path: &Path, row: u64) -> Error {
    let message = format!("{}:{row}: the row is longer than {} MiB", path.display(), ROW_BYTES_MAX >> 20);
    Error::new("corpus::row_too_long", message).expected("one record a line, or an array of records")
}
