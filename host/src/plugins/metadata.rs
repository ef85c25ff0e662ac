//! What a component says about itself, read from its bytes. Nothing is compiled or run here.

use wasmparser::{Encoding, Parser, Payload};

use super::runtime::shown;
use super::versions::{self, PUBLISHED};
use super::{Kind, imports};
use crate::error::{Error, Result};

/// The custom section with `{"name": "...", "version": "..."}`.
pub(super) const SECTION: &str = "tunehost-plugin";
/// Longest name or version.
const LABEL_BYTES_MAX: usize = 64;
const PACKAGE: &str = "tunehost:plugin/";

/// A plugin's name, version, kind and contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// The plugin's own name; `None` where it carries none.
    pub name: Option<String>,
    /// The plugin's own version; `None` where it carries none.
    pub version: Option<String>,
    /// The kind whose interface it exports.
    pub kind: Kind,
    /// The version of the contract it was built for, such as `0.1.0`.
    pub contract: String,
    /// Everything it imports, in the component's own order.
    pub imports: Vec<String>,
}

#[derive(serde::Deserialize)]
struct Section {
    name: String,
    version: String,
}

impl Metadata {
    /// Read a component's bytes; `label` is what errors call it.
    ///
    /// # Errors
    /// `plugin::not_a_component`, `plugin::wrong_kind` (no kind of tunehost's), `plugin::contract_too_new`,
    /// `plugin::contract_unknown`, `plugin::forbidden_import`, `plugin::misdescribed` (its section is no JSON of that
    /// form).
    pub fn read(bytes: &[u8], label: &str) -> Result<Self> {
        let outside = Outside::read(bytes, label)?;
        let (kind, contract) = outside.kind(label)?;
        let contract = contract.to_string();
        imports::check(&outside.imports, label)?;
        let (name, version) = outside.section.map(|section| (section.name, section.version)).unzip();
        Ok(Self { name, version, kind, contract, imports: outside.imports })
    }
}

/// A component's outermost imports and exports, and its metadata section, which may lie in a module within.
struct Outside {
    imports: Vec<String>,
    exports: Vec<String>,
    section: Option<Section>,
}

impl Outside {
    fn read(bytes: &[u8], label: &str) -> Result<Self> {
        let mut outside = Self { imports: Vec::new(), exports: Vec::new(), section: None };
        let mut depth = 0;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload.map_err(|error| damaged(label, &error))? {
                Payload::Version { encoding: Encoding::Module, .. } if depth == 0 => {
                    return Err(not_a_component(label, "it is a core WebAssembly module"));
                }
                Payload::Version { .. } => depth += 1,
                Payload::End(_) => depth -= 1,
                Payload::ComponentImportSection(section) if depth == 1 => {
                    for import in section {
                        outside.imports.push(import.map_err(|error| damaged(label, &error))?.name.name.to_string());
                    }
                }
                Payload::ComponentExportSection(section) if depth == 1 => {
                    for export in section {
                        outside.exports.push(export.map_err(|error| damaged(label, &error))?.name.name.to_string());
                    }
                }
                Payload::CustomSection(section)
                    if section.name() == SECTION && (depth == 1 || outside.section.is_none()) =>
                {
                    outside.section = Some(parse_section(section.data(), label)?);
                }
                _ => {}
            }
        }
        Ok(outside)
    }

    /// The one kind of tunehost's that is exported, and the contract's version.
    fn kind(&self, label: &str) -> Result<(Kind, &str)> {
        let ours = || self.exports.iter().filter_map(|name| name.strip_prefix(PACKAGE)?.split_once('@'));
        // A component of a newer contract may be of a kind that this host has never heard of: the version is what to
        // say.
        for (_, version) in ours() {
            versions::resolve(version, &PUBLISHED, label)?;
        }
        let mut kinds = ours().filter_map(|(interface, version)| {
            Kind::ALL.into_iter().find(|kind| kind.interface() == interface).map(|kind| (kind, version))
        });
        match (kinds.next(), kinds.next()) {
            (Some(kind), None) => Ok(kind),
            (None, _) => {
                Err(Error::new("plugin::wrong_kind", format!("{label} is a component, but no plugin of tunehost's"))
                    .expected(format!(
                        "an export of one of the worlds in wit/: {}",
                        Kind::ALL.map(Kind::name).join(", ")
                    ))
                    .help(format!("it exports {}", list(&self.exports))))
            }
            (Some(_), Some(_)) => Err(Error::new("plugin::wrong_kind", format!("{label} is of more than one kind"))
                .expected("a component for each kind")
                .help(format!("it exports {}", list(&self.exports)))),
        }
    }
}

fn parse_section(json: &[u8], label: &str) -> Result<Section> {
    let unfit = |why: String| {
        Error::new("plugin::misdescribed", format!("{label}: its custom section `{SECTION}` {why}"))
            .expected(r#"{"name": "lower-case-words", "version": "1.2.3"}"#)
            .help("rebuild the plugin with plugins/sdk, or write the section as wit/plugin.wit says")
    };
    let section: Section = serde_json::from_slice(json).map_err(|error| unfit(format!("cannot be read: {error}")))?;
    // They stand in listings and errors: what is no name is not shown as one.
    if section.name.len() > LABEL_BYTES_MAX || !is_hyphenated(&section.name) {
        return Err(unfit(format!("has the name {:?}", shown(&section.name))));
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || b".-+".contains(&b);
    let numbered = section.version.starts_with(|first: char| first.is_ascii_digit());
    if section.version.len() > LABEL_BYTES_MAX || !numbered || !section.version.bytes().all(plain) {
        return Err(unfit(format!("has the version {:?}", shown(&section.version))));
    }
    Ok(section)
}

/// Whether `name` is lower case words, of letters and digits, joined by hyphens.
pub(super) fn is_hyphenated(name: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    name.split('-').all(is_word)
}

fn damaged(label: &str, error: &wasmparser::BinaryReaderError) -> Error {
    not_a_component(label, &format!("at byte {}: {}", error.offset(), error.message()))
}

fn not_a_component(label: &str, why: &str) -> Error {
    Error::new("plugin::not_a_component", format!("{label} is no whole WebAssembly component: {why}"))
        .expected("a component, as wasm-component-ld or `wasm-tools component new` makes it")
        .help("build it again, or copy it again if it was cut off")
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "nothing".into() } else { shown(&names.join(", ")) }
}
