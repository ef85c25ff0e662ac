//! What a new project is made from. The templates are plugins of this repository, so that they are built and checked as
//! such: the standard ones in Rust, the examples in the other languages.

use super::Language;
use crate::plugins::{Kind, contract};

/// A file of a project.
pub struct File {
    /// Where it lies in the project's folder.
    pub path: String,
    /// What it holds.
    pub text: String,
}

/// A text file of `plugins/`.
macro_rules! text {
    ($path:expr) => {
        include_str!(concat!("../../../../plugins/", $path))
    };
}

/// A template: its own name, which the new one takes the place of, and its source.
struct Template {
    kind: Kind,
    language: Language,
    name: &'static str,
    source: &'static str,
}

macro_rules! template {
    ($kind:ident, $language:ident, $folder:literal, $name:literal, $file:literal) => {
        Template {
            kind: Kind::$kind,
            language: Language::$language,
            name: $name,
            source: text!(concat!($folder, $name, "/", $file)),
        }
    };
}

const TEMPLATES: [Template; 12] = [
    template!(Sampler, Rust, "", "shuffled", "src/lib.rs"),
    template!(CheckpointScheduler, Rust, "", "wall-clock", "src/lib.rs"),
    template!(CorpusFilter, Rust, "", "keep-all", "src/lib.rs"),
    template!(Eligibility, Rust, "", "strict", "src/lib.rs"),
    template!(Exporter, Rust, "", "peft-adapter", "src/lib.rs"),
    template!(Sampler, Python, "examples/", "bucket-to-pair-python", "plugin.py"),
    template!(CheckpointScheduler, Python, "examples/", "every-n-steps-python", "plugin.py"),
    template!(CorpusFilter, Python, "examples/", "length-and-dedup-python", "plugin.py"),
    template!(Sampler, JavaScript, "examples/", "bucket-to-pair-javascript", "plugin.js"),
    template!(CheckpointScheduler, JavaScript, "examples/", "every-n-steps-javascript", "plugin.js"),
    template!(CorpusFilter, JavaScript, "examples/", "length-and-dedup-javascript", "plugin.js"),
    template!(Sampler, C, "examples/", "bucket-to-pair-c", "plugin.c"),
];

const SDK: [(&str, &str); 7] = [
    ("Cargo.toml", text!("sdk/Cargo.toml")),
    ("src/lib.rs", text!("sdk/src/lib.rs")),
    ("src/bindings.rs", text!("sdk/src/bindings.rs")),
    ("src/checkpoint.rs", text!("sdk/src/checkpoint.rs")),
    ("src/export.rs", text!("sdk/src/export.rs")),
    ("src/plan.rs", text!("sdk/src/plan.rs")),
    ("src/rng.rs", text!("sdk/src/rng.rs")),
];

/// The kinds that have a template in a language.
pub fn kinds(language: Language) -> Vec<Kind> {
    TEMPLATES.iter().filter(|template| template.language == language).map(|template| template.kind).collect()
}

/// The files of a new plugin, or `None` where the kind has no template in the language.
pub fn files(name: &str, kind: Kind, language: Language) -> Option<Vec<File>> {
    let template = TEMPLATES.iter().find(|template| (template.kind, template.language) == (kind, language))?;
    let source = template.source.replace(template.name, name);
    let file = |path: &str, text: String| File { path: path.into(), text };
    let manifest = format!("name = \"{name}\"\nversion = \"0.1.0\"\nkind = \"{kind}\"\nlanguage = \"{language}\"\n");
    Some(match language {
        Language::Rust => rust(name, template.source),
        Language::Python => vec![
            file("plugin.toml", manifest),
            file("plugin.py", source),
            file(".gitignore", "/target\n__pycache__\n".into()),
        ],
        Language::JavaScript => vec![
            file("plugin.toml", manifest),
            file("plugin.js", source),
            file("package.json", text!("examples/bucket-to-pair-javascript/package.json").into()),
            file(".gitignore", "/target\n/node_modules\n".into()),
        ],
        Language::C => {
            vec![file("plugin.toml", manifest), file("plugin.c", source), file(".gitignore", "/target\n".into())]
        }
    })
}

/// A workspace of the plugin and its own copy of the SDK and of the contract, so that it builds without this repository.
fn rust(name: &str, source: &str) -> Vec<File> {
    let mut files = vec![
        File { path: "Cargo.toml".into(), text: cargo_toml(name) },
        File { path: "Cargo.lock".into(), text: cargo_lock(name) },
        File { path: "src/lib.rs".into(), text: source.into() },
        File { path: ".gitignore".into(), text: "/target\n".into() },
    ];
    files.extend(SDK.map(|(path, text)| File { path: format!("vendor/sdk/{path}"), text: text.into() }));
    files.extend(contract::FILES.map(|(path, text)| File { path: format!("wit/{path}"), text: text.into() }));
    files
}

fn cargo_toml(name: &str) -> String {
    // The SDK inherits from the workspace that it is in, so this one says what the one in `plugins/` says.
    let shared = text!("Cargo.toml");
    let start = shared.find("[workspace.package]").unwrap_or(0);
    let end = shared.find("[profile.release]").unwrap_or(shared.len());
    let shared = shared[start..end].replace("path = \"sdk\"", "path = \"vendor/sdk\"");
    format!(
        r#"[package]
name = "{name}"
description = "One sentence: what the plugin decides, and how"
version = "0.1.0"
edition = "2024"
publish = false

[lib]
crate-type = ["cdylib"]

[dependencies]
serde = {{ workspace = true }}
serde_json = {{ workspace = true }}
tunehost-plugin-sdk = {{ workspace = true }}

[workspace]
members = ["vendor/sdk"]

{shared}[profile.release]
lto = true
codegen-units = 1
panic = "abort"
strip = "debuginfo"
"#
    )
}

/// The lock of `plugins/` with this plugin in place of those there: the versions that this repository builds with. cargo
/// removes the packages that only the others need.
fn cargo_lock(name: &str) -> String {
    let mut parts = text!("Cargo.lock").split("[[package]]").map(str::trim);
    let head = parts.next().unwrap_or_default();
    let is_kept = |package: &&str| package.contains("source = ") || package.contains("name = \"tunehost-plugin-sdk\"");
    let mut packages: Vec<String> = parts.filter(is_kept).map(String::from).collect();
    packages.push(format!(
        "name = \"{name}\"\nversion = \"0.1.0\"\ndependencies = [\n \"serde\",\n \"serde_json\",\n \
         \"tunehost-plugin-sdk\",\n]"
    ));
    packages.sort();
    packages.iter().fold(head.to_string(), |text, package| text + "\n\n[[package]]\n" + package) + "\n"
}
