//! The corpus filter's place in the path: after encoding, before the length limit; and the account of what it did.

use super::encode::Record;
use crate::error::{Error, Result};
use crate::plugins::{Candidate, CorpusFilter, Verdict};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Reasons that are counted by themselves; the others, of a filter that words each drop anew, are counted together.
const REASONS_MAX: usize = 100;
/// The reason under which those are counted.
const OTHER_REASONS: &str = "(other reasons)";

/// What the filter did, written as `filter-report.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FilterReport {
    /// Name and version of the filter.
    pub filter: String,
    /// One entry for each root.
    pub roots: Vec<RootFiltered>,
    /// Every record that was dropped or replaced, in the order of the corpus.
    pub records: Vec<Filtered>,
}

/// One root's account.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RootFiltered {
    /// The root.
    pub root: String,
    /// Records that the filter saw.
    pub records: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Records that it left out.
    pub dropped: u64,
    /// Their tokens.
    pub tokens_dropped: u64,
    /// Records that it replaced.
    pub replaced: u64,
    /// Records dropped, by reason.
    pub reasons: BTreeMap<String, u64>,
}

/// A record that is not trained as the file has it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Filtered {
    /// Its id.
    pub id: String,
    /// Why it was dropped; `None` where it was replaced.
    pub dropped: Option<String>,
}

/// A record of a chunk, with the JSON object that it was made of.
pub struct Judged<'a> {
    /// Its JSON.
    pub json: &'a str,
    /// The record as it was encoded.
    pub record: &'a Record,
}

/// Calls the filter chunk by chunk and keeps the account.
pub struct Filtering<'a> {
    filter: &'a mut CorpusFilter,
    /// Records seen.
    count: u64,
    report: FilterReport,
}

impl<'a> Filtering<'a> {
    /// A corpus of `roots` that starts here.
    pub fn new(filter: &'a mut CorpusFilter, roots: &[String]) -> Self {
        let identity = filter.identity();
        let report = FilterReport {
            filter: format!("{} {}", identity.name, identity.version),
            roots: roots.iter().map(|root| RootFiltered { root: root.clone(), ..Default::default() }).collect(),
            records: Vec::new(),
        };
        Self { filter, count: 0, report }
    }

    /// A verdict for each record of the chunk.
    ///
    /// # Errors
    /// Class `plugin`.
    pub fn judge(&mut self, chunk: &[Judged]) -> Result<Vec<Verdict>> {
        if chunk.is_empty() {
            return Ok(Vec::new());
        }
        let roots = &self.report.roots;
        let candidates: Vec<Candidate> = chunk
            .iter()
            .map(|Judged { json, record }| Candidate {
                id: &record.id,
                root: &roots[record.root as usize].root,
                json,
                tokens: record.tokens.len() as u32,
                trained_tokens: record.trained_tokens() as u32,
            })
            .collect();
        let verdicts = self.filter.filter(self.count, &candidates)?;
        self.count += chunk.len() as u64;
        for (judged, verdict) in chunk.iter().zip(&verdicts) {
            self.note(judged.record, verdict);
        }
        Ok(verdicts)
    }

    fn note(&mut self, record: &Record, verdict: &Verdict) {
        let tokens = record.tokens.len() as u64;
        let root = &mut self.report.roots[record.root as usize];
        root.records += 1;
        root.tokens += tokens;
        let dropped = match verdict {
            Verdict::Keep => return,
            Verdict::Replace(_) => {
                root.replaced += 1;
                None
            }
            Verdict::Drop(reason) => {
                root.dropped += 1;
                root.tokens_dropped += tokens;
                let counted = root.reasons.contains_key(reason) || root.reasons.len() < REASONS_MAX;
                let reason = if counted { reason } else { OTHER_REASONS };
                *root.reasons.entry(reason.to_string()).or_default() += 1;
                Some(reason.to_string())
            }
        };
        self.report.records.push(Filtered { id: record.id.to_string(), dropped });
    }

    /// The filter's name and version.
    pub fn filter(&self) -> &str {
        &self.report.filter
    }

    /// What is said of a replacement for the record `id` at `place` that is no record.
    pub fn untrainable(&self, id: &str, place: &str, error: Error) -> Error {
        let what = format!("what is to replace record {id:?} of {place} cannot be trained: {}", error.message());
        Error::new("plugin::invalid_verdicts", format!("{}: filter: {what}", self.filter.identity()))
            .expected("a record with `messages`, `text` or `input_ids`, as a file may hold")
            .help("this is a bug in the plugin or its settings: use another filter, or tell its author")
            .source(error)
    }

    /// The account.
    pub fn finish(self) -> FilterReport {
        self.report
    }
}

/// A table of the roots and a line for each reason; nothing where every record was kept.
impl fmt::Display for FilterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.records.is_empty() {
            return Ok(());
        }
        writeln!(
            f,
            "{:<20} {:>9} {:>9} {:>15} {:>9}",
            format!("filter {}", self.filter),
            "records",
            "dropped",
            "tokens dropped",
            "replaced"
        )?;
        for root in &self.roots {
            let share = 100.0 * root.tokens_dropped as f64 / (root.tokens as f64).max(1.0);
            let tokens = format!("{} ({share:.1}%)", root.tokens_dropped);
            writeln!(f, "{:<20} {:>9} {:>9} {tokens:>15} {:>9}", root.root, root.records, root.dropped, root.replaced)?;
            for (reason, count) in &root.reasons {
                writeln!(f, "  {count:>6}  {reason}")?;
            }
        }
        Ok(())
    }
}
