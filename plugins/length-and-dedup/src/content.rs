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

    fn parts(&self) -> [&Value; 5] {
        [&self.messages, &self.tools, &self.text, &self.input_ids, &self.labels]
    }
}
