//! Rows of text: the lines of JSONL, the elements of a JSON array.

use super::rows::{Format, ROW_BYTES_MAX, too_long};
use super::stream::Stream;
use crate::error::{Error, Result};
use serde_json::Value;

/// What may stand around the array of a JSON file, in bytes.
const AROUND_BYTES_MAX: usize = 1 << 20;

/// The rows of a text file.
pub struct TextRows {
    stream: Stream,
    format: Format,
    row: u64,
    /// Of a JSON file: what stands around the elements of its array.
    around: Vec<u8>,
    inside: bool,
}

impl TextRows {
    /// The rows of `stream`, which hold JSON or JSONL as `format` says.
    pub fn new(stream: Stream, format: Format) -> Self {
        Self { stream, format, row: 0, around: Vec::new(), inside: false }
    }

    /// The file's bytes.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The next row, which may be blank; `None` at the end.
    ///
    /// # Errors
    /// `corpus::row_too_long`, `corpus::bad_json` (the frame of a JSON file), `corpus::bad_compression`, class `io`.
    pub fn next_row(&mut self) -> Result<Option<Vec<u8>>> {
        match self.format {
            Format::Json => self.element(),
            _ => self.line(),
        }
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>> {
        let bytes = self.stream.line(ROW_BYTES_MAX + 1)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        self.row += 1;
        if bytes.len() > ROW_BYTES_MAX { Err(too_long(self.stream.path(), self.row)) } else { Ok(Some(bytes)) }
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
            return Err(too_long(self.stream.path(), self.row));
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
