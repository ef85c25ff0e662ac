//! Files, row by row: bytes to records that still hold text.
//!
//! Nothing here renders or tokenises. A row that cannot be read is an error that names the file and the row: the line of
//! JSONL, the place in the array of JSON, the place in a Parquet file.

mod files;
mod message;
mod parquet;
mod rows;
mod shape;
mod stream;
mod text;

pub use files::expand;
pub use message::chat;
pub use rows::{Format, Rows};
pub use shape::COLUMNS;
pub use stream::Compression;

use crate::error::{Error, Result};
use regex::Regex;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::LazyLock;

/// Keys of a record and the names that a file's columns have instead.
pub type Columns = BTreeMap<String, String>;

/// One record as the file has it.
#[derive(Debug, Clone, PartialEq)]
pub struct RawRecord {
    /// The record's own `id`, or `<file stem>:<row>`.
    pub id: String,
    /// Whether it is the record's own.
    pub named: bool,
    /// Number of the row in its file, from 1.
    pub line: u64,
    /// What it was taken for.
    pub shape: Shape,
    /// What is to be trained on.
    pub content: Content,
}

/// The shapes a record may have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Content {
    /// A conversation, and the tools it may call.
    Chat(Chat),
    /// Plain text.
    Text(String),
    /// Plain text of which the second part alone is trained.
    Completion {
        /// What is given.
        prompt: String,
        /// What is to be learned, up to its end.
        completion: String,
    },
    /// Tokens made elsewhere, with unshifted labels (-100: not trained) where the record has them.
    Tokens {
        /// Token ids.
        ids: Vec<u32>,
        /// One label for each id, or none: everything is trained.
        labels: Option<Vec<i32>>,
    },
}

/// What a record was taken for, by its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// `messages`.
    Messages,
    /// `conversations`.
    Sharegpt,
    /// `instruction` and `output`.
    Alpaca,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `text`.
    Text,
    /// `input_ids`.
    InputIds,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Messages => "messages",
            Shape::Sharegpt => "ShareGPT",
            Shape::Alpaca => "Alpaca",
            Shape::PromptCompletion => "prompt and completion",
            Shape::Text => "text",
            Shape::InputIds => "input_ids",
        })
    }
}

/// A conversation as the chat template gets it: keys and values stay as the file has them, except that the arguments of
/// a tool call given as JSON text have become the object they spell.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Chat {
    /// Objects with `role`, `content` and whatever else the template reads.
    pub messages: Vec<Value>,
    /// The record's `tools`, or null.
    pub tools: Value,
    /// What the assistant says is trained from this message on, counted from 0.
    pub trained_from: usize,
}

/// The record in one row; `None` where the row is blank.
///
/// # Errors
/// `corpus::nul_byte`, `corpus::invalid_utf8`, `corpus::bad_json`, `corpus::unknown_shape`, `corpus::bad_message`,
/// `corpus::bad_labels`: all name the file and the row.
pub fn parse_row(path: &Path, line: u64, bytes: &[u8], columns: &Columns) -> Result<Option<RawRecord>> {
    let at = format!("{}:{line}", path.display());
    if let Some(byte) = bytes.iter().position(|&b| b == 0) {
        return Err(Error::new("corpus::nul_byte", format!("{at}: byte {} is NUL", byte + 1))
            .expected("UTF-8 text")
            .help("the file may be UTF-16 or cut short"));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| {
        Error::new("corpus::invalid_utf8", format!("{at}: byte {} is not UTF-8", e.valid_up_to() + 1))
            .expected("UTF-8 text")
            .help("save the file as UTF-8, or correct the row")
            .source(e)
    })?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_str(text).map_err(|e| bad_json(&at, e))?;
    let Value::Object(mut object) = value else {
        return Err(
            Error::new("corpus::unknown_shape", format!("{at}: the row is {}", kind(&value))).expected("a JSON object")
        );
    };
    shape::rename(&mut object, columns);
    let id = match object.get("id") {
        None | Some(Value::Null) => {
            format!("{}:{line}", files::stem(path))
        }
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        Some(other) => {
            let message = format!("{at}: `id` is {}", kind(other));
            return Err(Error::new("corpus::unknown_shape", message).expected("a string or a number"));
        }
    };
    let named = !object.get("id").is_none_or(Value::is_null);
    let (shape, content) = shape::content(&at, &mut object, columns)?;
    if let Content::Chat(Chat { messages, tools, .. }) = &content
        && let Some(integer) = messages.iter().chain([tools]).find_map(|value| rounded_integer(value, text))
    {
        return Err(Error::new(
            "corpus::bad_json",
            format!("{at}: {integer} has more than 64 bits and would be rounded"),
        )
        .expected("integers of at most 64 bits")
        .help("write it as text, in quotes"));
    }
    Ok(Some(RawRecord { id, named, line, shape, content }))
}

/// The first integer in the JSON `text`, which holds `value`, that has more than 64 bits and is a float in `value`.
fn rounded_integer<'a>(value: &Value, text: &'a str) -> Option<&'a str> {
    fn large_floats(value: &Value, found: &mut Vec<f64>) {
        match value {
            Value::Number(number) if number.is_f64() => {
                found.extend(number.as_f64().filter(|float| float.abs() >= 2f64.powi(63)));
            }
            Value::Array(list) => list.iter().for_each(|value| large_floats(value, found)),
            Value::Object(object) => object.values().for_each(|value| large_floats(value, found)),
            _ => {}
        }
    }
    // strings too, so that no number is found within one
    static STRING_OR_NUMBER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r#""(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*"#).expect("the pattern is a constant"));
    let mut floats = Vec::new();
    large_floats(value, &mut floats);
    if floats.is_empty() {
        return None;
    }
    let rounded = |number: &&str| {
        let integer = number.strip_prefix('-').unwrap_or(number).bytes().all(|byte| byte.is_ascii_digit());
        let beyond = integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err();
        beyond && number.parse().is_ok_and(|float: f64| floats.contains(&float))
    };
    STRING_OR_NUMBER.find_iter(text).map(|found| found.as_str()).find(rounded)
}

/// A row is parsed by itself: the line that the parser counts is always its first.
fn bad_json(at: &str, e: serde_json::Error) -> Error {
    let said = e.to_string();
    let what = said.split(" at line ").next().unwrap_or_default();
    let what = match what {
        "unexpected end of hex escape" | "lone leading surrogate in hex escape" => {
            "a surrogate without the other half of its pair"
        }
        other => other,
    };
    Error::new("corpus::bad_json", format!("{at}: column {}: {what}", e.column()))
        .expected("one whole JSON object a row")
        .help("correct the row; a file that ends in the middle of one was cut short")
        .source(e)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
