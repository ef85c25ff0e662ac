//! JavaScript: componentize-js puts `plugin.js` and the engine into one component.

use std::path::Path;
use std::process::Command;

use super::{Project, build::read, tool};
use crate::error::Result;

const PACKAGE: &str = "@bytecodealliance/componentize-js";
const SCRIPT: &str = include_str!("componentize.mjs");

/// The component of `plugin.js`.
pub fn build(project: &Project, wit: &Path, world: &str) -> Result<Vec<u8>> {
    let out = project.target().join("component.wasm");
    let mut node = Command::new("node");
    if !tool::works(node.arg("--version")) {
        return Err(tool::missing("node", "install Node.js 20 or newer"));
    }
    let installed = |folder: &Path| folder.join("node_modules").join(PACKAGE).is_dir();
    if !project.folder.ancestors().any(installed) {
        let install = format!("`npm install` in {}", project.folder.display());
        return Err(tool::missing(&format!("the npm package {PACKAGE}"), &install));
    }
    let mut node = Command::new("node");
    node.args(["--input-type=module", "--eval", SCRIPT, "--"]).arg(wit).arg(world).arg(&out);
    tool::run(node.current_dir(&project.folder), "install Node.js 20 or newer")?;
    read(&out)
}
