//! The resolved configuration as text.

use super::{Origin, Resolved, entries, paths};
use crate::error::{Error, Result};

/// One line per key: its value and where it came from.
pub fn show(resolved: &Resolved) -> String {
    let lines: Vec<(String, String)> = entries(&resolved.config)
        .into_iter()
        .map(|entry| {
            let key = &entry.key;
            let line = entry.text().map_or(format!("# {key} is not set"), |text| format!("{key} = {text}"));
            (line, resolved.origins.get(key).unwrap_or(&Origin::Default).to_string())
        })
        .collect();
    // One very long value does not push every comment to the right.
    let width = lines.iter().map(|(line, _)| line.chars().count()).filter(|width| *width <= 60).max().unwrap_or(0);
    lines.iter().map(|(line, origin)| format!("{line:<width$}   # {origin}\n")).collect()
}

/// A file that [`load`](super::load) reads into the same configuration from any directory: every key is written out,
/// every path is absolute.
///
/// # Errors
/// When the current directory is gone, or is no UTF-8.
pub fn to_toml(resolved: &Resolved) -> Result<String> {
    let mut config = resolved.config.clone();
    paths::make_absolute(&mut config).map_err(|e| Error::io("find", ".".as_ref(), e))?;
    toml::to_string(&config)
        .map_err(|e| Error::new("config::not_writable", format!("cannot write the values as TOML: {e}")))
}
