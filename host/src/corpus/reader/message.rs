//! Messages of a conversation, checked one by one.

use super::{Chat, kind, rounded_integer};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// Speakers of ShareGPT and the roles they have.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("chatgpt", "assistant"),
    ("system", "system"),
    ("developer", "developer"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", "assistant"),
];

/// Turns a ShareGPT message into one with `role` and `content`; its other keys stay. One that has a `role` stays as it is.
pub fn from_sharegpt(message: &mut Value) -> Result<(), String> {
    let Value::Object(turn) = message else { return Ok(()) };
    if turn.contains_key("role") {
        return Ok(());
    }
    let keys = turn.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let (Some(Value::String(from)), Some(value)) = (turn.get("from").cloned(), turn.get("value").cloned()) else {
        return Err(format!("no `from` and `value`; keys seen: {keys}; keys known: from, value, or role, content"));
    };
    let Some((_, role)) = SPEAKERS.into_iter().find(|(speaker, _)| *speaker == from) else {
        let known = SPEAKERS.map(|(speaker, _)| speaker).join(", ");
        return Err(format!("unknown speaker {from:?}; speakers known: {known}"));
    };
    let mut out = Map::from_iter([("role".to_string(), json!(role))]);
    if from == "function_call" {
        let call = match &value {
            Value::String(text) => {
                serde_json::from_str(text).map_err(|e| format!("the function call is not JSON: {e}"))?
            }
            call => call.clone(),
        };
        let calls = if call.is_array() { call } else { json!([call]) };
        let calls = calls.as_array().into_iter().flatten();
        let calls = calls.map(|call| json!({"type": "function", "function": call})).collect::<Vec<_>>();
        out.insert("tool_calls".into(), calls.into());
    } else {
        out.insert("content".into(), value);
    }
    out.extend(std::mem::take(turn).into_iter().filter(|(key, _)| key != "from" && key != "value"));
    *turn = out;
    Ok(())
}

/// Roles a message may have; a template decides which of them it takes.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A conversation checked message by message; `at` is put in front of every error.
pub fn chat(at: &str, messages: Value, tools: Value) -> Result<Chat> {
    let Value::Array(mut messages) = messages else {
        let message = format!("{at}: `messages` is {}", kind(&messages));
        return Err(Error::new("corpus::unknown_shape", message).expected("a list of messages"));
    };
    if messages.is_empty() {
        return Err(
            Error::new("corpus::unknown_shape", format!("{at}: `messages` is empty")).expected("a message or more")
        );
    }
    for (index, message) in messages.iter_mut().enumerate() {
        check_message(message).map_err(|what| bad_message(at, index, &what))?;
    }
    Ok(Chat { messages, tools, trained_from: 0 })
}

/// What is wrong with the message at `index`, from 0.
pub fn bad_message(at: &str, index: usize, what: &str) -> Error {
    Error::new("corpus::bad_message", format!("{at}: message {}: {what}", index + 1))
        .expected("an object with a `role`, and text in `content` or a list of `tool_calls`")
        .help("correct the row, or leave it out with a corpus filter or by hand")
}

fn check_message(message: &mut Value) -> Result<(), String> {
    let Value::Object(message) = message else { return Err(format!("it is {}, not an object", kind(message))) };
    let keys = message.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
        Some(Value::String(role)) => return Err(format!("unknown role {role:?}; roles known: {}", ROLES.join(", "))),
        _ => return Err(format!("no `role`; keys seen: {keys}; keys known: role, content, tool_calls")),
    }
    match message.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            for part in parts {
                match (part.get("type").and_then(Value::as_str), part.get("text")) {
                    (Some("text"), Some(Value::String(_))) => {}
                    (Some("text"), _) => return Err("a text part of `content` has no `text`".into()),
                    (Some(other), _) => return Err(format!("a part of `content` is of type {other:?}, not text")),
                    (None, _) => return Err(format!("a part of `content` is {} without a `type`", kind(part))),
                }
            }
        }
        None | Some(Value::Null) => {
            if message.get("tool_calls").and_then(Value::as_array).is_none_or(Vec::is_empty) {
                return Err(format!("no `content`; keys seen: {keys}; keys known: role, content, tool_calls"));
            }
        }
        Some(other) => return Err(format!("`content` is {}, not text", kind(other))),
    }
    match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) => calls.iter_mut().try_for_each(decode_arguments),
        None | Some(Value::Null) => Ok(()),
        Some(other) => Err(format!("`tool_calls` is {}, not a list", kind(other))),
    }
}

/// Templates expect a mapping; the OpenAI format has the same as JSON text. Both must render alike.
fn decode_arguments(call: &mut Value) -> Result<(), String> {
    let function = if call.get("function").is_some() { &mut call["function"] } else { call };
    let name = function.get("name").and_then(Value::as_str).unwrap_or("without a name").to_string();
    let Some(arguments) = function.get_mut("arguments") else { return Ok(()) };
    let text = match &*arguments {
        Value::String(text) => text,
        Value::Object(_) | Value::Null => return Ok(()),
        other => return Err(format!("the arguments of tool call {name:?} are {}, not an object", kind(other))),
    };
    if text.trim().is_empty() {
        *arguments = Value::Object(Map::new());
        return Ok(());
    }
    match serde_json::from_str(text) {
        Ok(decoded) if let Some(integer) = rounded_integer(&decoded, text) => {
            Err(format!("in the arguments of tool call {name:?}, {integer} has more than 64 bits and would be rounded"))
        }
        Ok(Value::Object(decoded)) => {
            *arguments = Value::Object(decoded);
            Ok(())
        }
        Ok(other) => Err(format!("the arguments of tool call {name:?} are {}, not an object", kind(&other))),
        Err(error) => Err(format!("the arguments of tool call {name:?} are not JSON: {error}")),
    }
}
