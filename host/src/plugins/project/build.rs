//! One build command for every language: its own tools make the component, the host adds what a listing reads and looks
//! at the outcome as it does whenever it finds a plugin. Nothing of the plugin is run.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Project, Sources, c, encode, javascript, python, rust};
use crate::error::{Error, Result};
use crate::plugins::{Identity, Origin, PluginRef, contract};
use crate::run::atomic::{self, Existing};

impl Project {
    /// Build the plugin into `target/<name>.wasm` of its folder.
    ///
    /// # Errors
    /// `plugin::no_tool` with what to install, `plugin::build_failed` with the tool's own words, and those of
    /// [`crate::plugins::Metadata::read`] where the outcome keeps to no world of the contract.
    pub fn build(&self) -> Result<PluginRef> {
        let target = self.target();
        create(&target)?;
        let (mut component, guest) = match &self.sources {
            Sources::Rust => (rust::build(&self.folder)?, None),
            Sources::Python(guest) => (python::build(self, &self.wit()?, &guest.world())?, Some(guest)),
            Sources::JavaScript(guest) => (javascript::build(self, &self.wit()?, &guest.world())?, Some(guest)),
            Sources::C(guest) => (c::build(self, &guest.world())?, Some(guest)),
        };
        if let Some(guest) = guest {
            encode::stamp(&mut component, &self.name, &guest.version);
        }
        let path = target.join(format!("{}.wasm", self.name));
        let plugin = PluginRef::new(&self.name, Origin::File(path.clone()), Cow::Owned(component))?;
        let Identity { name, described, .. } = plugin.identity();
        if !described || *name != self.name {
            return Err(Error::new("plugin::misdescribed", format!("{} names itself {name}", path.display()))
                .expected(format!("{} in a custom section `tunehost-plugin`", self.name))
                .help("in Rust, export the plugin with a macro of plugins/sdk"));
        }
        atomic::write(&path, plugin.bytes(), Existing::Replace)?;
        Ok(plugin)
    }

    /// The contract as files, for tools that read it from a folder.
    fn wit(&self) -> Result<PathBuf> {
        let folder = self.target().join("wit");
        create(&folder)?;
        for (file, text) in contract::FILES {
            atomic::write(&folder.join(file), text.as_bytes(), Existing::Replace)?;
        }
        Ok(folder)
    }
}

/// Where the built plugin lies and what it is, as aligned lines.
pub fn text(plugin: &PluginRef) -> String {
    let Identity { name, version, kind, contract, sha256, origin, .. } = plugin.identity();
    let kib = plugin.bytes().len() as f64 / 1024.0;
    format!(
        "plugin    {name} {version}\nkind      {kind}, contract {contract}\nfile      {origin}, {kib:.0} KiB\n\
         sha256    {sha256}\nnext      tunehost plugins check {origin}\n"
    )
}

/// The same as one JSON object.
pub fn json(plugin: &PluginRef) -> Value {
    let Identity { name, version, kind, contract, sha256, origin, .. } = plugin.identity();
    json!({
        "name": name,
        "version": version,
        "kind": kind.name(),
        "contract": contract,
        "path": origin.to_string(),
        "size_bytes": plugin.bytes().len(),
        "sha256": sha256,
    })
}

pub(super) fn create(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, error))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Error::io("read", path, error))
}
