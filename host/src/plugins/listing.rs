//! Every plugin that can be named, for `tunehost plugins list`. Nothing is compiled.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

use rayon::prelude::*;

use super::reference::{Origin, PluginRef, read_component};
use super::{Kind, bundled};
use crate::error::{Error, Result};

/// One plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// What a user writes to get it: its file's name without `.wasm`.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Its own version, or `unknown`.
    pub version: String,
    /// Size of the component, bytes.
    pub size_bytes: usize,
    /// Lower case hex digits of the component's SHA-256.
    pub sha256: String,
    /// Where it is.
    pub origin: Origin,
    /// Whether another plugin of the same name comes first, so that this one can only be reached by its path.
    pub shadowed: bool,
}

/// The plugins of `search_path` in its order (each folder sorted by name), then the bundled ones; and beside them an
/// error for every `.wasm` file there that is no plugin, and for every folder that cannot be read.
pub fn list(search_path: &[PathBuf]) -> (Vec<Listing>, Vec<Error>) {
    let (mut listed, mut errors, mut names) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut add = |name: String, plugin: Result<PluginRef>| match plugin {
        Ok(plugin) => listed.push(Listing {
            kind: plugin.identity().kind,
            version: plugin.identity().version.clone(),
            size_bytes: plugin.bytes().len(),
            sha256: plugin.identity().sha256.clone(),
            origin: plugin.identity().origin.clone(),
            shadowed: !names.insert(name.clone()),
            name,
        }),
        Err(error) => errors.push(error),
    };
    let mut unreadable = Vec::new();
    for folder in search_path {
        let mut paths = match std::fs::read_dir(folder) {
            Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect::<Vec<_>>(),
            Err(error) => {
                unreadable.push(Error::io("look for plugins in", folder, error));
                continue;
            }
        };
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "wasm"));
        paths.sort();
        let read = |path: PathBuf| {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let plugin =
                read_component(&path).and_then(|bytes| PluginRef::new(&name, Origin::File(path), Cow::Owned(bytes)));
            (name, plugin)
        };
        // Hashing is what takes the time: a component that holds an interpreter has twenty million bytes.
        let plugins: Vec<_> = paths.into_par_iter().map(read).collect();
        plugins.into_iter().for_each(|(name, plugin)| add(name, plugin));
    }
    for (name, bytes) in bundled::BUNDLED {
        add(name.into(), PluginRef::new(name, Origin::Bundled, Cow::Borrowed(bytes)));
    }
    errors.append(&mut unreadable);
    (listed, errors)
}

/// The list as aligned columns with a heading.
pub fn table(listed: &[Listing]) -> String {
    let width = |of: fn(&Listing) -> usize, least: usize| listed.iter().map(of).max().unwrap_or(0).max(least);
    let name_width = width(|l| l.name.len(), 4);
    let version_width = width(|l| l.version.len(), 7);
    let mut text = format!(
        "{:name_width$}  {:20}  {:version_width$}  {:>9}  {:64}  FROM\n",
        "NAME", "KIND", "VERSION", "SIZE", "SHA256"
    );
    for l in listed {
        let kib = l.size_bytes as f64 / 1024.0;
        let shadowed = if l.shadowed { " (not used: the name is taken above)" } else { "" };
        let (name, kind, version) = (&l.name, l.kind, &l.version);
        writeln!(
            text,
            "{name:name_width$}  {kind:20}  {version:version_width$}  {kib:>5.0} KiB  {}  {}{shadowed}",
            l.sha256, l.origin
        )
        .expect("writing to a String");
    }
    text
}

/// The list as a JSON array of objects.
pub fn json(listed: &[Listing]) -> serde_json::Value {
    listed
        .iter()
        .map(|l| {
            serde_json::json!({
                "name": l.name,
                "kind": l.kind.name(),
                "version": l.version,
                "size_bytes": l.size_bytes,
                "sha256": l.sha256,
                "origin": l.origin.to_string(),
                "shadowed": l.shadowed,
            })
        })
        .collect()
}
