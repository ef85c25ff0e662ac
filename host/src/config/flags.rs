//! `--set KEY=VALUE`, `--plugins KIND=PLUGIN` and `--limit KEY=VALUE`.

use super::tree::{Node, Value, parse_flag_value};
use super::{LimitsConfig, Origin, PLUGIN_KINDS};
use crate::error::{Error, Result};
use std::collections::BTreeMap;

/// One flag: the key it sets and the value it sets it to.
pub(super) struct Flag {
    pub key: Vec<String>,
    pub node: Node,
}

/// Reads all flags. Two that set the same key, or one a table and the other a key in it, contradict each other.
pub(super) fn parse(sets: &[String], plugin_flags: &[String]) -> Result<Vec<Flag>> {
    let sets = sets.iter().map(|text| parse_set(text));
    let flags: Vec<Flag> = sets.chain(plugin_flags.iter().map(|text| parse_plugin(text))).collect::<Result<_>>()?;
    for (i, later) in flags.iter().enumerate() {
        for earlier in &flags[..i] {
            if later.key.starts_with(&earlier.key) || earlier.key.starts_with(&later.key) {
                let message = format!("`{}` and `{}` set the same key", earlier.node.origin, later.node.origin);
                return Err(Error::new("usage::conflict", message).help("give one of them"));
            }
        }
    }
    Ok(flags)
}

fn parse_set(text: &str) -> Result<Flag> {
    let wrong = || Error::new("usage::set", format!("cannot read `--set {text}`")).expected("--set KEY=VALUE");
    let (key, value) = text.split_once('=').ok_or_else(wrong)?;
    let key: Vec<String> = key.split('.').map(|name| name.trim().to_string()).collect();
    if key.iter().any(String::is_empty) {
        return Err(wrong());
    }
    Ok(Flag { key, node: parse_flag_value(value.trim(), &Origin::Set(text.into()))? })
}

fn parse_plugin(text: &str) -> Result<Flag> {
    let flags: Vec<String> = PLUGIN_KINDS.iter().map(|kind| kind.replace('_', "-")).collect();
    let known = format!("--plugins KIND=PLUGIN, where KIND is one of {}", flags.join(", "));
    let wrong = || Error::new("usage::plugins", format!("cannot read `--plugins {text}`")).expected(&known);
    let (kind, plugin) = text.split_once('=').ok_or_else(wrong)?;
    let position = flags.iter().position(|flag| flag == kind).ok_or_else(wrong)?;
    if plugin.is_empty() {
        return Err(wrong());
    }
    let key = vec!["plugins".into(), PLUGIN_KINDS[position].into()];
    Ok(Flag { key, node: Node { value: Value::String(plugin.into()), origin: Origin::Plugins(text.into()) } })
}

/// Reads the flags `--set KEY=VALUE` of a command whose keys are a plugin's own: an object with the values as TOML reads them,
/// and as text where it does not.
///
/// # Errors
/// `usage::set`, `usage::conflict`.
pub fn parse_settings(flags: &[String]) -> Result<serde_json::Value> {
    let mut settings = serde_json::Map::new();
    for flag in flags {
        let Some((key, text)) = flag.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(Error::new("usage::set", format!("cannot read `--set {flag}`")).expected("--set KEY=VALUE"));
        };
        let read = toml::from_str::<BTreeMap<String, serde_json::Value>>(&format!("value = {text}"));
        let value = read.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(|| text.into());
        if settings.insert(key.into(), value).is_some() {
            return Err(Error::new("usage::conflict", format!("--set {key} is given twice")).help("give one of them"));
        }
    }
    Ok(settings.into())
}

/// Reads the flags `--limit KEY=VALUE` of a command that has no configuration.
///
/// # Errors
/// `usage::limit`, `usage::conflict`.
pub fn parse_limits(flags: &[String]) -> Result<LimitsConfig> {
    let known = LimitsConfig::default().named();
    let mut given = serde_json::Map::new();
    for flag in flags {
        let wrong = || Error::new("usage::limit", format!("cannot read `--limit {flag}`"));
        let Some((key, value)) = flag.split_once('=') else { return Err(wrong().expected("--limit KEY=VALUE")) };
        let Some((_, _, range)) = known.iter().find(|(name, ..)| *name == key) else {
            let names = known.each_ref().map(|(name, ..)| *name);
            return Err(wrong().expected(format!("KEY is one of {}", names.join(", "))));
        };
        let Some(value) = value.parse().ok().filter(|value: &u64| range.contains(value)) else {
            return Err(wrong().expected(format!("{key} is {} to {}", range.start(), range.end())));
        };
        if given.insert(key.into(), value.into()).is_some() {
            return Err(Error::new("usage::conflict", format!("--limit {key} is given twice")).help("give one of them"));
        }
    }
    Ok(serde_json::from_value(given.into()).expect("every name and type was checked"))
}
