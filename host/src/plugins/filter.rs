//! Plugins of the kind `corpus-filter`.

use serde_json::Value;

use super::reference::{Identity, PluginRef};
use super::runtime::{Plugin, shown};
use super::since_v0_1_0::filtering;
use crate::error::{Error, Result};

/// A record that a filter judges.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Unique in the corpus.
    pub id: &'a str,
    /// Name of its root.
    pub root: &'a str,
    /// Its JSON object.
    pub json: &'a str,
    /// Its tokens, before any length limit.
    pub tokens: u32,
    /// How many of them are trained.
    pub trained_tokens: u32,
}

/// What a filter says of one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is trained as it is.
    Keep,
    /// It is left out, for this reason.
    Drop(String),
    /// This JSON object is trained in its place.
    Replace(String),
}

/// A running corpus filter.
pub struct CorpusFilter {
    plugin: Plugin<filtering::Guest>,
}

impl CorpusFilter {
    /// Start a filter with its settings, `[plugins.config.corpus_filter]`.
    ///
    /// # Errors
    /// `plugin::config_refused`, `plugin::wrong_contract`, and those of a failed call.
    pub fn load(reference: &PluginRef, config: Option<&Value>) -> Result<Self> {
        let plugin = Plugin::load(reference, config, |component, store, instance| {
            filtering::GuestIndices::new(component)?.load(store, instance)
        })?;
        Ok(Self { plugin })
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        self.plugin.identity()
    }

    /// A verdict for each of `chunk`, neighbouring records with `first` records of the corpus before them; 0 starts a corpus.
    /// The verdicts keep every rule of `wit/corpus-filter.wit`.
    ///
    /// # Errors
    /// `plugin::refused`, `plugin::invalid_verdicts` naming the record, and those of a failed call.
    pub fn filter(&mut self, first: u64, chunk: &[Candidate]) -> Result<Vec<Verdict>> {
        fn column<'a, T>(chunk: &[Candidate<'a>], of: fn(&Candidate<'a>) -> T) -> Vec<T> {
            chunk.iter().map(of).collect()
        }
        let columns = filtering::Chunk {
            first,
            ids: &column(chunk, |record| record.id),
            roots: &column(chunk, |record| record.root),
            records: &column(chunk, |record| record.json),
            tokens: &column(chunk, |record| record.tokens),
            trained_tokens: &column(chunk, |record| record.trained_tokens),
        };
        let answer = self.plugin.call("filter", |functions, store| functions.call_filter(store, columns))?;
        verdicts(answer, first, chunk, self.plugin.identity())
    }
}

fn verdicts(answer: filtering::Verdicts, first: u64, chunk: &[Candidate], identity: &Identity) -> Result<Vec<Verdict>> {
    let invalid = |what: String, expected: String| {
        Error::new("plugin::invalid_verdicts", format!("{identity}: filter: {what}"))
            .expected(expected)
            .help("this is a bug in the plugin: use another filter, or tell its author")
    };
    let place = |at: usize| format!("record {:?} (number {} of the corpus)", chunk[at].id, first + at as u64 + 1);
    let filtering::Verdicts { actions, texts } = answer;
    let count = chunk.len();
    if actions.len() != count {
        let what = match actions.len() < count {
            true => format!("{} of {count} records have an answer; the first without is {}", actions.len(), {
                place(actions.len())
            }),
            false => format!("there are {} answers for {count} records", actions.len()),
        };
        return Err(invalid(what, "one action for each record of the chunk".into()));
    }
    let needed = actions.iter().filter(|action| **action != filtering::Action::Keep).count();
    if texts.len() != needed {
        let what = format!("there are {} texts for {needed} records that are dropped or replaced", texts.len());
        return Err(invalid(what, "one text for each of them".into()));
    }
    let mut texts = texts.into_iter();
    let mut text = || texts.next().expect("counted above");
    let verdict = |(at, action): (usize, &filtering::Action)| match action {
        filtering::Action::Keep => Ok(Verdict::Keep),
        filtering::Action::Drop => match shown(&text()) {
            reason if reason.is_empty() => {
                Err(invalid(format!("{} is dropped without a reason", place(at)), "a few words".into()))
            }
            reason => Ok(Verdict::Drop(reason)),
        },
        filtering::Action::Replace => {
            let record = text();
            let problem = match serde_json::from_str::<Value>(&record) {
                Ok(Value::Object(_)) if record.contains('\n') => Some("is more than one line".to_string()),
                Ok(Value::Object(_)) => None,
                Ok(_) => Some("is no object".into()),
                Err(error) => Some(format!("is no JSON: {error}")),
            };
            match problem {
                None => Ok(Verdict::Replace(record)),
                Some(problem) => {
                    let what = format!("what is to replace {} {problem}", place(at));
                    Err(invalid(what, "a JSON object on one line".into()))
                }
            }
        }
    };
    actions.iter().enumerate().map(verdict).collect()
}
