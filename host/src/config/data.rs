//! `[data]` and `[template]`: which records a run reads, and what of them it trains.

use crate::corpus::Moment;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Sources, chat template, lengths and the held-out split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The files, each with the root it belongs to.
    pub sources: Vec<SourceConfig>,
    /// Path of the chat template, or the word `base` to use the one the base ships, as a choice stated here. Needed
    /// when a source has `messages`.
    #[serde(default)]
    pub template: Option<String>,
    /// What of a conversation is trained.
    #[serde(default)]
    pub train_on: TrainOn,
    /// Whether what the assistant thinks is trained with what it says.
    #[serde(default = "yes")]
    pub train_reasoning: bool,
    /// Longest record in tokens.
    pub max_seq_len: usize,
    /// What happens to a longer record.
    #[serde(default)]
    pub overlong: Overlong,
    /// Share of each root's records kept out of training, chosen by a hash of the record, 0 to 0.5.
    #[serde(default = "held_out")]
    pub held_out: f64,
    /// What that hash is of.
    #[serde(default)]
    pub split_by: SplitBy,
    /// Folder in which encoded records are kept for the next run, or the word `off`; without it, one in the user's cache
    /// folder. Decides nothing of what is computed.
    #[serde(default)]
    pub cache: Option<String>,
    /// Which records that say the same as an earlier one are left out.
    #[serde(default)]
    pub dedup: Dedup,
    /// What happens to training records that are like a held-out one.
    #[serde(default)]
    pub leakage: Leakage,
}

fn yes() -> bool {
    true
}

fn held_out() -> f64 {
    0.05
}

/// How the chat template is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateConfig {
    /// Train with a template that is not the one the base ships.
    pub accept_mismatch: bool,
    /// What a template is told when it asks for the date.
    pub now: Moment,
    /// Where a template has `{% generation %}` blocks, what they hold is what the assistant says.
    pub generation_blocks: bool,
    /// Put the empty thought of the template's generation prompt in front of trained turns.
    pub empty_thought: bool,
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self { accept_mismatch: false, now: Moment::default(), generation_blocks: true, empty_thought: false }
    }
}

/// What of a conversation is trained, where its messages do not say so themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainOn {
    /// What the assistant says, with the tokens that end its turns.
    #[default]
    Assistant,
    /// What it says to the last question that it answers.
    LastTurn,
    /// Everything.
    All,
}

/// What decides on which side of the held-out split a record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SplitBy {
    /// Its content: copies of a record are all trained or all held out.
    #[default]
    Content,
    /// Its id and content: copies may lie on both sides, and the evaluation says how many do.
    Record,
}

/// Which records that say the same as an earlier one, trained or held out as it is, are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dedup {
    /// None; they are counted.
    #[default]
    Off,
    /// Those with the same content.
    Exact,
    /// Those, and those with nearly the same words.
    Near,
}

/// What happens to training records with the words of a held-out one, or nearly so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Leakage {
    /// They are trained; a warning says how many held-out records are like them, and the run folder which.
    #[default]
    Report,
    /// They are left out.
    Drop,
}

/// Files of records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// A file, a folder (the readable files in it) or a glob.
    pub path: PathBuf,
    /// The root its records count to; several sources may share one.
    pub root: String,
    /// How often each training record is trained in an epoch, more than 0 to 1000: 2.5 is twice or three times, 0.1 is one
    /// record in ten, chosen by a hash. Held-out records are not affected.
    #[serde(default = "weight")]
    pub weight: f64,
    /// At most this many of the source's records are used, chosen by a hash before `weight` repeats or thins them.
    #[serde(default)]
    pub cap: Option<usize>,
    /// The file's own columns by the key of a record that they stand for, such as `messages = "dialog"`.
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
}

fn weight() -> f64 {
    1.0
}

impl SourceConfig {
    /// All records of `path`, once each.
    pub fn new(path: impl Into<PathBuf>, root: impl Into<String>) -> Self {
        Self { path: path.into(), root: root.into(), weight: weight(), cap: None, columns: BTreeMap::new() }
    }
}

/// What happens to a record longer than `max_seq_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// Cut at `max_seq_len` and count what was lost.
    #[default]
    Truncate,
    /// Make several records of a conversation, each of whole turns; one that is too long by itself, and a record that is no
    /// conversation, is cut.
    SplitTurns,
    /// Leave the record out and count it.
    Drop,
    /// Stop with an error that names the record.
    Error,
}
