//! Deserialises a [`Node`] tree into the schema, so that every error names the key and where it was written.

use super::tree::{Node, Value};
use super::{Config, Origin, keys};
use crate::error::{Error, Result};
use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::{Deserialize, forward_to_deserialize_any};
use std::fmt;
use std::path::Path;

/// The configuration in `tree`; `file` stands for the whole in messages.
pub(super) fn from_tree(tree: &Node, file: &Path) -> Result<Config> {
    let result = Config::deserialize(Reader { node: tree, key: String::new() });
    result.map_err(|fault| fault.at("", tree).into_error(file))
}

/// What serde found wrong, and at which node: the innermost one that saw the fault.
#[derive(Debug)]
struct Fault {
    kind: Kind,
    at: Option<Place>,
}

#[derive(Debug)]
enum Kind {
    UnknownKey { siblings: &'static [&'static str] },
    MissingKey(&'static str),
    WrongType { expected: String },
    InvalidValue { expected: String },
}

#[derive(Debug)]
struct Place {
    key: String,
    origin: Origin,
    found: String,
}

impl Fault {
    fn new(kind: Kind) -> Self {
        Self { kind, at: None }
    }

    fn at(mut self, key: &str, node: &Node) -> Self {
        let place = || Place { key: key.into(), origin: node.origin.clone(), found: node.value.describe() };
        self.at.get_or_insert_with(place);
        self
    }

    fn into_error(self, file: &Path) -> Error {
        let Place { key, origin, found } = self.at.expect("`from_tree` places what nobody else has");
        let from_flag = !matches!(origin, Origin::File { .. });
        match self.kind {
            Kind::UnknownKey { siblings } => {
                let error = Error::new("config::unknown_key", format!("{origin}: unknown key `{key}`"));
                let extra: &[&str] = if from_flag { &[] } else { &["extends"] };
                match keys::nearest(&key, extra) {
                    Some(near) => error.help(format!("did you mean `{near}`?")),
                    None => error.help(format!("known here: {}", siblings.join(", "))),
                }
            }
            Kind::MissingKey(name) => {
                // The whole document has no line of its own.
                let place = if key.is_empty() { file.display().to_string() } else { origin.to_string() };
                let key = keys::join(&key, name);
                Error::new("config::missing_key", format!("{place}: `{key}` is not set"))
                    .help("configs/reference.toml describes every key")
            }
            Kind::WrongType { expected } => {
                let error =
                    Error::new("config::wrong_type", format!("{origin}: `{key}` is {found}")).expected(&expected);
                let bare = from_flag && expected.contains("string");
                if bare {
                    error.help(format!("a string that reads as TOML needs quotes: --set '{key}=\"...\"'"))
                } else {
                    error
                }
            }
            Kind::InvalidValue { expected } => {
                Error::new("config::invalid_value", format!("{origin}: `{key}` is {found}")).expected(expected)
            }
        }
    }
}

/// serde's words for what it expects, in the reader's.
fn expectation(expected: &dyn Expected) -> String {
    match expected.to_string().as_str() {
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => "a whole number, 0 or more".into(),
        "f64" => "a number".into(),
        "a sequence" => "an array".into(),
        "path string" => "a path (a string)".into(),
        word if word.starts_with("struct ") || word == "a map" => "a table".into(),
        word if word.starts_with("enum ") => "a string".into(),
        other => other.into(),
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    /// Only a schema type's own `expecting` text arrives here.
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(Kind::InvalidValue { expected: text.to_string() })
    }

    fn invalid_type(_: Unexpected, expected: &dyn Expected) -> Self {
        Self::new(Kind::WrongType { expected: expectation(expected) })
    }

    fn invalid_value(_: Unexpected, expected: &dyn Expected) -> Self {
        Self::new(Kind::InvalidValue { expected: expectation(expected) })
    }

    fn invalid_length(_: usize, expected: &dyn Expected) -> Self {
        Self::new(Kind::InvalidValue { expected: expectation(expected) })
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        Self::new(Kind::InvalidValue { expected: format!("one of {}", known.join(", ")) })
    }

    fn unknown_field(_: &str, siblings: &'static [&'static str]) -> Self {
        Self::new(Kind::UnknownKey { siblings })
    }

    fn missing_field(name: &'static str) -> Self {
        Self::new(Kind::MissingKey(name))
    }
}

struct Reader<'a> {
    node: &'a Node,
    key: String,
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let Self { node, key } = self;
        match &node.value {
            Value::String(text) => visitor.visit_str(text),
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Boolean(flag) => visitor.visit_bool(*flag),
            Value::Array(items) => visit_array(items, &key, visitor),
            Value::Table(table) => visitor.visit_map(Table { items: table.iter(), value: None, key: &key }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::String(text) => visitor.visit_enum(IntoDeserializer::<Fault>::into_deserializer(text.as_str())),
            _ => Err(de::Error::invalid_type(Unexpected::Other("no string"), &visitor)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

fn visit_array<'de, V: Visitor<'de>>(items: &[Node], key: &str, visitor: V) -> Result<V::Value, Fault> {
    let expected = expectation(&visitor);
    let mut left = Array { items: items.iter().enumerate(), key };
    let value = visitor.visit_seq(&mut left)?;
    // A fixed-length array stops reading at its length.
    match left.items.next() {
        None => Ok(value),
        Some(_) => Err(Fault::new(Kind::InvalidValue { expected })),
    }
}

struct Array<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Node>>,
    key: &'a str,
}

impl<'de> SeqAccess<'de> for &mut Array<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some((i, node)) = self.items.next() else { return Ok(None) };
        let key = keys::index(self.key, i);
        seed.deserialize(Reader { node, key: key.clone() }).map(Some).map_err(|fault| fault.at(&key, node))
    }
}

struct Table<'a> {
    items: std::collections::btree_map::Iter<'a, String, Node>,
    value: Option<(String, &'a Node)>,
    key: &'a str,
}

impl<'de> MapAccess<'de> for Table<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((name, node)) = self.items.next() else { return Ok(None) };
        let key = keys::join(self.key, name);
        let result = seed.deserialize(StrDeserializer::new(name)).map_err(|fault: Fault| fault.at(&key, node));
        self.value = Some((key, node));
        result.map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (key, node) = self.value.take().expect("serde asks for a value after its key");
        seed.deserialize(Reader { node, key: key.clone() }).map_err(|fault| fault.at(&key, node))
    }
}
