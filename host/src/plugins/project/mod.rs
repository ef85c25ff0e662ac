//! A plugin's source folder: `tunehost plugins new` writes one, `tunehost plugins build` makes its component.

mod build;
mod c;
mod encode;
mod javascript;
mod new;
mod python;
mod rust;
mod templates;
mod tool;

pub use build::{json, text};
pub use new::new;

use std::fmt;
use std::path::{Path, PathBuf};

use super::Kind;
use super::metadata::is_hyphenated;
use crate::error::{Error, Result};

/// A language that plugins can be written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum Language {
    /// With cargo and the target wasm32-unknown-unknown.
    Rust,
    /// With componentize-py.
    Python,
    /// With componentize-js on node.
    JavaScript,
    /// With `zig cc`.
    C,
}

impl Language {
    /// Every language there is.
    pub const ALL: [Language; 4] = [Language::Rust, Language::Python, Language::JavaScript, Language::C];

    /// Its name on the command line and in `plugin.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Language::Rust => "rust",
            Language::Python => "python",
            Language::JavaScript => "javascript",
            Language::C => "c",
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A source folder that can be built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    folder: PathBuf,
    name: String,
    sources: Sources,
}

/// What the folder holds, and what its `plugin.toml` says. In Rust version and kind are in what is built: the SDK puts
/// them there.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Sources {
    Rust,
    Python(Guest),
    JavaScript(Guest),
    C(Guest),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Guest {
    version: String,
    kind: Kind,
    /// Whether it exports the interface `memory` too.
    memory: bool,
}

impl Guest {
    /// Its world in `wit/`.
    fn world(&self) -> String {
        format!("{}{}", self.kind, if self.memory { "-with-memory" } else { "" })
    }
}

#[derive(serde::Deserialize)]
struct CargoManifest {
    package: CargoPackage,
}

#[derive(serde::Deserialize)]
struct CargoPackage {
    name: String,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginManifest {
    name: String,
    version: String,
    kind: String,
    language: Language,
    #[serde(default)]
    memory: bool,
}

impl Project {
    /// The project in `folder`: a `plugin.toml`, or in Rust a `Cargo.toml`.
    ///
    /// # Errors
    /// `usage::no_project`, `usage::bad_project`, class `io`.
    pub fn open(folder: &Path) -> Result<Self> {
        let folder = folder.canonicalize().map_err(|error| Error::io("open", folder, error))?;
        let (cargo, plugin) = (folder.join("Cargo.toml"), folder.join("plugin.toml"));
        if plugin.exists() {
            let PluginManifest { name, version, kind, language, memory } = parse(&plugin)?;
            let place = plugin.display().to_string();
            check_name(&name).map_err(|error| error.at(&place))?;
            let guest = Guest { version, kind: Kind::parse(&kind).map_err(|error| error.at(&place))?, memory };
            if memory && guest.kind != Kind::CheckpointScheduler {
                let why = format!("`memory` is true, but a plugin of the kind {kind} has none");
                return Err(bad_project(&plugin, &why));
            }
            let sources = match language {
                Language::Rust => {
                    return Err(bad_project(&plugin, "a project in Rust has a Cargo.toml in place of this file"));
                }
                Language::Python => Sources::Python(guest),
                Language::JavaScript => Sources::JavaScript(guest),
                Language::C => Sources::C(guest),
            };
            return Ok(Self { folder, name, sources });
        }
        if cargo.exists() {
            let CargoManifest { package: CargoPackage { name } } = parse(&cargo)?;
            return Ok(Self { folder, name, sources: Sources::Rust });
        }
        Err(Error::new("usage::no_project", format!("{} is no plugin's source folder", folder.display()))
            .expected("a Cargo.toml (Rust) or a plugin.toml (other languages) in it")
            .help("`tunehost plugins new` writes such a folder"))
    }

    /// The plugin's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The language that it is written in.
    pub fn language(&self) -> Language {
        match self.sources {
            Sources::Rust => Language::Rust,
            Sources::Python(_) => Language::Python,
            Sources::JavaScript(_) => Language::JavaScript,
            Sources::C(_) => Language::C,
        }
    }

    /// The folder that everything is built in.
    fn target(&self) -> PathBuf {
        self.folder.join("target")
    }
}

/// A name is also that of a folder, a cargo package and a file.
fn check_name(name: &str) -> Result<()> {
    // The SDK lies in a new project's workspace under its own name.
    let taken = name == "tunehost-plugin-sdk";
    if name.starts_with(|first: char| first.is_ascii_lowercase()) && is_hyphenated(name) && !taken {
        return Ok(());
    }
    Err(Error::new("usage::invalid_value", format!("{name:?} is no name for a plugin"))
        .expected("lower case words joined by hyphens, such as longest-first"))
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).map_err(|error| Error::io("read", path, error))?;
    toml::from_str(&text).map_err(|error| bad_project(path, error.to_string().trim()))
}

fn bad_project(path: &Path, why: &str) -> Error {
    Error::new("usage::bad_project", format!("{}: {why}", path.display())).expected(
        match path.ends_with("Cargo.toml") {
            true => "package.name, as cargo wants it",
            false => "name, version, kind (such as sampler), language (python, javascript or c), and where it has one, memory",
        },
    )
}
