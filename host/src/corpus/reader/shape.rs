//! The shapes a record may have, told by its keys.

use super::message::{bad_message, chat, from_sharegpt};
use super::{Chat, Columns, Content, Shape, kind};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// Keys of a record that a file may call otherwise.
pub const COLUMNS: [&str; 14] = [
    "id",
    "messages",
    "tools",
    "conversations",
    "system",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "completion",
    "text",
    "input_ids",
    "labels",
];

/// A shape by the keys that a record of it must have.
#[derive(Debug, Clone, Copy)]
struct Known {
    shape: Shape,
    keys: &'static [&'static str],
    /// Takes the place for errors and the record.
    read: fn(&str, &mut Map<String, Value>) -> Result<Content>,
}

const SHAPES: [Known; 6] = [
    Known { shape: Shape::Messages, keys: &["messages"], read: messages },
    Known { shape: Shape::Sharegpt, keys: &["conversations"], read: conversations },
    Known { shape: Shape::Alpaca, keys: &["instruction", "output"], read: instruction },
    Known { shape: Shape::PromptCompletion, keys: &["prompt", "completion"], read: completion },
    Known { shape: Shape::Text, keys: &["text"], read: |at, object| text(at, object, "text").map(Content::Text) },
    Known { shape: Shape::InputIds, keys: &["input_ids"], read: tokens },
];

impl Known {
    fn fits(&self, object: &Map<String, Value>) -> bool {
        self.keys.iter().all(|key| object.get(*key).is_some_and(|value| !value.is_null()))
    }
}

/// Whether the value has the keys of a record.
pub fn is_record(value: &Value) -> bool {
    value.as_object().is_some_and(|object| SHAPES.iter().any(|shape| shape.fits(object)))
}

/// Gives the file's own columns the names of a record's keys. A row without such a column keeps what it has.
pub fn rename(object: &mut Map<String, Value>, columns: &Columns) {
    let present = |(key, column)| object.get(column).map(|value| (key, value.clone()));
    let found: Vec<(&String, Value)> = columns.iter().filter_map(present).collect();
    columns.values().for_each(|column| drop(object.shift_remove(column)));
    found.into_iter().for_each(|(key, value)| drop(object.insert(key.clone(), value)));
}

/// What a record has to be trained on; of two shapes the one that `columns` names. Alpaca's own files have the whole prompt
/// in `text` besides.
pub fn content(at: &str, object: &mut Map<String, Value>, columns: &Columns) -> Result<(Shape, Content)> {
    let mut fitting: Vec<Known> = SHAPES.into_iter().filter(|shape| shape.fits(object)).collect();
    if fitting.len() > 1 {
        if fitting.iter().any(|shape| shape.keys.contains(&"instruction")) && !columns.contains_key("text") {
            fitting.retain(|shape| shape.keys != ["text"]);
        }
        let named = |shape: &Known| shape.keys.iter().all(|key| columns.contains_key(*key));
        if let Some(at) = fitting.iter().position(named) {
            fitting = vec![fitting[at]];
        }
    }
    let list = |shapes: &[Known]| shapes.iter().map(|shape| shape.keys.join("+")).collect::<Vec<_>>().join(", ");
    let keys = || object.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let help = "name the columns in the source: columns = { messages = \"dialog\" }";
    match fitting[..] {
        [known] => Ok((known.shape, (known.read)(at, object)?)),
        [] => Err(Error::new("corpus::unknown_shape", format!("{at}: no known key; keys seen: {}", keys()))
            .expected(format!("one of the keys {}", list(&SHAPES)))
            .help(help)),
        _ => {
            let message = format!("{at}: more than one of the keys {}; keys seen: {}", list(&fitting), keys());
            Err(Error::new("corpus::unknown_shape", message)
                .expected(format!("one of the keys {}", list(&SHAPES)))
                .help(help))
        }
    }
}

fn messages(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    let messages = object.remove("messages").unwrap_or_default();
    chat(at, messages, tools(at, object)?).map(Content::Chat)
}

/// `tools`, also where they are given as JSON text.
fn tools(at: &str, object: &mut Map<String, Value>) -> Result<Value> {
    let tools = match object.remove("tools").unwrap_or_default() {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => serde_json::from_str(&text).map_err(|e| {
            Error::new("corpus::unknown_shape", format!("{at}: `tools` is text that is not JSON: {e}"))
                .expected("a list of tools, or the same as JSON text")
                .source(e)
        })?,
        tools => tools,
    };
    match tools {
        tools @ (Value::Null | Value::Array(_)) => Ok(tools),
        other => Err(Error::new("corpus::unknown_shape", format!("{at}: `tools` is {}", kind(&other)))
            .expected("a list of tools, or the same as JSON text")),
    }
}

/// ShareGPT: `from` and `value` instead of `role` and `content`, and `system` beside the turns.
fn conversations(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    let mut turns = object.remove("conversations").unwrap_or_default();
    if let Value::Array(turns) = &mut turns {
        for (index, turn) in turns.iter_mut().enumerate() {
            from_sharegpt(turn).map_err(|what| bad_message(at, index, &what))?;
        }
        if let Some(system) = optional_text(at, object, "system")? {
            turns.insert(0, json!({"role": "system", "content": system}));
        }
    }
    chat(at, turns, tools(at, object)?).map(Content::Chat)
}

/// Alpaca: what is asked and, in a paragraph of its own, what it is about, as the user's turn; `output` as the answer. `history`
/// has what was asked and answered before, in pairs.
fn instruction(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    let mut asked = text(at, object, "instruction")?;
    if let Some(input) = optional_text(at, object, "input")? {
        asked = format!("{asked}\n\n{input}");
    }
    let mut messages = Vec::new();
    if let Some(system) = optional_text(at, object, "system")? {
        messages.push(json!({"role": "system", "content": system}));
    }
    let answered = history(at, object)?.into_iter().chain([[asked, text(at, object, "output")?]]);
    for [user, assistant] in answered {
        messages.push(json!({"role": "user", "content": user}));
        messages.push(json!({"role": "assistant", "content": assistant}));
    }
    chat(at, messages.into(), tools(at, object)?).map(Content::Chat)
}

fn history(at: &str, object: &mut Map<String, Value>) -> Result<Vec<[String; 2]>> {
    let history = object.remove("history").unwrap_or_default();
    if history.is_null() {
        return Ok(Vec::new());
    }
    serde_json::from_value(history).map_err(|e| {
        Error::new("corpus::unknown_shape", format!("{at}: `history`: {e}"))
            .expected("a list of pairs of strings: what was asked, and the answer")
            .source(e)
    })
}

/// `prompt` and `completion`, two texts or two lists of messages; the completion alone is trained.
fn completion(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    if object["prompt"].is_string() && object["completion"].is_string() {
        let prompt = text(at, object, "prompt")?;
        return Ok(Content::Completion { prompt, completion: text(at, object, "completion")? });
    }
    let tools = tools(at, object)?;
    match (object["prompt"].take(), object["completion"].take()) {
        (Value::Array(mut prompt), Value::Array(completion)) => {
            let trained_from = prompt.len();
            prompt.extend(completion);
            let chat = chat(at, prompt.into(), tools)?;
            Ok(Content::Chat(Chat { trained_from, ..chat }))
        }
        (prompt, completion) => {
            let message = format!("{at}: `prompt` is {} and `completion` is {}", kind(&prompt), kind(&completion));
            Err(Error::new("corpus::unknown_shape", message).expected("two strings, or two lists of messages"))
        }
    }
}

fn text(at: &str, object: &mut Map<String, Value>, key: &str) -> Result<String> {
    match object.remove(key).unwrap_or_default() {
        Value::String(text) => Ok(text),
        other => {
            let message = format!("{at}: `{key}` is {}", kind(&other));
            Err(Error::new("corpus::unknown_shape", message).expected("a string"))
        }
    }
}

/// `None` where the key is missing, null or blank.
fn optional_text(at: &str, object: &mut Map<String, Value>, key: &str) -> Result<Option<String>> {
    if object.get(key).is_none_or(Value::is_null) {
        return Ok(None);
    }
    text(at, object, key).map(|text| Some(text).filter(|text| !text.trim().is_empty()))
}

fn tokens(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    let numbers = |key: &str| -> Result<Vec<i64>> {
        let list = object[key].as_array().and_then(|a| a.iter().map(Value::as_i64).collect::<Option<Vec<_>>>());
        list.ok_or_else(|| Error::new("corpus::unknown_shape", format!("{at}: `{key}` is not a list of integers")))
    };
    let ids = numbers("input_ids")?;
    let ids = ids.into_iter().map(|id| {
        u32::try_from(id).map_err(|_| Error::new("corpus::unknown_shape", format!("{at}: {id} is no token id")))
    });
    let ids = ids.collect::<Result<Vec<_>>>()?;
    if ids.is_empty() {
        return Err(Error::new("corpus::unknown_shape", format!("{at}: `input_ids` is empty")));
    }
    if object.get("labels").is_none_or(Value::is_null) {
        return Ok(Content::Tokens { ids, labels: None });
    }
    let labels = numbers("labels")?;
    if labels.len() != ids.len() {
        let message = format!("{at}: {} labels for {} tokens", labels.len(), ids.len());
        return Err(Error::new("corpus::bad_labels", message).expected("one label for each token"));
    }
    // labels that were shifted elsewhere would be shifted twice, and nothing else would tell
    if let Some(t) = (0..ids.len()).find(|&t| labels[t] != -100 && labels[t] != i64::from(ids[t])) {
        let message = format!("{at}: label {t} is {} where the token is {}", labels[t], ids[t]);
        return Err(Error::new("corpus::bad_labels", message).expected("the token's own id, or -100: labels unshifted"));
    }
    // every label is now -100 or the id of its token; ids over i32::MAX are refused against the vocabulary
    let labels = labels.into_iter().map(|l| i32::try_from(l).unwrap_or(i32::MAX)).collect();
    Ok(Content::Tokens { ids, labels: Some(labels) })
}
