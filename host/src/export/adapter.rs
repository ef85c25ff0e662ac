//! Writes an adapter folder.

use super::PendingFolder;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::peft;
use crate::model::spec::ModelSpec;
use std::path::Path;

/// Writes `adapter_config.json` and `adapter_model.safetensors` to the new folder `dir`. `base` is recorded as an absolute
/// path, so that the adapter finds its base whatever the current folder, and a resumed run writes the same bytes.
///
/// # Errors
/// `export::exists`, `io::failed`.
pub fn write(adapter: &Adapter, spec: &ModelSpec, base: &Path, dir: &Path) -> Result<()> {
    let base = base.canonicalize().map_err(|e| Error::io("find", base, e))?;
    let folder = PendingFolder::new(dir)?;
    folder.write(peft::CONFIG_FILE, &peft::config_json(&adapter.plan, spec, &base))?;
    folder.write(peft::WEIGHTS_FILE, &peft::weights_bytes(adapter))?;
    folder.commit()
}
