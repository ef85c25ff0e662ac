//! Drops records that are too short or too long, and those that are copies of a record kept before: of the very same content,
//! or of nearly the same words, whatever their case and the white space between them.

use std::collections::HashSet;

use serde::Deserialize;
use tunehost_plugin_sdk::{Action, Chunk, CorpusFilter, Plugin, Verdicts};

mod content;
mod murmur;
mod near;

use content::Content;
use near::Near;

/// Where `similarity` is not given.
const SIMILARITY: f64 = 0.8;

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    min_tokens: u32,
    max_tokens: Option<u32>,
    min_trained_tokens: u32,
    dedup: Dedup,
    similarity: Option<f64>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Dedup {
    Exact,
    Near,
    None,
}

impl Default for Config {
    fn default() -> Self {
        Self { min_tokens: 0, max_tokens: None, min_trained_tokens: 1, dedup: Dedup::Exact, similarity: None }
    }
}

struct LengthAndDedup {
    config: Config,
    /// The contents of the records kept so far.
    kept: HashSet<u128>,
    /// Their words, where near copies are dropped too.
    near: Option<Near>,
}

impl Plugin for LengthAndDedup {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "min_tokens": {
      "type": "integer", "minimum": 0, "maximum": 4294967295, "default": 0,
      "description": "Fewest tokens of a record"
    },
    "max_tokens": {
      "type": "integer", "minimum": 1, "maximum": 4294967295,
      "description": "Most tokens of a record, before it is cut to data.max_seq_len; any number where it is not given"
    },
    "min_trained_tokens": {
      "type": "integer", "minimum": 0, "maximum": 4294967295, "default": 1,
      "description": "Fewest trained tokens of a record"
    },
    "dedup": {
      "type": "string", "enum": ["exact", "near", "none"], "default": "exact",
      "description": "Which copies of an earlier record are dropped: exact are those of the same messages and tools, text, or tokens and labels; near also those of nearly the same words"
    },
    "similarity": {
      "type": "number", "exclusiveMinimum": 0, "maximum": 1,
      "description": "With dedup = near: from which share of common runs of three words on two records are copies; 0.8 where it is not given"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        if let Some(most) = config.max_tokens.filter(|&most| most < config.min_tokens.max(1)) {
            return Err(format!("max_tokens must be at least 1 and min_tokens, not {most}"));
        }
        match config.similarity {
            Some(_) if config.dedup != Dedup::Near => return Err("similarity is for dedup = \"near\" alone".into()),
            Some(share) if !(share > 0.0 && share <= 1.0) => {
                return Err(format!("similarity must be above 0 and at most 1, not {share}"));
            }
            _ => {}
        }
        Ok(Self { config, kept: HashSet::new(), near: None })
    }
}

impl CorpusFilter for LengthAndDedup {
    fn filter(&mut self, chunk: Chunk) -> Result<Verdicts, String> {
        if chunk.first == 0 {
            self.kept.clear();
            self.near = None;
        }
        let mut verdicts = Verdicts { actions: Vec::with_capacity(chunk.ids.len()), texts: Vec::new() };
        for (at, record) in chunk.records.iter().enumerate() {
            let reason = match self.wrong_length(chunk.tokens[at], chunk.trained_tokens[at]) {
                None => self.copied(record).map_err(|error| format!("record {}: {error}", chunk.ids[at]))?,
                reason => reason,
            };
            verdicts.actions.push(if reason.is_some() { Action::Drop } else { Action::Keep });
            verdicts.texts.extend(reason);
        }
        Ok(verdicts)
    }
}

impl LengthAndDedup {
    fn wrong_length(&self, tokens: u32, trained: u32) -> Option<String> {
        let Config { min_tokens, max_tokens, min_trained_tokens, .. } = self.config;
        if tokens < min_tokens {
            Some(format!("shorter than {min_tokens} tokens"))
        } else if let Some(most) = max_tokens.filter(|&most| tokens > most) {
            Some(format!("longer than {most} tokens"))
        } else if trained < min_trained_tokens {
            Some(format!("fewer than {min_trained_tokens} trained tokens"))
        } else {
            None
        }
    }

    /// Why the record is a copy, if it is; otherwise it is remembered.
    fn copied(&mut self, record: &str) -> Result<Option<String>, String> {
        if self.config.dedup == Dedup::None {
            return Ok(None);
        }
        let content = Content::parse(record)?;
        let hash = content.hash();
        if self.kept.contains(&hash) {
            return Ok(Some("copy of an earlier record".into()));
        }
        if self.config.dedup == Dedup::Near {
            let near = self.near.get_or_insert_with(|| Near::new(self.config.similarity.unwrap_or(SIMILARITY)));
            if near.is_copy(&content.words()) {
                return Ok(Some("near copy of an earlier record".into()));
            }
        }
        self.kept.insert(hash);
        Ok(None)
    }
}

tunehost_plugin_sdk::export_corpus_filter!(LengthAndDedup);

#[cfg(test)]
mod tests;
