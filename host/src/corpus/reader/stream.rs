//! The bytes of a file: hashed as they lie on disk, decompressed as they are read.

use crate::error::{Error, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// How a file is compressed: told by its first bytes, whatever its name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all.
    None,
    /// RFC 1952, one member or several.
    Gzip,
    /// RFC 8878, one frame or several, with windows of up to 128 MiB.
    Zstd,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::None => "none",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        })
    }
}

/// A file's text without its byte order mark.
pub struct Stream {
    path: PathBuf,
    compression: Compression,
    text: BufReader<Box<dyn Read>>,
    raw: Rc<RefCell<Hashed>>,
}

struct Hashed {
    file: File,
    hasher: Sha256,
    bytes: u64,
}

/// The decompressor's handle on the file.
struct Raw(Rc<RefCell<Hashed>>);

impl Read for Raw {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut raw = self.0.borrow_mut();
        let read = raw.file.read(buffer)?;
        raw.hasher.update(&buffer[..read]);
        raw.bytes += read as u64;
        Ok(read)
    }
}

impl Stream {
    /// Opens `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |e| Error::io("open", path, e);
        let file = File::open(path).map_err(failed)?;
        let raw = Rc::new(RefCell::new(Hashed { file, hasher: Sha256::new(), bytes: 0 }));
        let mut buffered = BufReader::with_capacity(1 << 20, Raw(raw.clone()));
        let start = buffered.fill_buf().map_err(failed)?;
        let compression = match start {
            [0x1F, 0x8B, ..] => Compression::Gzip,
            [0x28, 0xB5, 0x2F, 0xFD, ..] => Compression::Zstd,
            _ => Compression::None,
        };
        let text: Box<dyn Read> = match compression {
            Compression::None => Box::new(buffered),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
            Compression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(buffered).map_err(failed)?),
        };
        let mut stream = Self { path: path.into(), compression, text: BufReader::with_capacity(1 << 20, text), raw };
        if stream.fill()?.starts_with(b"\xEF\xBB\xBF") {
            stream.consume(3);
        }
        Ok(stream)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it is compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// The bytes at hand, at least one before the end.
    pub fn fill(&mut self) -> Result<&[u8]> {
        if let Err(error) = self.text.fill_buf() {
            return Err(self.broken(error));
        }
        Ok(self.text.buffer())
    }

    /// Goes on by `bytes` of what [`fill`](Self::fill) gave.
    pub fn consume(&mut self, bytes: usize) {
        self.text.consume(bytes);
    }

    /// The bytes up to and with the next line end or the end of the file, but no more than `max`.
    pub fn line(&mut self, max: usize) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        match (&mut self.text).take(max as u64).read_until(b'\n', &mut line) {
            Ok(_) => Ok(line),
            Err(error) => Err(self.broken(error)),
        }
    }

    fn broken(&self, error: io::Error) -> Error {
        if self.compression == Compression::None {
            return Error::io("read", &self.path, error);
        }
        let name = self.compression;
        let read = self.raw.borrow().bytes;
        let message = format!("{}: broken {name} data in its first {read} bytes: {error}", self.path.display());
        Error::new("corpus::bad_compression", message)
            .expected(format!("whole {name} frames"))
            .help("the file may have been cut short: fetch it again")
            .source(error)
    }

    /// How much of the file, as it lies on disk, has been read.
    pub fn bytes_read(&self) -> u64 {
        self.raw.borrow().bytes
    }

    /// Size in bytes and sha256 of the file as it lies on disk.
    pub fn finish(self) -> Result<(u64, String)> {
        io::copy(&mut Raw(self.raw.clone()), &mut io::sink()).map_err(|e| Error::io("read", &self.path, e))?;
        let raw = self.raw.borrow();
        Ok((raw.bytes, crate::hash::hex(&raw.hasher.clone().finalize())))
    }
}
