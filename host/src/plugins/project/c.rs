//! C: the bindings of the contract are made here, `zig cc` compiles and links them with the sources.

use std::path::{Path, PathBuf};
use std::process::Command;

use wit_bindgen_core::Files;
use wit_bindgen_core::wit_parser::Resolve;

use super::build::{create, read};
use super::{Project, encode, tool};
use crate::error::{Error, Result};
use crate::plugins::contract;
use crate::run::atomic::{self, Existing};

/// The component of all `*.c` of the folder.
pub fn build(project: &Project, world: &str) -> Result<Vec<u8>> {
    let bindings = project.target().join("bindings");
    write_bindings(world, &bindings)?;
    let mut sources = files(&project.folder, "c")?;
    sources.push(bindings.join(format!("{}.c", world.replace('-', "_"))));
    sources.push(bindings.join(format!("{}_component_type.o", world.replace('-', "_"))));

    let module = project.target().join("module.wasm");
    let mut compile = zig()?;
    compile.args(["cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-std=c17", "-O2", "-s", "-Wall", "-I"]);
    compile.arg(&bindings).arg("-o").arg(&module).args(sources);
    tool::run(compile.current_dir(&project.folder), INSTALL)?;
    encode::component(&read(&module)?)
}

const INSTALL: &str = "`pip install ziglang==0.17.1`, or put zig on the PATH";

/// zig itself, or the one inside the Python package.
fn zig() -> Result<Command> {
    if tool::works(Command::new("zig").arg("version")) {
        return Ok(Command::new("zig"));
    }
    let package = || {
        let mut python = Command::new("python3");
        python.args(["-m", "ziglang"]);
        python
    };
    if tool::works(package().arg("version")) { Ok(package()) } else { Err(tool::missing("zig", INSTALL)) }
}

/// `<world>.h`, `<world>.c`, and the object that carries the world's type into the module.
fn write_bindings(world: &str, folder: &Path) -> Result<()> {
    let mut files = Files::default();
    let mut resolve = Resolve::default();
    resolve
        .push_source("tunehost.wit", &contract::document())
        .and_then(|package| resolve.select_world(&[package], Some(world)))
        .and_then(|world| wit_bindgen_c::Opts::default().build().generate(&mut resolve, world, &mut files))
        .map_err(|error| Error::new("plugin::build_failed", format!("no C bindings of {world}: {error:#}")))?;
    create(folder)?;
    for (name, bytes) in files.iter() {
        atomic::write(&folder.join(name), bytes, Existing::Replace)?;
    }
    Ok(())
}

/// The files of this extension in the order of their names, so that the same sources give the same bytes.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|error| Error::io("read", folder, error))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|it| it == extension))
        .collect();
    files.sort();
    Ok(files)
}
