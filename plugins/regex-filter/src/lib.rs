//! Drops records by what their text matches, and replaces parts of the text of those that stay. A record's text is its
//! `text`, or the content of its messages, each message and part by itself. First `drop` is asked, then `keep`; both see the
//! text as the corpus has it.

use regex::Regex;
use serde::Deserialize;
use serde_json::Value;
use tunehost_plugin_sdk::{Action, Chunk, CorpusFilter, Plugin, Verdicts, log};

/// The plugin's settings.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Config {
    drop: Vec<String>,
    keep: Vec<String>,
    replace: Vec<Replace>,
    roles: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Replace {
    pattern: String,
    with: String,
}

/// The roles that messages may have.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

struct RegexFilter {
    drop: Vec<Regex>,
    keep: Vec<Regex>,
    replace: Vec<(Regex, String)>,
    /// Only messages of these roles are looked at.
    roles: Option<Vec<String>>,
    /// Whether it was said of this corpus that records without text are kept.
    told_of_tokens: bool,
}

impl Plugin for RegexFilter {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "drop": {
      "type": "array", "items": { "type": "string" }, "default": [],
      "description": "Regular expressions; a record whose text matches any of them is dropped"
    },
    "keep": {
      "type": "array", "items": { "type": "string" }, "default": [],
      "description": "Regular expressions; where there are any, a record whose text matches none of them is dropped"
    },
    "replace": {
      "type": "array", "default": [],
      "items": {
        "type": "object", "additionalProperties": false, "required": ["pattern", "with"],
        "properties": { "pattern": { "type": "string" }, "with": { "type": "string" } }
      },
      "description": "What is replaced, one after the other; `with` may hold $1 or ${name} for a group, and $$ for a $"
    },
    "roles": {
      "type": "array",
      "items": { "type": "string", "enum": ["system", "developer", "user", "assistant", "tool"] },
      "description": "Only messages of these roles are looked at; all where it is not given"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        if let Some(role) = config.roles.iter().flatten().find(|role| !ROLES.contains(&role.as_str())) {
            return Err(format!("roles must be of {}, not {role:?}", ROLES.join(", ")));
        }
        let replace =
            config.replace.into_iter().map(|Replace { pattern, with }| Ok((regex("replace", &pattern)?, with)));
        Ok(Self {
            drop: config.drop.iter().map(|pattern| regex("drop", pattern)).collect::<Result<_, _>>()?,
            keep: config.keep.iter().map(|pattern| regex("keep", pattern)).collect::<Result<_, _>>()?,
            replace: replace.collect::<Result<_, String>>()?,
            roles: config.roles,
            told_of_tokens: false,
        })
    }
}

fn regex(setting: &str, pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| {
        // The error draws the pattern over several lines; the last says what is wrong with it.
        let error = error.to_string();
        let why = error.lines().last().unwrap_or_default();
        format!("{setting} has {pattern:?}, which is no regular expression: {why}")
    })
}

impl CorpusFilter for RegexFilter {
    fn filter(&mut self, chunk: Chunk) -> Result<Verdicts, String> {
        if chunk.first == 0 {
            self.told_of_tokens = false;
        }
        let mut verdicts = Verdicts { actions: Vec::with_capacity(chunk.ids.len()), texts: Vec::new() };
        for (id, record) in chunk.ids.iter().zip(&chunk.records) {
            let (action, text) = self.judge(record).map_err(|error| format!("record {id}: {error}"))?;
            verdicts.actions.push(action);
            verdicts.texts.extend(text);
        }
        Ok(verdicts)
    }
}

impl RegexFilter {
    fn judge(&mut self, record: &str) -> Result<(Action, Option<String>), String> {
        let mut record: Value = serde_json::from_str(record).map_err(|error| error.to_string())?;
        if record["input_ids"].is_array() {
            if !std::mem::replace(&mut self.told_of_tokens, true) {
                log::warn("records of input_ids have no text to look at: they are kept as they are");
            }
            return Ok((Action::Keep, None));
        }
        let mut texts = self.texts(&mut record);
        let matches = |regex: &&Regex| texts.iter().any(|text| regex.is_match(text));
        if let Some(regex) = self.drop.iter().find(matches) {
            return Ok((Action::Drop, Some(format!("matches {:?} of drop", regex.as_str()))));
        }
        if !self.keep.is_empty() && !self.keep.iter().any(|regex| matches(&regex)) {
            return Ok((Action::Drop, Some("matches nothing of keep".into())));
        }
        let mut replaced = false;
        for text in &mut texts {
            for (regex, with) in &self.replace {
                let new = regex.replace_all(text, with);
                if new != **text {
                    **text = new.into_owned();
                    replaced = true;
                }
            }
        }
        Ok(if replaced { (Action::Replace, Some(record.to_string())) } else { (Action::Keep, None) })
    }

    /// The texts of a record that are looked at.
    fn texts<'r>(&self, record: &'r mut Value) -> Vec<&'r mut String> {
        let Value::Object(record) = record else { return Vec::new() };
        let mut texts = Vec::new();
        for (key, value) in record {
            match (key.as_str(), value) {
                ("text", Value::String(text)) => texts.push(text),
                ("messages", Value::Array(messages)) => {
                    let looked_at = messages.iter_mut().filter(|message| self.looks_at(&message["role"]));
                    looked_at.for_each(|message| add_content(message, &mut texts));
                }
                _ => {}
            }
        }
        texts
    }

    fn looks_at(&self, role: &Value) -> bool {
        self.roles.as_ref().is_none_or(|roles| roles.iter().any(|looked_at| role == looked_at))
    }
}

/// The content of a message: one text, or a list of parts with a `text` each.
fn add_content<'r>(message: &'r mut Value, texts: &mut Vec<&'r mut String>) {
    match message.get_mut("content") {
        Some(Value::String(text)) => texts.push(text),
        Some(Value::Array(parts)) => {
            let of_part = |part: &'r mut Value| match part.get_mut("text") {
                Some(Value::String(text)) => Some(text),
                _ => None,
            };
            texts.extend(parts.iter_mut().filter_map(of_part));
        }
        _ => {}
    }
}

tunehost_plugin_sdk::export_corpus_filter!(RegexFilter);

#[cfg(test)]
mod tests;
