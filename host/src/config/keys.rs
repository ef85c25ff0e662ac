//! Dotted names of configuration keys.

use super::{Config, LimitsConfig, PLUGIN_KINDS};
use serde_json::Value;

/// One key of a configuration with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Dotted name, such as `train.lr` or `data.sources[0].path`.
    pub key: String,
    /// The value; null where an optional key is not set.
    pub value: Value,
}

impl Entry {
    /// The value as TOML in one line; nothing where it is not set.
    pub fn text(&self) -> Option<String> {
        if self.value.is_null() { None } else { Some(toml_text(&self.value)) }
    }
}

/// A value as TOML in one line.
pub(super) fn toml_text(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(toml_text).collect::<Vec<_>>().join(", ")),
        // The toml crate writes every digit, 0.00000001 for 1e-8, and breaks a text at its line breaks. JSON's escapes
        // are TOML's too.
        Value::Number(number) if number.is_f64() => format!("{:?}", number.as_f64().unwrap_or_default()),
        Value::String(_) => value.to_string(),
        value => toml::Value::try_from(value).map_or_else(|e| e.to_string(), |value| value.to_string()),
    }
}

/// Every key of the configuration in the order of the schema. An array of tables is listed element by element, any
/// other array is one value.
pub fn entries(config: &Config) -> Vec<Entry> {
    let value = serde_json::to_value(config).expect("a configuration has string keys and finite numbers");
    let mut out = Vec::new();
    flatten(String::new(), value, &mut out);
    out
}

fn flatten(key: String, value: Value, out: &mut Vec<Entry>) {
    match value {
        Value::Object(table) if !table.is_empty() => {
            table.into_iter().for_each(|(name, value)| flatten(join(&key, &name), value, out));
        }
        Value::Array(items) if items.first().is_some_and(Value::is_object) => {
            items.into_iter().enumerate().for_each(|(i, value)| flatten(index(&key, i), value, out));
        }
        value => out.push(Entry { key, value }),
    }
}

/// `table.name`; a name that TOML would have to quote is quoted.
pub(super) fn join(table: &str, name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let name = if bare { name.to_string() } else { format!("{name:?}") };
    if table.is_empty() { name } else { format!("{table}.{name}") }
}

/// `array[i]`.
pub(super) fn index(array: &str, i: usize) -> String {
    format!("{array}[{i}]")
}

/// Every table and key that the schema knows, without array indices.
pub(super) fn known() -> Vec<String> {
    let smallest = r#"
        name = ""
        model.base = ""
        data = { max_seq_len = 0, sources = [{ path = "", root = "" }] }
    "#;
    let mut config: Config = toml::from_str(smallest).expect("the smallest configuration holds every required key");
    config.plugins.limits = PLUGIN_KINDS.map(|kind| (kind.to_string(), LimitsConfig::default())).into();
    let mut known = Vec::new();
    for entry in entries(&config) {
        let key = entry.key.replace("[0]", "");
        let tables = key.match_indices('.').map(|(at, _)| key[..at].to_string()).collect::<Vec<_>>();
        for name in tables.into_iter().chain([key]) {
            if !known.contains(&name) {
                known.push(name);
            }
        }
    }
    known
}

/// The known key that `key` was most likely meant to be, if one is near.
pub(super) fn nearest(key: &str, extra: &[&str]) -> Option<String> {
    const NEAR: f64 = 0.7;
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
    let score = |known: &str| {
        let whole = strsim::normalized_damerau_levenshtein(key, known);
        // The right name in the wrong table, a little less than the right table.
        let name = 0.95 * strsim::normalized_damerau_levenshtein(&last(key), &last(known));
        whole.max(name)
    };
    let candidates = known().into_iter().chain(extra.iter().map(|name| name.to_string()));
    let scored = candidates.map(|known| (score(&known), known));
    scored.filter(|(score, _)| *score >= NEAR).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}
