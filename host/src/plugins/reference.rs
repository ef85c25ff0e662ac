//! From what a user wrote, `bucket-to-pair` or `path/to/x.wasm@sha256:...`, to the bytes of one plugin.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use super::{Kind, Limits, Metadata, bundled, listing};
use crate::config::PluginsConfig;
use crate::error::{Error, Result};

/// Largest component that is read, bytes; an interpreter takes twenty million.
const COMPONENT_BYTES_MAX: u64 = 512 << 20;

/// Where a plugin's bytes came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Inside the program.
    Bundled,
    /// A file.
    File(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Bundled => f.write_str("bundled"),
            Origin::File(path) => path.display().fmt(f),
        }
    }
}

/// Which plugin it is: what listings, errors and provenance show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its own name, or its file's where it carries none.
    pub name: String,
    /// Its own version, or `unknown`.
    pub version: String,
    /// Its kind.
    pub kind: Kind,
    /// The version of the contract it was built for.
    pub contract: String,
    /// Lower case hex digits of the component's SHA-256.
    pub sha256: String,
    /// Where the bytes came from.
    pub origin: Origin,
    /// Whether name and version stand in its bytes.
    pub(super) described: bool,
}

/// `plugin NAME VERSION`, and the path where it is a file.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {} {}", self.name, self.version)?;
        match &self.origin {
            Origin::Bundled => Ok(()),
            Origin::File(path) => write!(f, " ({})", path.display()),
        }
    }
}

/// A plugin that was found, read, hashed and checked, but not compiled, and the limits that it will run under.
#[derive(Debug, Clone)]
pub struct PluginRef {
    identity: Identity,
    imports: Vec<String>,
    limits: Limits,
    settings_in: String,
    bytes: Cow<'static, [u8]>,
}

impl PluginRef {
    /// Find the plugin that `spec` means: a name, looked for as `<name>.wasm` in each folder of `search_path` and then
    /// among the bundled ones, or a path (it has a `/` or ends in `.wasm`); either may end in `@sha256:<64 hex
    /// digits>`, which the bytes must then have.
    ///
    /// # Errors
    /// `plugin::not_found`, `plugin::hash_mismatch`, `plugin::wrong_kind` where it is not of `kind`,
    /// `usage::bad_plugin_pin`, `io::failed`, and those of [`Metadata::read`].
    pub fn resolve(kind: Kind, spec: &str, search_path: &[PathBuf]) -> Result<Self> {
        let plugin = Self::find(Some(kind), spec, search_path)?;
        let found = &plugin.identity;
        if found.kind != kind {
            return Err(Error::new("plugin::wrong_kind", format!("{found} is of the kind {}", found.kind))
                .expected(format!("one of the kind {kind}"))
                .help(format!(
                    "`tunehost plugins list` shows each plugin's kind; here one of {}",
                    names_of(Some(kind), search_path)
                )));
        }
        Ok(plugin)
    }

    /// The plugin of a kind that the configuration names, under the limits that it sets.
    ///
    /// # Errors
    /// Those of [`PluginRef::resolve`].
    pub fn configured(kind: Kind, plugins: &PluginsConfig) -> Result<Self> {
        let plugin = Self::resolve(kind, plugins.of(kind.config_key()), &plugins.search_path)?;
        Ok(plugin.within(Limits::configured(kind, plugins)))
    }

    /// As [`PluginRef::resolve`], of whatever kind.
    ///
    /// # Errors
    /// Those of [`PluginRef::resolve`] but `plugin::wrong_kind` for another kind.
    pub fn resolve_any(spec: &str, search_path: &[PathBuf]) -> Result<Self> {
        Self::find(None, spec, search_path)
    }

    fn find(kind: Option<Kind>, spec: &str, search_path: &[PathBuf]) -> Result<Self> {
        let (name, pin) = match spec.split_once("@sha256:") {
            Some((name, pin)) => (name, Some(parse_pin(pin, spec)?)),
            None => (spec, None),
        };
        let (origin, bytes) = find(kind, name, search_path)?;
        let plugin = Self::new(name, origin, bytes)?;
        let found = &plugin.identity;
        if let Some(pin) = pin.filter(|pin| *pin != found.sha256) {
            return Err(Error::new("plugin::hash_mismatch", format!("{found} has sha256 {}", found.sha256))
                .expected(format!("sha256 {pin}, as pinned"))
                .help("it is another build than the one that was pinned: find out why before you change the pin"));
        }
        Ok(plugin)
    }

    /// A plugin of known bytes; `given` is what the user called it.
    pub(super) fn new(given: &str, origin: Origin, bytes: Cow<'static, [u8]>) -> Result<Self> {
        let label = match &origin {
            Origin::Bundled => format!("plugin {given}"),
            Origin::File(path) => format!("plugin {}", path.display()),
        };
        let metadata = Metadata::read(&bytes, &label)?;
        let identity = Identity {
            described: metadata.name.is_some(),
            name: metadata.name.unwrap_or_else(|| stem(Path::new(given))),
            version: metadata.version.unwrap_or_else(|| "unknown".into()),
            kind: metadata.kind,
            contract: metadata.contract,
            sha256: crate::hash::sha256(&bytes),
            origin,
        };
        let settings_in = format!("[plugins.config.{}]", identity.kind.config_key());
        Ok(Self { limits: Limits::of(identity.kind), imports: metadata.imports, identity, settings_in, bytes })
    }

    /// The same plugin under other limits than those of its kind.
    pub fn within(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// The same plugin with settings from elsewhere than a configuration: how errors call that place, such as a flag.
    pub fn set_by(self, settings_in: &str) -> Self {
        Self { settings_in: settings_in.into(), ..self }
    }

    /// Where its settings are written.
    pub(super) fn settings_in(&self) -> &str {
        &self.settings_in
    }

    /// The limits that it will run under.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Everything it imports, in its own order.
    pub fn imports(&self) -> &[String] {
        &self.imports
    }

    /// Which plugin it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The component.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The bytes of a component's file; what is no file (a pipe would never end) or far too large is not read.
///
/// # Errors
/// Class `io`, `plugin::not_a_component`.
pub(super) fn read_component(path: &Path) -> Result<Vec<u8>> {
    let metadata = std::fs::metadata(path).map_err(|error| Error::io("read the plugin", path, error))?;
    if !metadata.is_file() || metadata.len() > COMPONENT_BYTES_MAX {
        let what = format!("{} is no file, or one of more than {} MiB", path.display(), COMPONENT_BYTES_MAX >> 20);
        return Err(Error::new("plugin::not_a_component", what).expected("a WebAssembly component"));
    }
    std::fs::read(path).map_err(|error| Error::io("read the plugin", path, error))
}

fn find(kind: Option<Kind>, name: &str, search_path: &[PathBuf]) -> Result<(Origin, Cow<'static, [u8]>)> {
    let wanted = kind.map_or(String::new(), |kind| format!(" for the {kind}"));
    let read = |path: PathBuf| {
        let bytes = read_component(&path)?;
        Ok((Origin::File(path), Cow::Owned(bytes)))
    };
    if name.contains('/') || name.ends_with(".wasm") {
        let path = PathBuf::from(name);
        if !path.exists() {
            return Err(Error::new("plugin::not_found", format!("there is no file {name}{wanted}")).help(
                "a path in a file is taken from that file's folder, one on the command line from the current one",
            ));
        }
        return read(path);
    }
    // A folder that is not there would leave the name to the next one, and so to another plugin.
    for folder in search_path {
        std::fs::read_dir(folder).map_err(|error| Error::io("look for plugins in", folder, error))?;
    }
    if let Some(path) = search_path.iter().map(|folder| folder.join(format!("{name}.wasm"))).find(|path| path.is_file())
    {
        return read(path);
    }
    if let Some(bytes) = bundled::find(name) {
        return Ok((Origin::Bundled, Cow::Borrowed(bytes)));
    }
    let searched: String = search_path.iter().map(|folder| format!(" or in {}", folder.display())).collect();
    Err(Error::new(
        "plugin::not_found",
        format!("there is no plugin {name:?}{wanted} among the bundled ones{searched}"),
    )
    .expected(format!("one of {}, or a path to a .wasm file", names_of(kind, search_path)))
    .help("`tunehost plugins list` shows every plugin that can be named"))
}

/// The names a user could have given for this kind, or for any.
fn names_of(kind: Option<Kind>, search_path: &[PathBuf]) -> String {
    let (listed, _) = listing::list(search_path);
    let names: Vec<String> =
        listed.into_iter().filter(|l| kind.is_none_or(|kind| l.kind == kind) && !l.shadowed).map(|l| l.name).collect();
    names.join(", ")
}

fn parse_pin(pin: &str, spec: &str) -> Result<String> {
    if pin.len() == 64 && pin.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(pin.to_ascii_lowercase());
    }
    Err(Error::new("usage::bad_plugin_pin", format!("{pin:?} in {spec:?} is no SHA-256"))
        .expected("@sha256: and 64 hex digits, as `tunehost plugins list` prints them"))
}

/// A file's name without folder and extension.
fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
