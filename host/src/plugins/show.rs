//! What `tunehost plugins show` says about one plugin.

use std::fmt::Write;

use serde_json::{Value, json};

use super::schema::Schema;
use super::{Description, Identity, Limits, PluginRef};
use crate::error::Result;

/// Everything known about a plugin that was asked to describe itself.
#[derive(Debug)]
pub struct Sheet {
    identity: Identity,
    size_bytes: usize,
    imports: Vec<String>,
    limits: Limits,
    description: Description,
}

impl Sheet {
    /// Start the plugin without settings and ask it.
    ///
    /// # Errors
    /// Those of [`Description::of`].
    pub fn of(plugin: &PluginRef) -> Result<Self> {
        let identity = plugin.identity().clone();
        Ok(Self {
            size_bytes: plugin.bytes().len(),
            imports: plugin.imports().to_vec(),
            limits: plugin.limits().clone(),
            description: Description::of(plugin)?,
            identity,
        })
    }

    /// As aligned lines.
    pub fn text(&self) -> String {
        let Self { identity, limits, .. } = self;
        let imports = if self.imports.is_empty() { "nothing".into() } else { self.imports.join(", ") };
        let mut text = format!(
            "plugin    {} {}\nkind      {}, contract {}\ndecides   {}\nfrom      {}, {:.0} KiB\nsha256    {}\n\
             imports   {imports}\nlimits    {} MiB of memory, {} s a call ({} s to start), answers of {} MiB, {} log \
             lines a minute\nwasi      {}\nsettings  ",
            identity.name,
            identity.version,
            identity.kind,
            identity.contract,
            self.description.description,
            identity.origin,
            self.size_bytes as f64 / 1024.0,
            identity.sha256,
            limits.memory_mib,
            limits.call_deadline_ms as f64 / 1e3,
            limits.start_deadline_ms as f64 / 1e3,
            limits.answer_mib,
            limits.log_lines_per_minute,
            if limits.wasi { "allowed, a virtual one" } else { "off" },
        );
        match Schema::parse(&self.description.config_schema) {
            Ok(schema) if schema.properties().next().is_none() => text.push_str("none\n"),
            Ok(schema) => {
                writeln!(text, "[plugins.config.{}]", identity.kind.config_key()).expect("writing to a String");
                for (name, property) in schema.properties() {
                    let what = schema.summary(name, property);
                    writeln!(text, "  {name:16} {what}").expect("writing to a String");
                }
            }
            Err(why) => writeln!(text, "cannot be shown: {why}").expect("writing to a String"),
        }
        text
    }

    /// As one JSON object.
    pub fn json(&self) -> Value {
        let Self { identity, limits, description, .. } = self;
        json!({
            "name": identity.name,
            "version": identity.version,
            "kind": identity.kind.name(),
            "contract": identity.contract,
            "description": description.description,
            "origin": identity.origin.to_string(),
            "size_bytes": self.size_bytes,
            "sha256": identity.sha256,
            "imports": self.imports,
            "limits": limits,
            "config_schema": serde_json::from_str(&description.config_schema)
                .unwrap_or_else(|_| Value::String(description.config_schema.clone())),
        })
    }
}
