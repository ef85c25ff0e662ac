//! From files to tokens and labels: read, render, find what is trained, tokenise, filter, cut, split.
//!
//! [`load()`] is the whole path. Nothing here knows how records are ordered or batched.

mod blocks;
pub mod cache;
mod chat;
mod checks;
mod choice;
mod copies;
mod duplicates;
mod encode;
mod end_of_turn;
mod file;
mod filter;
pub mod inspect;
mod length;
mod load;
mod methods;
mod moment;
mod options;
mod python;
mod reader;
mod sample;
mod spans;
mod split;
mod template;
mod thoughts;
mod tokenizer;
mod tokens;
mod turns;
mod unshown;
mod weigh;

pub use chat::PromptForm;
pub use duplicates::{DuplicateReport, Likeness, RootDuplicates};
pub use encode::{Encoder, NOT_TRAINED, Record};
pub use end_of_turn::EndOfTurn;
pub use filter::{FilterReport, Filtered, RootFiltered};
pub use length::{Refusal, RootReport, TruncationReport, table_of_limits};
pub use load::{Filled, cache_folder, fill_cache, load};
pub use moment::Moment;
pub use options::EncodeOptions;
pub use reader::{COLUMNS, Compression, Format, Shape};
pub use sample::Sample;
pub(crate) use template::shipped_template;
pub use template::{ChatTemplate, TemplateInfo};
pub use tokenizer::{Encoded, Tokenizer};
pub use tokens::Tokens;
pub use weigh::SourceReport;

use crate::config::{Overlong, SourceConfig, SplitBy};
use crate::error::{Error, Result};
use crate::hash::FileHash;
use cache::{CacheUse, CachedEncoder};
use length::LengthLimit;
use reader::Columns;
use serde::Serialize;
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The records of a run and how they came about.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// Names of the roots, in the order of the sources; [`Record::root`] counts into it.
    pub roots: Vec<String>,
    /// Records to train on, in the order of the files.
    pub train: Vec<Record>,
    /// Records kept out of training, by root and then in hash order.
    pub held_out: Vec<Record>,
    /// Ids of the held-out records that a training record has the very same tokens as.
    copied: HashSet<Arc<str>>,
    /// What the filter left out and replaced.
    pub filtered: FilterReport,
    /// What the length limit cost.
    pub report: TruncationReport,
    /// The files, in the order of the sources.
    pub files: Vec<FileInfo>,
    /// What caps and weights made of each source.
    pub sources: Vec<SourceReport>,
    /// What the encode cache did, where there is one.
    pub cache: Option<CacheUse>,
    /// Which records say the same.
    pub duplicates: DuplicateReport,
    /// The chat template, where the run names one.
    pub template: Option<TemplateInfo>,
    /// sha256 of the base's `tokenizer.json`, where it has one.
    pub tokenizer_sha256: Option<String>,
    /// What the person should know before training, each a sentence.
    pub warnings: Vec<String>,
}

/// A file as it was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileInfo {
    /// Its path.
    pub path: PathBuf,
    /// The root its records count to.
    pub root: String,
    /// How it holds its records.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// What its records were taken for.
    pub shapes: BTreeSet<Shape>,
    /// Size in bytes.
    pub bytes: u64,
    /// sha256 of its bytes as they lie on disk.
    pub sha256: String,
    /// Records in it.
    pub records: u64,
}

impl FileInfo {
    /// As provenance records it.
    pub fn file_hash(&self) -> FileHash {
        FileHash { path: self.path.clone(), bytes: self.bytes, sha256: self.sha256.clone() }
    }
}

impl Corpus {
    /// At most `max_per_root` held-out records of each root, always the same ones.
    pub fn evaluation(&self, max_per_root: usize) -> Vec<&Record> {
        split::evaluation_sample(&self.held_out, max_per_root)
    }

    /// About what the encode cache takes for the records that the length limit saw.
    pub fn encoded_bytes(&self) -> usize {
        let (records, tokens) = self
            .report
            .roots
            .iter()
            .fold((0, 0), |(records, tokens), root| (records + root.records, tokens + root.tokens));
        cache::size_bytes(records as usize, tokens as usize)
    }

    /// Length in tokens and root of each training record, as a sampler asks for them.
    pub fn columns(&self) -> (Vec<u32>, Vec<u32>) {
        self.train.iter().map(|record| (record.tokens.len() as u32, record.root)).unzip()
    }

    /// What a limit of `max_seq_len` tokens would cost this corpus, which was loaded without one. Longer records are cut, or dropped
    /// under [`Overlong::Drop`]; those with nothing to train at any length count as such, and not as dropped.
    pub fn cost_of_limit(&self, max_seq_len: usize, overlong: Overlong) -> TruncationReport {
        let mut limit = LengthLimit::new(max_seq_len, overlong, &self.roots);
        for record in self.train.iter().chain(&self.held_out) {
            limit.count(record);
        }
        let mut report = limit.finish();
        for (root, uncut) in report.roots.iter_mut().zip(&self.report.roots) {
            (root.p50, root.p90, root.p99, root.max) = (uncut.p50, uncut.p90, uncut.p99, uncut.max);
            root.records += uncut.records_untrained;
            root.tokens += uncut.tokens_untrained;
            root.records_untrained += uncut.records_untrained;
            root.tokens_untrained += uncut.tokens_untrained;
        }
        report
    }

    /// For each of the held-out `records`, whether a training record has the very same tokens.
    pub fn copied(&self, records: &[&Record]) -> Vec<bool> {
        records.iter().map(|record| self.copied.contains(&record.id)).collect()
    }
}

/// The records of one file at full length, in order, for scoring.
///
/// # Errors
/// As [`load`], and `corpus::undecidable_spans`.
pub fn encode_for_scoring(encoder: &Encoder, path: &Path) -> Result<Vec<Record>> {
    let mut cached = CachedEncoder::new(encoder, None);
    let mut records = Vec::new();
    for file in reader::expand(path)? {
        records.extend(encode_all(&mut cached, &file)?);
    }
    Ok(records)
}

fn encode_all(encoder: &mut CachedEncoder, path: &Path) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    let columns = Columns::default();
    let file = file::Place { path, columns: &columns, root: 0, by: SplitBy::default() };
    file::encode_file(encoder, file, |_, lines, _| {
        lines.into_iter().try_for_each(|(_, record)| {
            records.push(record?);
            Ok(())
        })
    })?;
    Ok(records)
}

/// The first `count` records of each file of `source`, at full length, or why one is refused.
///
/// # Errors
/// As [`encode_for_scoring`], for those records; `corpus::no_files`, `corpus::empty_file`.
pub fn first_records(encoder: &Encoder, source: &SourceConfig, count: usize) -> Result<Vec<Result<Record>>> {
    let mut records = Vec::new();
    for path in reader::expand(&source.path)? {
        records.extend(first_of_file(encoder, &path, &source.columns, count)?);
    }
    Ok(records)
}

fn first_of_file(encoder: &Encoder, path: &Path, columns: &Columns, count: usize) -> Result<Vec<Result<Record>>> {
    let mut rows = reader::Rows::open(path, columns)?;
    let mut records = Vec::new();
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            return if records.is_empty() { Err(file::empty(path)) } else { Ok(records) };
        }
        for (line, bytes) in chunk {
            if records.len() == count {
                return Ok(records);
            }
            if let Some(raw) = reader::parse_row(path, line, &bytes, columns)? {
                records.push(match encoder.encode(path, 0, &raw) {
                    Err(error) if !matches!(error.code(), "corpus::undecidable_spans" | "corpus::template_failed") => {
                        return Err(error);
                    }
                    record => record,
                });
            }
        }
    }
}

/// Whether `json` is a record of a shape that can be read; errors call it line `line` of `path`.
///
/// # Errors
/// Class `corpus`.
pub fn check_record(path: &Path, line: u64, json: &str) -> Result<()> {
    reader::parse_row(path, line, json.as_bytes(), &Default::default()).map(drop)
}

/// A JSON file of the base folder; `None` where there is none.
fn read_json(path: &Path) -> Result<Option<serde_json::Value>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let value = serde_json::from_str(&text)
        .map_err(|e| Error::new("corpus::bad_json", format!("{}: {e}", path.display())).source(e))?;
    Ok(Some(value))
}

/// The committed base, corpus and templates, and what encodes with them.
#[cfg(test)]
mod fixtures {
    use super::*;
    use serde_json::Value;

    /// Rows of the tiny base's embedding.
    pub const VOCABULARY: usize = 2048;

    /// What a base says of its tokens.
    pub struct BaseFiles {
        pub tokenizer: Value,
        pub tokenizer_config: Value,
        pub generation_config: Value,
    }

    pub fn encoder() -> Encoder {
        encoder_with(EncodeOptions::default())
    }

    pub fn encoder_with(options: EncodeOptions) -> Encoder {
        Encoder::open(&path("tiny-base"), Some("base"), VOCABULARY, options).unwrap()
    }

    /// The tiny base with another template, and its files changed by `change`.
    pub fn other_encoder(
        template: &str,
        options: EncodeOptions,
        change: impl FnOnce(&mut BaseFiles),
    ) -> Result<Encoder> {
        let [tokenizer, tokenizer_config, generation_config] =
            ["tokenizer", "tokenizer_config", "generation_config"].map(|name| json(&format!("tiny-base/{name}.json")));
        let mut base = BaseFiles { tokenizer, tokenizer_config, generation_config };
        change(&mut base);
        let folder = tempfile::tempdir().unwrap();
        for (name, file) in [
            ("tokenizer.json", base.tokenizer),
            ("tokenizer_config.json", base.tokenizer_config),
            ("generation_config.json", base.generation_config),
        ] {
            std::fs::write(folder.path().join(name), file.to_string()).unwrap();
        }
        let file = folder.path().join("chat.jinja");
        std::fs::write(&file, template).unwrap();
        Encoder::open(folder.path(), file.to_str(), VOCABULARY, options)
    }

    pub fn encode(encoder: &Encoder, record: &Value) -> Result<Record> {
        let path = Path::new("talk.jsonl");
        let raw = reader::parse_row(path, 1, record.to_string().as_bytes(), &Default::default())?;
        encoder.encode(path, 0, &raw.unwrap())
    }

    /// What of the record is trained, as text.
    pub fn trained_text(encoder: &Encoder, record: &Record) -> String {
        let labels = record.tokens.labels();
        let ids: Vec<u32> = labels.into_iter().filter(|&l| l != NOT_TRAINED).map(|l| l as u32).collect();
        encoder.tokenizer().unwrap().decode(&ids, false).unwrap()
    }

    pub fn path(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
    }

    pub fn json(name: &str) -> serde_json::Value {
        read_json(&path(name)).unwrap().unwrap()
    }

    pub fn template(name: &str) -> ChatTemplate {
        let tokenizer = Tokenizer::open(&path("tiny-base")).unwrap().unwrap();
        let file = path("templates").join(name);
        ChatTemplate::open(file.to_str().unwrap(), &path("tiny-base"), &tokenizer, Moment::default()).unwrap()
    }

    pub fn inline_template(source: &str) -> ChatTemplate {
        let special = [("bos_token", "<bos>"), ("eos_token", "<turn|>")];
        let special = special.map(|(key, text)| (key.to_string(), text.to_string()));
        ChatTemplate::new(source, "inline".into(), None, special.into(), Moment::default()).unwrap()
    }
}

#[cfg(test)]
mod tests;
