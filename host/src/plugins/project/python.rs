//! Python: componentize-py puts `plugin.py`, what it imports and the interpreter into one component.

use std::path::Path;
use std::process::Command;

use super::{Project, build::read, tool};
use crate::error::Result;

/// The component of `plugin.py`. WASI is stubbed: a plugin has none.
pub fn build(project: &Project, wit: &Path, world: &str) -> Result<Vec<u8>> {
    let out = project.target().join("component.wasm");
    let mut componentize = Command::new("componentize-py");
    componentize.arg("--wit-path").arg(wit).args(["--world", world, "componentize", "plugin", "--stub-wasi", "-o"]);
    componentize.arg(&out).current_dir(&project.folder);
    tool::run(&mut componentize, "`pip install componentize-py==0.25.1`")?;
    read(&out)
}
