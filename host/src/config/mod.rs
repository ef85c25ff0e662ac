//! What a run is asked to do: TOML files, `extends`, `--set` and `--plugins`, resolved into one typed [`Config`] that
//! remembers where each value came from.
//!
//! A file becomes a tree of values with lines, trees are merged, flags are laid over them, and the result is
//! deserialised into the [`schema`](Config), where every error can still name its file and line.

mod data;
mod de;
mod dtype;
mod flags;
mod gates;
mod keys;
mod paths;
mod schema;
mod show;
mod tree;
mod validate;

pub use data::*;
pub use dtype::{ActivationDtype, WeightDtype};
pub use flags::{parse_limits, parse_settings};
pub use gates::{Action, GatesConfig};
pub use keys::{Entry, entries};
pub use paths::{holds_path, is_plugin_path};
pub use schema::*;
pub use show::{show, to_toml};

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// In a file, at a line counted from 1.
    File {
        /// The file, as it was named.
        path: PathBuf,
        /// The line of the key, or of the element of an array.
        line: usize,
    },
    /// On the command line: `KEY=VALUE` of a `--set`.
    Set(String),
    /// On the command line: `KIND=PLUGIN` of a `--plugins`.
    Plugins(String),
    /// Nowhere: the default of the schema.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Set(text) => write!(f, "--set {text}"),
            Origin::Plugins(text) => write!(f, "--plugins {text}"),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// A checked configuration and where its values came from.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The values. Paths written in a file are already joined with that file's folder, so each is absolute or relative
    /// to the current directory.
    pub config: Config,
    /// Where each key of [`entries`] came from, by its dotted name.
    pub origins: BTreeMap<String, Origin>,
    /// The file that was loaded, not those it extends.
    pub path: PathBuf,
}

/// Loads `path` and the files it extends, lays `sets` (`KEY=VALUE`) and `plugin_flags` (`KIND=PLUGIN`) over it, and
/// checks every value.
///
/// # Errors
/// Class `config`, naming file and line or the flag; class `usage` for a flag that cannot be read or that contradicts
/// another.
pub fn load(path: &Path, sets: &[String], plugin_flags: &[String]) -> Result<Resolved> {
    if path.to_str().is_none() {
        return Err(Error::new("config::unreadable", format!("the path {} is no UTF-8", path.display()))
            .expected("a path in UTF-8, since it is written down as text")
            .help("rename the file or the folder that it is in"));
    }
    let mut tree = tree::load(path)?;
    let flags = flags::parse(sets, plugin_flags)?;
    tree.lay_over(flags.into_iter().map(|flag| tree::Node::nested(&flag.key, flag.node)).collect());
    let mut config: Config = de::from_tree(&tree, path)?;

    let written = tree.origins();
    let origin = |key: &str| written.get(key).cloned().unwrap_or(Origin::Default);
    paths::resolve(&mut config, &origin);
    validate::check(&config, &origin)?;

    let origins = entries(&config).into_iter().map(|entry| (entry.key.clone(), origin(&entry.key))).collect();
    Ok(Resolved { config, origins, path: path.into() })
}

#[cfg(test)]
mod tests;
