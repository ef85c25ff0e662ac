//! A corpus filter that misbehaves as its setting `act` says, at the first record of the corpus; it keeps the others.

use serde::Deserialize;
use tunehost_plugin_sdk::{Action, Chunk, CorpusFilter, Plugin, Verdicts};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    act: Act,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Act {
    Panic,
    // Columns.
    TooFew,
    TooMany,
    MissingText,
    SurplusText,
    // Reasons.
    EmptyReason,
    LongReason,
    // New records.
    NoJson,
    NoObject,
    UnknownShape,
    // At the first record of every chunk, each of which by itself is right.
    CutDependent,
}

struct Hostile {
    act: Act,
}

impl Plugin for Hostile {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "required": ["act"], "properties": {"act": {"type": "string"}}}"#;

    fn new(Config { act }: Config) -> Result<Self, String> {
        Ok(Self { act })
    }
}

impl CorpusFilter for Hostile {
    fn filter(&mut self, chunk: Chunk) -> Result<Verdicts, String> {
        let mut verdicts = Verdicts { actions: vec![Action::Keep; chunk.ids.len()], texts: Vec::new() };
        let Some(id) = chunk.ids.first() else { return Ok(verdicts) };
        if chunk.first != 0 && self.act != Act::CutDependent {
            return Ok(verdicts);
        }
        let mut answer = |action, texts: &[&str]| {
            verdicts.actions[0] = action;
            verdicts.texts = texts.iter().map(|text| text.to_string()).collect();
        };
        match self.act {
            Act::Panic => panic!("record {id} is cursed"),
            Act::TooFew => drop(verdicts.actions.pop()),
            Act::TooMany => verdicts.actions.push(Action::Keep),
            Act::MissingText => answer(Action::Drop, &[]),
            Act::SurplusText => answer(Action::Keep, &["for nothing"]),
            Act::EmptyReason => answer(Action::Drop, &[""]),
            Act::LongReason => answer(Action::Drop, &[&"x".repeat(1 << 20)]),
            Act::NoJson => answer(Action::Replace, &["{\"text\": "]),
            Act::NoObject => answer(Action::Replace, &["[\"text\"]"]),
            Act::UnknownShape => answer(Action::Replace, &["{\"prose\": \"a\"}"]),
            Act::CutDependent => answer(Action::Drop, &["first of its chunk"]),
        }
        Ok(verdicts)
    }
}

tunehost_plugin_sdk::export_corpus_filter!(Hostile);
