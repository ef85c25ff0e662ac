//! TOML values that know where they were written, and how files extend one another.

use super::{Origin, PLUGIN_KINDS, keys};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// A value and the place of its key.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub value: Value,
    pub origin: Origin,
}

/// TOML's values; a date is kept as its text, and every float is finite.
#[derive(Debug, Clone)]
pub(super) enum Value {
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

/// Reads a file and every file it extends into one tree.
pub(super) fn load(path: &Path) -> Result<Node> {
    let text = read(path).map_err(unreadable)?;
    load_text(path, &text, &mut Vec::new())
}

fn unreadable(message: String) -> Error {
    Error::new("config::unreadable", message)
        .expected("a TOML file in UTF-8 that this user may read")
        .help("look at the path: one in a file is taken from that file's folder, one on the command line from the current one")
}

fn read(path: &Path) -> std::result::Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn load_text(path: &Path, text: &str, chain: &mut Vec<PathBuf>) -> Result<Node> {
    chain.push(path.into());
    let mut tree = parse_file(path, text)?;
    let Value::Table(table) = &mut tree.value else { unreachable!("a TOML document is a table") };
    let Some(extends) = table.remove("extends") else { return Ok(tree) };
    let Value::String(base) = &extends.value else {
        let message = format!("{}: `extends` is {}", extends.origin, extends.value.describe());
        return Err(Error::new("config::wrong_type", message).expected("the path of one file"));
    };

    let base = path.parent().unwrap_or(Path::new("")).join(base);
    let text = read(&base).map_err(|e| unreadable(format!("{}: {e}", extends.origin)))?;
    let same_file = |a: &Path| a.canonicalize().ok() == base.canonicalize().ok();
    if chain.iter().any(|earlier| same_file(earlier)) {
        let names: Vec<_> = chain.iter().chain([&base]).map(|p| p.display().to_string()).collect();
        let message = format!("{}: files extend one another in a circle: {}", extends.origin, names.join(" -> "));
        return Err(Error::new("config::extends_cycle", message));
    }
    let mut base = load_text(&base, &text, chain)?;
    base.forget_settings_of_replaced_plugins(&tree);
    base.merge(tree);
    Ok(base)
}

fn parse_file(path: &Path, text: &str) -> Result<Node> {
    let at =
        |span: Range<usize>| Origin::File { path: path.into(), line: 1 + text[..span.start].matches('\n').count() };
    let document = DeTable::parse(text).map_err(|e| {
        let place = e.span().map_or_else(|| path.display().to_string(), |span| at(span).to_string());
        Error::new("config::syntax", format!("{place}: {}", e.message()))
    })?;
    Ok(Node { value: table(document.get_ref(), &at)?, origin: at(0..0) })
}

/// The value of a flag: TOML where it is TOML, else the text itself.
pub(super) fn parse_flag_value(text: &str, origin: &Origin) -> Result<Node> {
    let value = match DeValue::parse(text) {
        Ok(parsed) => value(parsed.get_ref(), &|_| origin.clone(), origin)?,
        Err(_) => Value::String(text.into()),
    };
    Ok(Node { value, origin: origin.clone() })
}

fn table(table: &DeTable, at: &dyn Fn(Range<usize>) -> Origin) -> Result<Value> {
    let mut out = BTreeMap::new();
    for (key, item) in table {
        let origin = at(key.span());
        out.insert(key.get_ref().to_string(), Node { value: value(item.get_ref(), at, &origin)?, origin });
    }
    Ok(Value::Table(out))
}

fn value(item: &DeValue, at: &dyn Fn(Range<usize>) -> Origin, origin: &Origin) -> Result<Value> {
    let number = |text: &str, kind: &str| {
        Error::new("config::invalid_value", format!("{origin}: {text} is no number that fits")).expected(kind)
    };
    Ok(match item {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(date) => Value::String(date.to_string()),
        DeValue::Integer(integer) => match i64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(integer) => Value::Integer(integer),
            Err(_) => return Err(number(&integer.to_string(), "a whole number of at most 64 bits")),
        },
        DeValue::Float(float) => match float.as_str().parse() {
            Ok(number) if f64::is_finite(number) => Value::Float(number),
            _ => return Err(number(float.as_str(), "a finite number")),
        },
        DeValue::Array(items) => {
            let element = |item: &toml::Spanned<DeValue>| {
                let origin = at(item.span());
                Ok(Node { value: value(item.get_ref(), at, &origin)?, origin })
            };
            Value::Array(items.iter().map(element).collect::<Result<_>>()?)
        }
        DeValue::Table(inner) => table(inner, at)?,
    })
}

impl Node {
    /// Lays `over` on top: tables merge key by key, everything else is replaced.
    fn merge(&mut self, over: Node) {
        match (&mut self.value, over.value) {
            (Value::Table(under), Value::Table(over)) => {
                for (key, node) in over {
                    match under.get_mut(&key) {
                        Some(below) => below.merge(node),
                        None => _ = under.insert(key, node),
                    }
                }
            }
            (_, value) => *self = Node { value, origin: over.origin },
        }
    }

    /// `node` at `key`, in tables of their own.
    pub(super) fn nested(key: &[String], node: Node) -> Node {
        key.iter().rev().fold(node, |inner, name| Node {
            origin: inner.origin.clone(),
            value: Value::Table(BTreeMap::from([(name.clone(), inner)])),
        })
    }

    /// Lays flags, each a tree of its own, on top.
    pub(super) fn lay_over(&mut self, flags: Vec<Node>) {
        flags.iter().for_each(|flag| self.forget_settings_of_replaced_plugins(flag));
        flags.into_iter().for_each(|flag| self.merge(flag));
    }

    /// Where `over` names another plugin of a kind, the settings, limits and permission below it were meant for the one
    /// it replaces.
    fn forget_settings_of_replaced_plugins(&mut self, over: &Node) {
        for kind in PLUGIN_KINDS {
            let Some(Value::String(new)) = over.at(&["plugins", kind]) else { continue };
            let same = matches!(self.at(&["plugins", kind]), Some(Value::String(old)) if old == new);
            if same {
                continue;
            }
            for table in ["config", "limits"] {
                if let Some(Value::Table(of_kinds)) = self.at_mut(&["plugins", table]) {
                    of_kinds.remove(kind);
                }
            }
            if let Some(Value::Array(kinds)) = self.at_mut(&["plugins", "wasi"]) {
                kinds.retain(|allowed| !matches!(&allowed.value, Value::String(allowed) if allowed == kind));
            }
        }
    }

    fn at(&self, key: &[&str]) -> Option<&Value> {
        key.iter().try_fold(&self.value, |value, name| match value {
            Value::Table(table) => table.get(*name).map(|node| &node.value),
            _ => None,
        })
    }

    fn at_mut(&mut self, key: &[&str]) -> Option<&mut Value> {
        key.iter().try_fold(&mut self.value, |value, name| match value {
            Value::Table(table) => table.get_mut(*name).map(|node| &mut node.value),
            _ => None,
        })
    }

    /// The origin of every table, array, element and value by its dotted name.
    pub(super) fn origins(&self) -> BTreeMap<String, Origin> {
        let mut out = BTreeMap::new();
        self.collect_origins(String::new(), &mut out);
        out
    }

    fn collect_origins(&self, key: String, out: &mut BTreeMap<String, Origin>) {
        match &self.value {
            Value::Table(table) => {
                table.iter().for_each(|(name, node)| node.collect_origins(keys::join(&key, name), out))
            }
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(i, node)| node.collect_origins(keys::index(&key, i), out));
            }
            _ => {}
        }
        out.insert(key, self.origin.clone());
    }
}

impl Value {
    /// What stands there, for an error message.
    pub(super) fn describe(&self) -> String {
        match self {
            Value::String(text) => format!("the string {text:?}"),
            Value::Integer(number) => format!("the number {number}"),
            Value::Float(number) => format!("the number {number:?}"),
            Value::Boolean(flag) => format!("the boolean {flag}"),
            Value::Array(items) => format!("an array of {}", items.len()),
            Value::Table(_) => "a table".into(),
        }
    }
}
