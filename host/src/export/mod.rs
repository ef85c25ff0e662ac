//! What a run leaves behind for others: what an exporter plugin lays out, such as the adapter as PEFT reads it, and the
//! base with the adapter merged in.
//!
//! A folder appears under its final name only when it is whole.

mod carry_out;
pub mod merge;
mod tensor;

pub use carry_out::{carry_out, tuned};

use crate::error::{Error, Result};
use crate::run::atomic::{folder_of, make_beside, sync_folder};
use safetensors::SafeTensorError;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tensor::ExportTensor;

/// A folder that is written beside its place and renamed when it is whole.
struct PendingFolder {
    temporary: PathBuf,
    place: PathBuf,
}

impl PendingFolder {
    fn new(place: &Path) -> Result<Self> {
        if place.exists() {
            return Err(Error::new("export::exists", format!("{} exists already", place.display()))
                .expected("a folder that does not exist yet")
                .help("name another folder; nothing is overwritten"));
        }
        let (temporary, ()) = make_beside(place, |path| fs::create_dir(path))?;
        Ok(Self { temporary, place: place.into() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, bytes).map_err(|e| Error::io("write", &path, e))
    }

    /// The file `name` of the folder `from`, where it has one.
    fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let from = from.join(name);
        if from.exists() {
            fs::copy(&from, self.path(name)).map_err(|e| Error::io("copy", &from, e))?;
        }
        Ok(())
    }

    /// A safetensors file, tensor after tensor.
    fn write_tensors(&self, name: &str, tensors: Vec<(&str, ExportTensor)>) -> Result<()> {
        let path = self.path(name);
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::serialize_to_file(tensors, Some(metadata), &path).map_err(|e| match e {
            SafeTensorError::IoError(e) => Error::io("write", &path, e),
            e => Error::new("io::failed", format!("cannot write {}: {e}", path.display())).source(e),
        })
    }

    fn commit(self) -> Result<()> {
        for entry in fs::read_dir(&self.temporary).map_err(|e| Error::io("list", &self.temporary, e))? {
            let path = entry.map_err(|e| Error::io("list", &self.temporary, e))?.path();
            fs::File::open(&path).and_then(|f| f.sync_all()).map_err(|e| Error::io("sync", &path, e))?;
        }
        fs::rename(&self.temporary, &self.place).map_err(|e| Error::io("rename", &self.temporary, e))?;
        sync_folder(folder_of(&self.place))
    }
}
