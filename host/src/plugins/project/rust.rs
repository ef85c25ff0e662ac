//! Rust: cargo makes a core module, the host a component of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{build::read, encode, tool};
use crate::error::{Error, Result};

const TARGET: &str = "wasm32-unknown-unknown";
const LINKER: &str = "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER";
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_STD: &str = "/usr/lib/rustlib/src/rust/library/std";
const INSTALL: &str = "`rustup target add wasm32-unknown-unknown`, or on Debian, beside a toolchain of rustup's, `apt-get \
                       install rustc-web cargo-web rust-web-src`";

/// The component of the package in `folder`.
pub fn build(folder: &Path) -> Result<Vec<u8>> {
    let mut cargo = cargo(folder)?;
    cargo.args(["--release", "--target", TARGET, "--message-format=json-render-diagnostics"]);
    // Flags that are meant for native code, such as a target CPU.
    cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    let messages = tool::run(cargo.current_dir(folder), INSTALL)?;
    let module = module(&messages, &folder.join("Cargo.toml")).ok_or_else(|| {
        Error::new("plugin::build_failed", format!("{} builds no module", folder.display()))
            .expected("crate-type = [\"cdylib\"] under [lib] of its Cargo.toml")
    })?;
    encode::component(&read(&module)?)
}

/// `cargo build` with a compiler for WebAssembly: that of the toolchain, or Debian's, which has no linker of its own and
/// builds the standard library with the plugin.
fn cargo(folder: &Path) -> Result<Command> {
    let compiler = format!("a Rust compiler for {TARGET}");
    let missing = || tool::missing(&compiler, INSTALL);
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).current_dir(folder).output();
    let sysroot = sysroot.ok().filter(|output| output.status.success()).ok_or_else(missing)?.stdout;
    let rustlib = Path::new(String::from_utf8_lossy(&sysroot).trim()).join("lib/rustlib");
    if rustlib.join(TARGET).join("lib").exists() {
        let mut cargo = Command::new("cargo");
        cargo.arg("build");
        return Ok(cargo);
    }
    let linker = rustlib.join(format!("{}-unknown-linux-gnu/bin/rust-lld", std::env::consts::ARCH));
    let debian = [DEBIAN_CARGO, DEBIAN_RUSTC, DEBIAN_STD].map(Path::new);
    if !debian.into_iter().chain([linker.as_path()]).all(Path::exists) {
        return Err(missing());
    }
    let mut cargo = Command::new(DEBIAN_CARGO);
    cargo.args(["build", "-Zbuild-std=std,panic_abort"]);
    cargo.env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1").env(LINKER, linker);
    Ok(cargo)
}

/// The `.wasm` that cargo's messages name for the package of this manifest.
fn module(messages: &[u8], manifest: &Path) -> Option<PathBuf> {
    #[derive(serde::Deserialize)]
    struct Artifact {
        manifest_path: PathBuf,
        filenames: Vec<PathBuf>,
    }
    let artifacts = messages.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    artifacts
        .filter(|artifact: &Artifact| artifact.manifest_path == manifest)
        .flat_map(|artifact| artifact.filenames)
        .find(|file| file.extension().is_some_and(|extension| extension == "wasm"))
}
