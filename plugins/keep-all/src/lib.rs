//! The corpus as it is.

use serde::Deserialize;
use tunehost_plugin_sdk::{Action, Chunk, CorpusFilter, Plugin, Verdicts};

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct KeepAll;

impl Plugin for KeepAll {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl CorpusFilter for KeepAll {
    fn filter(&mut self, chunk: Chunk) -> Result<Verdicts, String> {
        Ok(Verdicts { actions: vec![Action::Keep; chunk.ids.len()], texts: Vec::new() })
    }
}

tunehost_plugin_sdk::export_corpus_filter!(KeepAll);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_record_of_a_chunk_is_kept() {
        let chunk = Chunk {
            first: 5,
            ids: vec!["a".into(), "b".into()],
            roots: vec!["r".into(); 2],
            records: vec![r#"{"text": ""}"#.into(); 2],
            tokens: vec![0, 1],
            trained_tokens: vec![0, 1],
        };
        let verdicts = KeepAll.filter(chunk).unwrap();
        assert_eq!(verdicts.actions, [Action::Keep, Action::Keep]);
        assert!(verdicts.texts.is_empty());
    }
}
