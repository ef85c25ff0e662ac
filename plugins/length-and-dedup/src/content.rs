//! What of a record is trained on, apart from how its file spells it.

use serde::Deserialize;
use serde_json::Value;

use crate::murmur::hash128;

/// The record without its id and whatever else it carries, the keys of every object in one order.
#[derive(Deserialize)]
pub struct Content {
    #[serde(default)]
    messages: Value,
    #[serde(default)]
    tools: Value,
    #[serde(default)]
    text: Value,
    #[serde(default)]
    input_ids: Value,
    #[serde(default)]
    labels: Value,
}

impl Content {
    /// Of the JSON object of a record.
    pub fn parse(record: &str) -> Result<Self, String> {
        let mut content: Self = serde_json::from_str(record).map_err(|error| error.to_string())?;
        content.messages.sort_all_objects();
        content.tools.sort_all_objects();
        Ok(content)
    }

    /// Two contents have the same hash only if they are the same, but for 1 chance in 2^128.
    pub fn hash(&self) -> u128 {
        hash128(self.parts().map(Value::to_string).join("\n").as_bytes(), 0)
    }

    /// All its words and numbers, in lower case and joined by single spaces. Roles are words too, and tokens numbers.
    pub fn words(&self) -> String {
        let mut words = String::new();
        self.parts().into_iter().for_each(|part| add_words(part, &mut words));
        words
    }

    fn parts(&self) -> [&Value; 5] {
        [&self.messages, &self.tools, &self.text, &self.input_ids, &self.labels]
    }
}

fn add_words(value: &Value, words: &mut String) {
    let mut add = |text: &str| {
        for word in text.split_whitespace() {
            if !words.is_empty() {
                words.push(' ');
            }
            words.extend(word.chars().flat_map(char::to_lowercase));
        }
    };
    match value {
        Value::String(text) => add(text),
        Value::Number(number) => add(&number.to_string()),
        Value::Array(values) => values.iter().for_each(|value| add_words(value, words)),
        Value::Object(values) => values.values().for_each(|value| add_words(value, words)),
        Value::Null | Value::Bool(_) => {}
    }
}
