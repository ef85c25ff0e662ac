//! The vocabulary of a base as a GGUF file holds it, from `tokenizer.json` and `tokenizer_config.json`.

use crate::error::{Error, Result};
use crate::model::gguf::Value;
use serde::Deserialize;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// Token types of llama.cpp.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// What llama.cpp's own conversion gives every token of this vocabulary: merges decide, not scores.
const SCORE: f32 = -1000.0;

/// Special tokens that are shown, since what parses an answer has to see them.
const SHOWN: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

#[derive(Deserialize)]
struct Tokenizer {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    r#type: String,
    vocab: HashMap<String, usize>,
    merges: Vec<Merge>,
}

/// Both spellings of a merge.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair([String; 2]),
    Line(String),
}

#[derive(Deserialize)]
struct Added {
    id: usize,
    content: String,
    special: bool,
}

/// A token of `tokenizer_config.json`: its text, or an object that holds it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Named {
    Text(String),
    Object { content: String },
}

/// The entries for the vocabulary of the base in `dir`, of `size` tokens, and its chat template.
///
/// # Errors
/// Class `io`; `export::tokenizer` naming the file where it is not that of a Gemma model.
pub fn entries(dir: &Path, size: usize) -> Result<Vec<(String, Value)>> {
    let path = dir.join(TOKENIZER);
    let bad = |what: String| {
        Error::new("export::tokenizer", format!("{}: {what}", path.display()))
            .expected("the tokenizer.json of a Gemma model: byte-pair encoding with its merges")
            .help("a GGUF file holds the vocabulary; copy the base's tokenizer files beside its weights")
    };
    let text = fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
    let Tokenizer { model, added_tokens } = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    if model.r#type != "BPE" {
        return Err(bad(format!("its model is {}", model.r#type)));
    }
    let mut tokens: Vec<String> = (0..size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; size];
    let mut set = |id: usize, text: &str, kind: i32| match tokens.get_mut(id) {
        Some(token) => {
            *token = text.into();
            types[id] = kind;
            Ok(())
        }
        None => Err(bad(format!("token {text:?} has the id {id}, of {size}"))),
    };
    for (text, id) in &model.vocab {
        set(*id, text, if is_byte(text) { BYTE } else { NORMAL })?;
    }
    for Added { id, content, special } in &added_tokens {
        match (SHOWN.contains(&content.as_str()), special, model.vocab.contains_key(content)) {
            (true, ..) => set(*id, content, USER_DEFINED)?,
            (_, true, _) => set(*id, content, CONTROL)?,
            (.., false) => set(*id, content, USER_DEFINED)?,
            // Merges make it, as every other token of the vocabulary.
            (.., true) => {}
        }
    }
    let merges = model.merges.into_iter().map(|merge| match merge {
        Merge::Pair([left, right]) => format!("{left} {right}"),
        Merge::Line(line) => line,
    });
    let id_of = |text: &str| {
        let added = added_tokens.iter().find(|added| added.content == text).map(|added| added.id);
        added.or_else(|| model.vocab.get(text).copied())
    };
    let mut entries = vec![
        ("tokenizer.ggml.merges".to_string(), Value::Texts(merges.collect())),
        ("tokenizer.ggml.scores".into(), Value::F32s(vec![SCORE; size])),
    ];
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("mask", "mask")] {
        if let Some(id) = special_token(dir, &format!("{name}_token"))?.and_then(|text| id_of(&text)) {
            entries.push((format!("tokenizer.ggml.{key}_token_id"), Value::U32(id as u32)));
        }
    }
    entries.push(("tokenizer.ggml.tokens".into(), Value::Texts(tokens)));
    entries.push(("tokenizer.ggml.token_type".into(), Value::I32s(types)));
    if let Ok(template) = fs::read_to_string(dir.join(TEMPLATE)) {
        entries.push(("tokenizer.chat_template".into(), Value::Text(template)));
    }
    Ok(entries)
}

/// `<0x0A>` and the like.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

fn special_token(dir: &Path, name: &str) -> Result<Option<String>> {
    let path = dir.join(SETTINGS);
    let Ok(text) = fs::read(&path) else { return Ok(None) };
    let bad = |e: serde_json::Error| Error::new("export::tokenizer", format!("{}: {e}", path.display()));
    let mut settings: HashMap<String, serde_json::Value> = serde_json::from_slice(&text).map_err(bad)?;
    match settings.remove(name).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => match serde_json::from_value(value).map_err(bad)? {
            Named::Text(content) | Named::Object { content } => Ok(Some(content)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::fixture;

    #[test]
    fn the_tiny_base_has_its_tokens_merges_and_template() {
        let entries: HashMap<String, Value> = entries(&fixture("tiny-base"), 2048).unwrap().into_iter().collect();
        let get = |key: &str| &entries[&format!("tokenizer.{key}")];
        let (Value::Texts(tokens), Value::I32s(types)) = (get("ggml.tokens"), get("ggml.token_type")) else { panic!() };
        let of = |text: &str| types[tokens.iter().position(|token| token == text).unwrap()];
        assert_eq!(["<bos>", "<|tool_call>", "<0x0A>", "▁draw"].map(of), [CONTROL, USER_DEFINED, BYTE, NORMAL]);
        assert!(!types.contains(&UNUSED));
        let Value::Texts(merges) = get("ggml.merges") else { panic!() };
        assert_eq!((merges.len(), merges[0].as_str()), (1688, "▁ t"));
        assert_eq!((get("ggml.bos_token_id"), get("ggml.eos_token_id")), (&Value::U32(2), &Value::U32(6)));
        assert!(matches!(get("chat_template"), Value::Text(text) if text.contains("messages")));
    }

    #[test]
    fn a_base_without_its_tokenizer_or_with_too_many_tokens_is_refused() {
        assert_eq!(entries(&fixture("golden/model"), 768).unwrap_err().code(), "io::failed");
        let error = entries(&fixture("tiny-base"), 2000).unwrap_err();
        assert_eq!(error.code(), "export::tokenizer");
        assert!(error.message().contains("of 2000"), "{error}");
    }
}
