//! SHA-256 of files and bytes.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A file as it was when it was hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    /// Where it was.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
}

impl FileHash {
    /// Hashes a file of any size, one block at a time.
    pub fn of(path: &Path) -> Result<Self> {
        let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let mut hasher = Sha256::new();
        let mut block = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match file.read(&mut block).map_err(|e| Error::io("read", path, e))? {
                0 => break,
                n => {
                    hasher.update(&block[..n]);
                    bytes += n as u64;
                }
            }
        }
        Ok(Self { path: path.into(), bytes, sha256: hex(&hasher.finalize()) })
    }
}

/// SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_digests() {
        // FIPS 180-4's example, and one that takes several blocks: a million times `a`.
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("million");
        std::fs::write(&path, vec![b'a'; 1_000_000]).unwrap();
        let hash = FileHash::of(&path).unwrap();
        assert_eq!(hash.sha256, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
        assert_eq!(hash.bytes, 1_000_000);
        // More than one block.
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        assert_eq!(FileHash::of(&path).unwrap().sha256, sha256(&vec![7; 3 << 20]));
        assert_eq!(FileHash::of(&folder.path().join("gone")).unwrap_err().code(), "io::failed");
    }
}
