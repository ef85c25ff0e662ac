//! Running the tools of a language.

use std::process::Command;

use crate::error::{Error, Result};

/// Run a tool to its end and hand back what it printed; `install` says how to get it.
pub fn run(command: &mut Command, install: &str) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| missing(&format!("{program} ({error})"), install))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_string());
    Err(Error::new("plugin::build_failed", format!("{program} failed with {}:\n{}", output.status, said.join("\n"))))
}

/// Whether a program starts and ends well.
pub fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The error for a tool that is not here.
pub fn missing(what: &str, install: &str) -> Error {
    Error::new("plugin::no_tool", format!("the build needs {what}, which is not here")).help(install)
}
