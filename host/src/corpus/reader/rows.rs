//! Files to rows: the lines of JSONL, the elements of a JSON array.

use super::stream::{Compression, Stream};
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// The longest row that is read, in bytes.
pub const ROW_BYTES_MAX: usize = 100 << 20;
/// What may stand around the array of a JSON file, in bytes.
const AROUND_BYTES_MAX: usize = 1 << 20;
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
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Jsonl => "jsonl",
            Format::Json => "json",
        })
    }
}

/// A file's rows in chunks.
pub struct Rows {
    stream: Stream,
    format: Format,
    row: u64,
    /// Of a JSON file: what stands around the elements of its array.
    around: Vec<u8>,
    inside: bool,
}

impl Rows {
    /// Opens `path`: JSON where its text begins with `[`, or where its name says so and it is no object a line.
    ///
    /// # Errors
    /// Class `io`, `corpus::bad_compression`.
    pub fn open(path: &Path) -> Result<Self> {
        let mut stream = Stream::open(path)?;
        let start = stream.fill()?;
        let start = &start[start.iter().take_while(|byte| byte.is_ascii_whitespace()).count()..];
        let first_line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let whole_line = || serde_json::from_slice::<Value>(first_line).ok();
        let format = match start.first() {
            Some(b'[') => Format::Json,
            Some(b'{')
                if super::files::is_json(path) && whole_line().is_none_or(|line| !super::shape::is_record(&line)) =>
            {
                Format::Json
            }
            _ => Format::Jsonl,
        };
        Ok(Self { stream, format, row: 0, around: Vec::new(), inside: false })
    }

    /// How the file holds its rows.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How the file is compressed.
    pub fn compression(&self) -> Compression {
        self.stream.compression()
    }

    /// The next rows with their numbers from 1, blank lines among them; an empty chunk is the end of the file.
    ///
    /// # Errors
    /// `corpus::row_too_long`, `corpus::bad_json` (the frame of a JSON file), `corpus::bad_compression`, class `io`.
    pub fn next_chunk(&mut self) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut chunk = Vec::new();
        let mut size = 0;
        while size < CHUNK_BYTES && chunk.len() < CHUNK_ROWS {
            let row = match self.format {
                Format::Jsonl => self.line()?,
                Format::Json => self.element()?,
            };
            let Some(bytes) = row else { break };
            size += bytes.len();
            chunk.push((self.row, bytes));
        }
        Ok(chunk)
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>> {
        let bytes = self.stream.line(ROW_BYTES_MAX + 1)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        self.row += 1;
        if bytes.len() > ROW_BYTES_MAX { Err(self.too_long()) } else { Ok(Some(bytes)) }
    }

    fn too_long(&self) -> Error {
        let message = format!("{}:{}: the row is longer than 100 MiB", self.stream.path().display(), self.row);
        Error::new("corpus::row_too_long", message).expected("one record a line, or an array of records")
    }

    fn element(&mut self) -> Result<Option<Vec<u8>>> {
        if !self.inside {
            let mut before = Scan::default();
            let max = AROUND_BYTES_MAX;
            self.inside = scan(&mut self.stream, &mut self.around, max, |byte| before.opens_array(byte))?;
            if !self.inside {
                return self.check_around().map(|()| None);
            }
        }
        self.row += 1;
        let mut element = Vec::new();
        let mut within = Scan::default();
        let ended = scan(&mut self.stream, &mut element, ROW_BYTES_MAX + 1, |byte| within.ends_element(byte))?;
        if !ended && element.len() > ROW_BYTES_MAX {
            return Err(self.too_long());
        }
        let last = element.pop();
        let blank = element.iter().all(u8::is_ascii_whitespace);
        if ended && last == Some(b',') && !blank {
            return Ok(Some(element));
        }
        if ended && last == Some(b']') && (!blank || self.row == 1) {
            self.around.push(b']');
            self.inside = false;
            let mut after = Vec::new();
            scan(&mut self.stream, &mut after, AROUND_BYTES_MAX, |_| false)?;
            self.around.append(&mut after);
            self.check_around()?;
            return Ok((!blank).then_some(element));
        }
        let message = format!("{}:{}: no record ends here", self.stream.path().display(), self.row);
        Err(Error::new("corpus::bad_json", message)
            .expected("an array of records, a comma between two and `]` behind the last")
            .help("the file may have been cut short"))
    }

    /// What is around the elements must be a document by itself, and hold no other array.
    fn check_around(&mut self) -> Result<()> {
        let around = std::mem::take(&mut self.around);
        if around.is_empty() || around.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let path = self.stream.path().display();
        if around.len() >= AROUND_BYTES_MAX {
            let message = format!("{path}: more than 1 MiB outside of the array of records");
            return Err(Error::new("corpus::bad_json", message).expected("one array of records"));
        }
        let frame: Value = serde_json::from_slice(&around).map_err(|e| {
            Error::new("corpus::bad_json", format!("{path}: around the array of records: {e}")).source(e)
        })?;
        let lists: Vec<&str> = match &frame {
            Value::Array(_) => return Ok(()),
            Value::Object(object) => {
                object.iter().filter(|(_, value)| value.is_array()).map(|(key, _)| key.as_str()).collect()
            }
            _ => Vec::new(),
        };
        if lists.len() == 1 {
            return Ok(());
        }
        let message = format!("{path}: a JSON document with {} arrays: {}", lists.len(), lists.join(", "));
        Err(Error::new("corpus::unknown_shape", message)
            .expected("an array of records, or an object of which one value is such an array"))
    }

    /// How much of the file, as it lies on disk, has been read.
    pub fn bytes_read(&self) -> u64 {
        self.stream.bytes_read()
    }

    /// Size in bytes and sha256 of the file.
    ///
    /// # Errors
    /// Class `io`.
    pub fn finish(self) -> Result<(u64, String)> {
        self.stream.finish()
    }
}

/// Appends what is read to `out` up to and with the first byte for which `stop` holds, or up to `max` bytes, and says
/// whether there was one.
fn scan(stream: &mut Stream, out: &mut Vec<u8>, max: usize, mut stop: impl FnMut(u8) -> bool) -> Result<bool> {
    while out.len() < max {
        let bytes = stream.fill()?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let bytes = &bytes[..bytes.len().min(max - out.len())];
        let stopped = bytes.iter().position(|&byte| stop(byte));
        let taken = stopped.map_or(bytes.len(), |at| at + 1);
        out.extend_from_slice(&bytes[..taken]);
        stream.consume(taken);
        if stopped.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where in a JSON text a byte stands.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
    object: bool,
}

impl Scan {
    /// Whether the byte is structure, not part of a string.
    fn structural(&mut self, byte: u8) -> bool {
        if !self.in_string {
            self.in_string = byte == b'"';
            return !self.in_string;
        }
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => self.in_string = false,
            _ => {}
        }
        false
    }

    /// The `[` of a document that is an array, or of a value of a document that is an object.
    fn opens_array(&mut self, byte: u8) -> bool {
        if !self.structural(byte) {
            return false;
        }
        match byte {
            b'[' if self.depth == usize::from(self.object) => return true,
            b'{' | b'[' => {
                self.object |= self.depth == 0 && byte == b'{';
                self.depth += 1;
            }
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }

    /// The `,` or `]` behind an element of the array.
    fn ends_element(&mut self, byte: u8) -> bool {
        if !self.structural(byte) {
            return false;
        }
        match byte {
            b',' | b']' if self.depth == 0 => return true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}
