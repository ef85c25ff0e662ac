//! JSONL files, line by line: bytes to records that still hold text.
//!
//! Nothing here renders or tokenises. A line that cannot be read is an error that names the file and the line.

use crate::error::{Error, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The longest line that is read, in bytes.
pub const LINE_BYTES_MAX: usize = 100 << 20;
/// A chunk of lines ends with the line that takes it past this many bytes.
const CHUNK_BYTES: usize = 16 << 20;
/// A chunk of lines holds at most this many.
const CHUNK_LINES: usize = 4096;

/// One record as the file has it.
#[derive(Debug, Clone, PartialEq)]
pub struct RawRecord {
    /// The record's own `id`, or `<file stem>:<line>`.
    pub id: String,
    /// Whether it is the record's own.
    pub named: bool,
    /// Number of the line in its file, from 1.
    pub line: u64,
    /// What is to be trained on.
    pub content: Content,
}

/// The shapes a record may have.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// A conversation, and the tools it may call.
    Chat(Chat),
    /// Plain text.
    Text(String),
    /// Tokens made elsewhere, with unshifted labels (-100: not trained) where the record has them.
    Tokens {
        /// Token ids.
        ids: Vec<u32>,
        /// One label for each id, or none: everything is trained.
        labels: Option<Vec<i32>>,
    },
}

/// A conversation as the chat template gets it: keys and values stay as the file has them, except that the arguments of
/// a tool call given as JSON text have become the object they spell.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// Objects with `role`, `content` and whatever else the template reads.
    pub messages: Vec<Value>,
    /// The record's `tools`, or null.
    pub tools: Value,
}

/// A file's lines in chunks, hashed as they are read.
pub struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    hasher: Sha256,
    line: u64,
    bytes: u64,
}

impl Lines {
    /// Opens `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let reader = BufReader::with_capacity(1 << 20, file);
        Ok(Self { path: path.into(), reader, hasher: Sha256::new(), line: 0, bytes: 0 })
    }

    /// The next lines with their numbers from 1, without the byte order mark; an empty chunk is the end of the file.
    pub fn next_chunk(&mut self) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut chunk = Vec::new();
        let mut size = 0;
        while size < CHUNK_BYTES && chunk.len() < CHUNK_LINES {
            let mut bytes = Vec::new();
            let mut limited = (&mut self.reader).take(LINE_BYTES_MAX as u64 + 1);
            limited.read_until(b'\n', &mut bytes).map_err(|e| Error::io("read", &self.path, e))?;
            if bytes.is_empty() {
                break;
            }
            self.line += 1;
            if bytes.len() > LINE_BYTES_MAX {
                let message = format!("{}:{}: the line is longer than 100 MiB", self.path.display(), self.line);
                return Err(Error::new("corpus::line_too_long", message).expected("one record a line"));
            }
            self.hasher.update(&bytes);
            self.bytes += bytes.len() as u64;
            size += bytes.len();
            if self.line == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
                bytes.drain(..3);
            }
            chunk.push((self.line, bytes));
        }
        Ok(chunk)
    }

    /// Bytes read so far and their sha256.
    pub fn finish(self) -> (u64, String) {
        (self.bytes, crate::hash::hex(&self.hasher.finalize()))
    }
}

/// The record on one line; `None` where the line is blank.
///
/// # Errors
/// `corpus::nul_byte`, `corpus::invalid_utf8`, `corpus::bad_json`, `corpus::unknown_shape`, `corpus::bad_message`,
/// `corpus::bad_labels`: all name the file and the line.
pub fn parse_line(path: &Path, line: u64, bytes: &[u8]) -> Result<Option<RawRecord>> {
    let at = format!("{}:{line}", path.display());
    if let Some(byte) = bytes.iter().position(|&b| b == 0) {
        return Err(Error::new("corpus::nul_byte", format!("{at}: byte {} is NUL", byte + 1))
            .expected("UTF-8 text")
            .help("the file may be UTF-16 or cut short"));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| {
        Error::new("corpus::invalid_utf8", format!("{at}: byte {} is not UTF-8", e.valid_up_to() + 1)).source(e)
    })?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_str(text)
        .map_err(|e| Error::new("corpus::bad_json", format!("{at}: column {}: {e}", e.column())).source(e))?;
    let Value::Object(mut object) = value else {
        return Err(Error::new("corpus::unknown_shape", format!("{at}: the line is {}", kind(&value)))
            .expected("a JSON object with `messages`, `text` or `input_ids`"));
    };
    let id = match object.get("id") {
        None | Some(Value::Null) => {
            format!("{}:{line}", path.file_stem().unwrap_or_default().to_string_lossy())
        }
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        Some(other) => {
            let message = format!("{at}: `id` is {}", kind(other));
            return Err(Error::new("corpus::unknown_shape", message).expected("a string or a number"));
        }
    };
    let named = !object.get("id").is_none_or(Value::is_null);
    let content = content(&at, &mut object)?;
    Ok(Some(RawRecord { id, named, line, content }))
}

fn content(at: &str, object: &mut Map<String, Value>) -> Result<Content> {
    let known = ["messages", "text", "input_ids"];
    let present: Vec<_> = known.into_iter().filter(|key| object.get(*key).is_some_and(|v| !v.is_null())).collect();
    let keys = || object.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    match present[..] {
        ["messages"] => {
            let tools = object.remove("tools").unwrap_or_default();
            let messages = object.remove("messages").unwrap_or_default();
            chat(at, messages, tools).map(Content::Chat)
        }
        ["text"] => match object.remove("text") {
            Some(Value::String(text)) => Ok(Content::Text(text)),
            other => {
                let message = format!("{at}: `text` is {}", kind(&other.unwrap_or_default()));
                Err(Error::new("corpus::unknown_shape", message).expected("a string"))
            }
        },
        ["input_ids"] => tokens(at, object),
        [] => Err(Error::new("corpus::unknown_shape", format!("{at}: no known key; keys seen: {}", keys()))
            .expected("one of the keys messages, text, input_ids")),
        _ => {
            let message = format!("{at}: more than one of the keys {}; keys seen: {}", present.join(", "), keys());
            Err(Error::new("corpus::unknown_shape", message).expected("one of the keys messages, text, input_ids"))
        }
    }
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
        return Err(Error::new("corpus::unknown_shape", format!("{at}: `messages` is empty")));
    }
    for (index, message) in messages.iter_mut().enumerate() {
        check_message(message)
            .map_err(|what| Error::new("corpus::bad_message", format!("{at}: message {}: {what}", index + 1)))?;
    }
    Ok(Chat { messages, tools })
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
    let Value::String(text) = &*arguments else { return Ok(()) };
    if text.trim().is_empty() {
        *arguments = Value::Object(Map::new());
        return Ok(());
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(decoded)) => {
            *arguments = Value::Object(decoded);
            Ok(())
        }
        Ok(other) => Err(format!("the arguments of tool call {name:?} are {}, not an object", kind(&other))),
        Err(error) => Err(format!("the arguments of tool call {name:?} are not JSON: {error}")),
    }
}

fn tokens(at: &str, object: &Map<String, Value>) -> Result<Content> {
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
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::Write;

    fn parse(line: impl AsRef<[u8]>) -> Result<Option<RawRecord>> {
        parse_line(Path::new("data/talk.jsonl"), 7, line.as_ref())
    }

    fn refused(line: impl AsRef<[u8]>, code: &str, says: &str) {
        let error = parse(line).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains("data/talk.jsonl:7: "), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }

    fn lines(bytes: &[u8]) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let mut lines = Lines::open(file.path())?;
        let mut all = Vec::new();
        loop {
            let chunk = lines.next_chunk()?;
            if chunk.is_empty() {
                let (size, sha256) = lines.finish();
                assert_eq!((size, sha256), (bytes.len() as u64, crate::hash::sha256(bytes)));
                return Ok(all);
            }
            all.extend(chunk);
        }
    }

    #[test]
    fn three_shapes_are_read() {
        let chat = parse(r#"{"id": 3, "messages": [{"role": "user", "content": "a"}], "tools": [1], "root": "x"}"#);
        let chat = chat.unwrap().unwrap();
        assert_eq!((chat.id.as_str(), chat.line), ("3", 7));
        let messages = vec![json!({"role": "user", "content": "a"})];
        assert_eq!(chat.content, Content::Chat(Chat { messages, tools: json!([1]) }));
        let text = parse(r#"{"text": "plain", "messages": null}"#).unwrap().unwrap();
        assert_eq!((text.id.as_str(), text.content), ("talk:7", Content::Text("plain".into())));
        let tokens = parse(r#"{"input_ids": [2, 5, 6], "labels": [-100, -100, 6]}"#).unwrap().unwrap();
        assert_eq!(tokens.content, Content::Tokens { ids: vec![2, 5, 6], labels: Some(vec![-100, -100, 6]) });
        assert_eq!(parse("  \r\n").unwrap(), None);
    }

    #[test]
    fn row_7_an_unknown_shape_names_the_keys_seen_and_known() {
        let line = r#"{"id": "a", "conversation": []}"#;
        refused(line, "corpus::unknown_shape", "keys seen: id, conversation");
        refused(line, "corpus::unknown_shape", "messages, text, input_ids");
        refused(
            r#"{"messages": [], "text": "a"}"#,
            "corpus::unknown_shape",
            "more than one of the keys messages, text",
        );
        refused(r#"{"messages": []}"#, "corpus::unknown_shape", "`messages` is empty");
        refused(r#"{"messages": "user: hello"}"#, "corpus::unknown_shape", "`messages` is a string");
        refused(r#"["a"]"#, "corpus::unknown_shape", "the line is a list");
    }

    #[test]
    fn row_8_values_stay_as_each_record_has_them() {
        for argument in [json!("12:00"), json!(12), json!(1.0), json!(null)] {
            let calls = json!([{"function": {"name": "wake", "arguments": {"time": argument}}}]);
            let line = json!({"messages": [{"role": "assistant", "tool_calls": calls}]}).to_string();
            let Content::Chat(chat) = parse(line).unwrap().unwrap().content else { panic!("not a chat") };
            assert_eq!(chat.messages[0]["tool_calls"], calls);
        }
    }

    #[test]
    fn row_9_arguments_as_json_text_are_the_object_they_spell() {
        let arguments = |given: Value| {
            let call = json!({"function": {"name": "weather", "arguments": given}});
            let line = json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}).to_string();
            parse(line).map(|record| match record.unwrap().content {
                Content::Chat(chat) => chat.messages[0]["tool_calls"][0]["function"]["arguments"].clone(),
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(arguments(json!("{\"city\": \"Oslo\"}")).unwrap(), json!({"city": "Oslo"}));
        assert_eq!(arguments(json!({"city": "Oslo"})).unwrap(), json!({"city": "Oslo"}));
        assert_eq!(arguments(json!("")).unwrap(), json!({}));
        assert!(arguments(json!("{\"city\": ")).unwrap_err().message().contains("not JSON"));
        assert!(arguments(json!("[1]")).unwrap_err().message().contains("are a list, not an object"));
    }

    #[test]
    fn broken_lines_are_named() {
        refused(r#"{"text": "a"#, "corpus::bad_json", "column");
        refused(b"{\"text\": \"\xFF\"}", "corpus::invalid_utf8", "byte 11 ");
        refused(b"{\"te\0xt\"}", "corpus::nul_byte", "byte 5 ");
        refused(r#"{"text": "\ud800"}"#, "corpus::bad_json", "hex escape");
        refused(r#"{"text": ["a"]}"#, "corpus::unknown_shape", "`text` is a list");
        refused(r#"{"id": [1], "text": "a"}"#, "corpus::unknown_shape", "`id` is a list");
        let deep = format!("{{\"text\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        refused(deep, "corpus::bad_json", "recursion");
    }

    #[test]
    fn messages_are_checked_one_by_one() {
        let message = |message: &str| format!(r#"{{"messages": [{{"role": "user", "content": "a"}}, {message}]}}"#);
        let bad = "corpus::bad_message";
        refused(message(r#"{"role": "model", "content": "a"}"#), bad, "message 2: unknown role \"model\"");
        refused(message(r#"{"from": "gpt", "value": "a"}"#), bad, "keys seen: from, value");
        refused(message(r#"{"role": "user"}"#), bad, "no `content`");
        refused(message(r#"{"role": "user", "content": 3}"#), bad, "`content` is a number");
        refused(message(r#"{"role": "user", "content": [["a"]]}"#), bad, "a part of `content` is a list");
        refused(message(r#"{"role": "user", "content": [{"type": "image"}]}"#), bad, "type \"image\"");
        refused(message(r#"{"role": "assistant", "tool_calls": {}}"#), bad, "no `content`");
        refused(message(r#""hello""#), bad, "it is a string");
        assert!(parse(message(r#"{"role": "user", "content": "consecutive"}"#)).is_ok());
        assert!(parse(message(r#"{"role": "user", "content": [{"type": "text", "text": "a"}]}"#)).is_ok());
    }

    #[test]
    fn labels_must_be_unshifted_and_complete() {
        refused(r#"{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}"#, "corpus::bad_labels", "label 0 is 6");
        refused(r#"{"input_ids": [5, 6, 7], "labels": [5]}"#, "corpus::bad_labels", "1 labels for 3 tokens");
        refused(r#"{"input_ids": [5, -1]}"#, "corpus::unknown_shape", "-1 is no token id");
        refused(r#"{"input_ids": [5, 1.5]}"#, "corpus::unknown_shape", "not a list of integers");
        refused(r#"{"input_ids": []}"#, "corpus::unknown_shape", "empty");
    }

    #[test]
    fn a_byte_order_mark_and_windows_line_ends_are_tolerated() {
        let all = lines(b"\xEF\xBB\xBF{\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}").unwrap();
        let records: Vec<_> = all.iter().filter_map(|(_, bytes)| parse(bytes).unwrap()).collect();
        assert_eq!(all.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 2, 3]);
        let texts: Vec<_> = records.into_iter().map(|record| record.content).collect();
        assert_eq!(texts, [Content::Text("a".into()), Content::Text("b".into())]);
    }

    #[test]
    fn chunks_cover_every_line_in_order() {
        let bytes: Vec<u8> = (0..3 * CHUNK_LINES).flat_map(|i| format!("{i}\n").into_bytes()).collect();
        let all = lines(&bytes).unwrap();
        assert_eq!(all.len(), 3 * CHUNK_LINES);
        assert!(
            all.iter()
                .enumerate()
                .all(|(i, (line, text))| *line == i as u64 + 1 && *text == format!("{i}\n").into_bytes())
        );
    }

    #[test]
    fn a_line_past_the_limit_is_refused() {
        let mut bytes = b"{}\n".to_vec();
        bytes.resize(3 + LINE_BYTES_MAX + 1, b'x');
        let error = lines(&bytes).unwrap_err();
        assert_eq!(error.code(), "corpus::line_too_long");
        assert!(error.message().contains(":2: "), "{error}");
    }
}
