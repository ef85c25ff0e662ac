//! Compiled plugins, kept in the user's cache folder so that the next start takes milliseconds.
//!
//! A file there is machine code, so it is believed only if this very user's tunehost wrote it: it is signed
//! (HMAC-SHA256, RFC 2104) with a key that only the user can read, over the component's hash, the engine's and the code
//! itself. Anything else, whole or not, is compiled again and written over.

use std::fs::{self, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use super::reference::PluginRef;
use crate::error::{Error, Result};

const MAGIC: &[u8; 16] = b"tunehost-code-1\n";
const HEADER_BYTES: usize = MAGIC.len() + 32;

/// The compiled component, from the user's cache where it is there.
pub(super) fn component(engine: &Engine, plugin: &PluginRef) -> Result<Component> {
    match folder() {
        Some(folder) => component_in(&folder, engine, plugin).map(|(component, _)| component),
        None => compile(engine, plugin),
    }
}

/// The compiled component, and whether it came from the cache in `folder`. A cache that cannot be used costs time and
/// nothing else.
pub(super) fn component_in(folder: &Path, engine: &Engine, plugin: &PluginRef) -> Result<(Component, bool)> {
    let key = match key(folder) {
        Ok(key) => key,
        Err(error) => {
            tracing::debug!("the plugin cache {} cannot be used: {error}", folder.display());
            return Ok((compile(engine, plugin)?, false));
        }
    };
    let engine_hash = engine_hash(engine);
    let identity: [&[u8]; 3] = [MAGIC, &engine_hash, plugin.identity().sha256.as_bytes()];
    let path = folder.join(format!("{}-{}.code", plugin.identity().sha256, &crate::hash::hex(&engine_hash)[..16]));
    if let Some(component) = read(&path, &key, identity, engine) {
        return Ok((component, true));
    }
    let component = compile(engine, plugin)?;
    let written = component.serialize().map_err(io::Error::other).and_then(|code| write(&path, &key, identity, &code));
    if let Err(error) = written {
        tracing::debug!("the compiled plugin was not kept in {}: {error}", path.display());
    }
    Ok((component, false))
}

fn compile(engine: &Engine, plugin: &PluginRef) -> Result<Component> {
    Component::new(engine, plugin.bytes()).map_err(|error| {
        Error::new("plugin::not_a_component", format!("{} cannot be compiled: {error:#}", plugin.identity()))
            .help("build it again, or copy it again if it was cut off")
    })
}

fn read(path: &Path, key: &[u8; 32], identity: [&[u8]; 3], engine: &Engine) -> Option<Component> {
    let file = fs::read(path).ok()?;
    let (header, code) = file.split_at_checked(HEADER_BYTES)?;
    let (magic, signature) = header.split_at(MAGIC.len());
    if magic != MAGIC || signature != sign(key, identity, code) {
        return None;
    }
    load(engine, code)
}

#[allow(unsafe_code)]
fn load(engine: &Engine, code: &[u8]) -> Option<Component> {
    // SAFETY: the caller has just checked the signature over these very bytes in memory, so they are what
    // `Component::serialize` gave this user's tunehost for this component and engine, unchanged.
    unsafe { Component::deserialize(engine, code) }.ok()
}

/// Written beside its place and renamed, so that no reader sees half a file.
fn write(path: &Path, key: &[u8; 32], identity: [&[u8]; 3], code: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("{}-{number}.partial", std::process::id()));
    let result = private(&beside).and_then(|mut file| {
        file.write_all(MAGIC)?;
        file.write_all(&sign(key, identity, code))?;
        file.write_all(code)?;
        file.sync_data()?;
        fs::rename(&beside, path)
    });
    if result.is_err() {
        let _ = fs::remove_file(&beside);
    }
    result
}

/// HMAC-SHA256.
fn sign(key: &[u8; 32], identity: [&[u8]; 3], code: &[u8]) -> [u8; 32] {
    let padded = |pad: u8| {
        let mut block = [pad; 64];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let mut inner = Sha256::new_with_prefix(padded(0x36));
    identity.iter().for_each(|part| inner.update(part));
    inner.update(code);
    Sha256::new_with_prefix(padded(0x5c)).chain_update(inner.finalize()).finalize().into()
}

/// The user's own signing key, made on first use. One that others can read, or that is no file, is replaced. A folder that
/// others own or can write to is refused: whoever can put a key there could sign code with it.
fn key(folder: &Path) -> io::Result<[u8; 32]> {
    fs::create_dir_all(folder)?;
    let (uid, metadata) = (own_uid(folder)?, fs::metadata(folder)?);
    if metadata.uid() != uid || metadata.permissions().mode() & 0o022 != 0 {
        return Err(io::Error::other("others own it or can write to it"));
    }
    let path = folder.join("key");
    if let Ok(metadata) = fs::symlink_metadata(&path) {
        let mut key = [0; 32];
        let trusted = metadata.is_file() && metadata.uid() == uid && metadata.permissions().mode() & 0o077 == 0;
        if trusted && File::open(&path).and_then(|mut file| file.read_exact(&mut key)).is_ok() {
            return Ok(key);
        }
        fs::remove_file(&path)?;
    }
    let mut key = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    private(&path)?.write_all(&key)?;
    Ok(key)
}

/// The user that this process runs as: the owner of what it makes.
fn own_uid(folder: &Path) -> io::Result<u32> {
    if let Ok(process) = fs::metadata("/proc/self") {
        return Ok(process.uid());
    }
    let probe = folder.join(format!("{}.owner", std::process::id()));
    let uid = private(&probe)?.metadata()?.uid();
    fs::remove_file(&probe)?;
    Ok(uid)
}

/// A new file that only the user can read.
fn private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Everything about the engine that machine code depends on: wasmtime's version, its settings, the processor's
/// features.
fn engine_hash(engine: &Engine) -> [u8; 32] {
    struct Sha(Sha256);
    impl Hasher for Sha {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0 // not asked for: the whole digest is taken below
        }
    }
    let mut hasher = Sha(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.0.finalize().into()
}

/// `plugins` in the user's cache folder.
fn folder() -> Option<PathBuf> {
    crate::user::cache_folder().map(|folder| folder.join("plugins"))
}
