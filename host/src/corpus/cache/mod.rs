//! Encodings of records, kept so that the same record is not rendered and tokenised twice.
//!
//! One file holds every record that one [`Identity`] ever encoded; a record is found by the hash of its content, wherever
//! it stands. What is kept is at full length: the length limit is applied to what is read. A file is only ever appended to,
//! under a lock, or replaced as a whole, so that several processes may read and write at once. Records that are token ids
//! already, and records that are refused, are not kept.

mod encode;
mod entry;
mod file;
mod folder;

pub use encode::CachedEncoder;
pub use entry::size_bytes;
pub use folder::{CacheFile, default_folder, find, list};

use super::reader::Content;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// What a record becomes changes with this number: raise it with every change to rendering, spans or tokenising.
pub const ENCODE_VERSION: u32 = 2;
const EXTENSION: &str = "encodings";

/// The beginning of the SHA-256 of a record's content.
type Key = [u8; 16];

/// Everything besides the record that decides its tokens and labels; the first line of a file, in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// [`ENCODE_VERSION`].
    pub encode_version: u32,
    /// sha256 of `tokenizer.json`.
    pub tokenizer_sha256: String,
    /// The special tokens that a template may print.
    pub special_tokens: BTreeMap<String, String>,
    /// The token put in front of plain text.
    pub text_bos: Option<u32>,
    /// sha256 of the chat template, where there is one.
    pub template_sha256: Option<String>,
    /// The encoder's options.
    pub options: serde_json::Value,
}

impl Identity {
    fn line(&self) -> String {
        serde_json::to_string(self).expect("names and numbers are JSON") + "\n"
    }

    fn file_name(&self) -> String {
        format!("{}.{EXTENSION}", &crate::hash::sha256(self.line().as_bytes())[..16])
    }
}

/// What the cache did for one corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CacheUse {
    /// Records read from the cache.
    pub found: u64,
    /// Records encoded.
    pub encoded: u64,
}

/// What `content` is found by; `None` where it is token ids already.
fn key(content: &Content) -> Option<Key> {
    if matches!(content, Content::Tokens { .. }) {
        return None;
    }
    let mut hasher = HashWriter(Sha256::new());
    serde_json::to_writer(&mut hasher, content).expect("content was JSON");
    hasher.0.finalize()[..16].try_into().ok()
}

struct HashWriter(Sha256);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
