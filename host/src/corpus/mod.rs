//! From files to tokens and labels: read, render, find what is trained, tokenise, filter, cut, split.
//!
//! [`load()`] is the whole path. Nothing here knows how records are ordered or batched.

mod blocks;
pub mod cache;
mod chat;
mod checks;
mod choice;
mod duplicates;
mod encode;
mod file;
mod filter;
pub mod inspect;
mod length;
mod load;
mod moment;
mod options;
mod python;
mod reader;
mod spans;
mod split;
mod template;
mod thoughts;
mod tokenizer;
mod tokens;
mod turns;
mod weigh;

pub use chat::PromptForm;
pub use duplicates::{DuplicateReport, Likeness, RootDuplicates};
pub use encode::{Encoder, NOT_TRAINED, Record};
pub use filter::{FilterReport, Filtered, RootFiltered};
pub use length::{Refusal, RootReport, TruncationReport, table_of_limits};
pub use load::{Filled, cache_folder, fill_cache, load};
pub use moment::Moment;
pub use options::EncodeOptions;
pub use reader::{COLUMNS, Compression, Format};
pub use spans::EndOfTurn;
pub(crate) use template::shipped_template;
pub use template::{ChatTemplate, TemplateInfo};
pub use tokenizer::{Encoded, Tokenizer};
pub use tokens::Tokens;
pub use weigh::SourceReport;

use crate::config::{Overlong, SourceConfig, SplitBy};
use crate::error::{Error, Result};
use cache::{CacheUse, CachedEncoder};
use length::LengthLimit;
use reader::Columns;
use serde::Serialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The records of a run and how they came about.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// Names of the roots, in the order of the sources; [`Record::root`] counts into it.
    pub roots: Vec<String>,
    /// Records to train on, in the order of the files.
    pub train: Vec<Record>,
    /// Records kept out of training, by root and then in hash order.
    pub held_out: Vec<Record>,
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
    /// Size in bytes.
    pub bytes: u64,
    /// sha256 of its bytes as they lie on disk.
    pub sha256: String,
    /// Records in it.
    pub records: u64,
}

impl Corpus {
    /// At most `max_per_root` held-out records of each root, always the same ones.
    pub fn evaluation(&self, max_per_root: usize) -> Vec<&Record> {
        split::evaluation_sample(&self.held_out, max_per_root)
    }

    /// Length in tokens and root of each training record, as a sampler asks for them.
    pub fn columns(&self) -> (Vec<u32>, Vec<u32>) {
        self.train.iter().map(|record| (record.tokens.len() as u32, record.root)).unzip()
    }

    /// What a limit of `max_seq_len` tokens would cost this corpus, if it cut longer records; the corpus was loaded
    /// without one.
    pub fn cost_of_limit(&self, max_seq_len: usize) -> TruncationReport {
        let mut limit = LengthLimit::new(max_seq_len, Overlong::Truncate, &self.roots);
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

    /// For each of `records`, whether a training record has the very same tokens.
    pub fn copied(&self, records: &[&Record]) -> Vec<bool> {
        // lengths first: they tell most records apart, and lie in memory
        let lengths: HashSet<usize> = records.iter().map(|r| r.tokens.len()).collect();
        let alike = self.train.iter().filter(|r| lengths.contains(&r.tokens.len()));
        let trained: HashSet<&[u8]> = alike.map(|r| r.tokens.id_bytes()).collect();
        records.iter().map(|r| trained.contains(r.tokens.id_bytes())).collect()
    }
}

/// The records of one file at full length, in order, for scoring.
///
/// # Errors
/// As [`load`], and `corpus::undecidable_spans`.
pub fn encode_for_scoring(encoder: &Encoder, path: &Path) -> Result<Vec<Record>> {
    encode_all(&mut CachedEncoder::new(encoder, None), path)
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

/// The first `count` records of each file of `source`, at full length.
///
/// # Errors
/// As [`encode_for_scoring`], for those records, and `corpus::no_files`.
pub fn first_records(encoder: &Encoder, source: &SourceConfig, count: usize) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for path in reader::expand(&source.path)? {
        records.extend(first_of_file(encoder, &path, &source.columns, count)?);
    }
    Ok(records)
}

fn first_of_file(encoder: &Encoder, path: &Path, columns: &Columns, count: usize) -> Result<Vec<Record>> {
    let mut rows = reader::Rows::open(path, columns)?;
    let mut records = Vec::new();
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            return Ok(records);
        }
        for (line, bytes) in chunk {
            if records.len() == count {
                return Ok(records);
            }
            if let Some(raw) = reader::parse_row(path, line, &bytes, columns)? {
                records.push(encoder.encode(path, 0, &raw)?);
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
mod tests {
    use super::*;
    use crate::config::{DataConfig, Dedup, Leakage, TemplateConfig, TrainOn};
    use crate::plugins::{CorpusFilter, Kind, PluginRef};

    pub fn config(sources: &[(&Path, &str)]) -> DataConfig {
        let source = |&(path, root): &(&Path, &str)| SourceConfig::new(path, root);
        DataConfig {
            sources: sources.iter().map(source).collect(),
            template: Some("base".into()),
            max_seq_len: 512,
            overlong: Overlong::Truncate,
            train_on: TrainOn::default(),
            train_reasoning: true,
            held_out: 0.05,
            split_by: SplitBy::default(),
            cache: Some("off".into()),
            dedup: Dedup::default(),
            leakage: Leakage::default(),
        }
    }

    pub fn file(folder: &Path, name: &str, lines: &[&str]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    pub fn load_tiny(config: &DataConfig) -> Result<Corpus> {
        load_filtered(config, "keep-all", None)
    }

    fn load_filtered(config: &DataConfig, filter: &str, settings: Option<serde_json::Value>) -> Result<Corpus> {
        let plugin = PluginRef::resolve(Kind::CorpusFilter, filter, &[]).unwrap();
        let mut filter = CorpusFilter::load(&plugin, settings.as_ref()).unwrap();
        load(config, &TemplateConfig::default(), &fixtures::path("tiny-base"), 2048, &mut filter, &mut |_, _| {})
    }

    #[test]
    fn the_bundled_corpus_loads_and_every_token_is_accounted_for() {
        let paths = ["stage", "smalltalk", "verse"].map(|root| (fixtures::path(&format!("corpus/{root}.jsonl")), root));
        let corpus = load_tiny(&config(&paths.each_ref().map(|(path, root)| (path.as_path(), *root)))).unwrap();
        assert_eq!(corpus.roots, ["stage", "smalltalk", "verse"]);
        assert_eq!(corpus.files.iter().map(|file| file.records).collect::<Vec<_>>(), [575, 1716, 112]);
        for (index, root) in corpus.report.roots.iter().enumerate() {
            let of_root = |records: &[Record]| -> Vec<Record> {
                records.iter().filter(|record| record.root as usize == index).cloned().collect()
            };
            let (train, held_out) = (of_root(&corpus.train), of_root(&corpus.held_out));
            assert!(!train.is_empty() && !held_out.is_empty(), "{root:?}");
            assert_eq!(root.records_kept as usize, train.len() + held_out.len());
            let both = || train.iter().chain(&held_out);
            assert_eq!(root.tokens_kept as usize, both().map(|record| record.tokens.len()).sum::<usize>());
            let trained: usize = both().map(Record::trained_tokens).sum();
            assert_eq!((root.trained_tokens - root.trained_tokens_lost) as usize, trained);
            assert!(both().all(|record| record.tokens.len() <= 512 && record.trained_tokens() > 0));
        }
        assert!(corpus.report.refused.is_empty());
        assert!(corpus.report.roots[0].max > 512 && corpus.report.roots[0].records_cut > 0);
        let template = corpus.template.as_ref().unwrap();
        assert_eq!(template.base_sha256.as_ref(), Some(&template.sha256));
        let sample = corpus.evaluation(3);
        assert_eq!(sample.len(), 9);
        assert_eq!(sample[0], &corpus.held_out[0]);
    }

    #[test]
    fn the_split_is_stable_when_the_corpus_grows_and_ids_change() {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(fixtures::path("corpus/smalltalk.jsonl")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let verse = std::fs::read_to_string(fixtures::path("corpus/verse.jsonl")).unwrap();
        let verse: Vec<&str> = verse.lines().collect();
        let held_out = |lines: &[&str]| {
            let path = file(folder.path(), "talk.jsonl", lines);
            let other = file(folder.path(), "other.jsonl", &verse[..lines.len() / 10]);
            let sources = config(&[(&other, "other"), (&path, "talk")]);
            let corpus = load_tiny(&DataConfig { held_out: 0.2, ..sources }).unwrap();
            let of_root = |record: &&Record| corpus.roots[record.root as usize] == "talk";
            let ids =
                |records: &[Record]| records.iter().filter(of_root).map(|r| r.tokens.ids()).collect::<HashSet<_>>();
            (ids(&corpus.train), ids(&corpus.held_out))
        };
        let (train, held) = held_out(&lines[500..700]);
        let (more_train, more_held) = held_out(&lines[300..900]);
        assert!(train.is_subset(&more_train) && held.is_subset(&more_held));
        assert!(more_train.is_disjoint(&more_held), "equal records are on the same side");
        let renamed: Vec<String> =
            lines[500..700].iter().map(|line| line.replace("\"id\": \"", "\"id\": \"new ")).collect();
        assert_eq!(held_out(&renamed.iter().map(String::as_str).collect::<Vec<_>>()), (train, held));
    }

    #[test]
    fn weights_copy_training_records_only_and_files_of_a_folder_are_one_source() {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(fixtures::path("corpus/smalltalk.jsonl")).unwrap();
        let lines: Vec<&str> = text.lines().take(200).collect();
        file(folder.path(), "one.jsonl", &lines[..120]);
        file(folder.path(), "two.json", &[&format!("[{}]", lines[120..].join(","))]);
        let mut config = DataConfig { held_out: 0.2, ..config(&[(folder.path(), "talk")]) };
        let once = load_tiny(&config).unwrap();
        config.sources[0].weight = 2.0;
        let twice = load_tiny(&config).unwrap();
        assert_eq!(once.held_out, twice.held_out);
        assert_eq!(2 * once.train.len(), twice.train.len());
        assert!(twice.train.iter().any(|record| record.id == format!("{}#2", once.train[0].id)));
        assert_eq!(twice.sources[0].copies as usize, once.train.len());
        assert!(twice.sources[0].to_string().contains("2 files: jsonl, json, 200 records, "), "{}", twice.sources[0]);
        config.sources[0].cap = Some(50);
        let capped = load_tiny(&config).unwrap();
        assert_eq!(capped.train.len() / 2 + capped.held_out.len(), 50);
        assert_eq!(capped.sources[0].capped, 150);
        let other_name = folder.path().join("../").join(folder.path().file_name().unwrap()).join("one.jsonl");
        for again in [folder.path().join("o*.jsonl"), other_name] {
            let mut config = config.clone();
            config.sources.push(SourceConfig::new(again, "talk"));
            assert_eq!(load_tiny(&config).unwrap_err().code(), "corpus::file_twice");
        }
    }

    #[test]
    fn of_a_prompt_and_its_completion_the_completion_is_trained() {
        let folder = tempfile::tempdir().unwrap();
        let turn = |role: &str, words: &str| serde_json::json!({"role": role, "content": words});
        let chat = serde_json::json!({"prompt": [turn("user", "a"), turn("assistant", "old words"), turn("user", "b")],
            "completion": [turn("assistant", "new words")]});
        let path =
            file(folder.path(), "a.jsonl", &[r#"{"prompt": "One two", "completion": " three"}"#, &chat.to_string()]);
        for (train_on, end) in [(TrainOn::Assistant, ""), (TrainOn::LastTurn, ""), (TrainOn::All, "\n")] {
            let encoder = fixtures::encoder_with(EncodeOptions { train_on, ..EncodeOptions::default() });
            let records = encode_for_scoring(&encoder, &path).unwrap();
            let trained: Vec<_> = records.iter().map(|record| fixtures::trained_text(&encoder, record)).collect();
            assert_eq!(trained, [" three<turn|>".to_string(), format!("new words<turn|>{end}")]);
        }
        let mut wants = chat.clone();
        wants["prompt"][1]["train"] = true.into();
        let error = fixtures::encode(&fixtures::encoder(), &wants).unwrap_err();
        assert!(error.code() == "corpus::bad_choice" && error.message().contains("given and not trained"), "{error}");
    }

    #[test]
    fn an_id_that_stands_twice_names_both_places() {
        let folder = tempfile::tempdir().unwrap();
        let one = file(folder.path(), "one.jsonl", &[r#"{"text": "zero"}"#, r#"{"id": "a", "text": "one"}"#]);
        let two = file(folder.path(), "two.jsonl", &[r#"{"id": "a", "text": "two"}"#]);
        let error = load_tiny(&config(&[(&one, "x"), (&two, "x")])).unwrap_err();
        assert_eq!(error.code(), "corpus::duplicate_id");
        assert!(error.message().contains("two.jsonl:1") && error.message().contains("one.jsonl:2"), "{error}");
    }

    #[test]
    fn files_of_one_name_in_many_folders_are_told_apart_and_a_copy_takes_no_ones_id() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            file(&folder.path().join(name), "talk.jsonl", &[&format!(r#"{{"text": "words of {name}"}}"#)]);
        }
        let all = DataConfig { held_out: 0.0, ..config(&[(&folder.path().join("*/talk.jsonl"), "x")]) };
        let corpus = load_tiny(&all).unwrap();
        let ids: HashSet<&str> = corpus.train.iter().map(|record| record.id.as_str()).collect();
        assert_eq!(ids.len(), 3, "{ids:?}");

        let lines = [r#"{"id": "a", "text": "one"}"#, r#"{"id": "a#2", "text": "two"}"#];
        let path = file(folder.path(), "copies.jsonl", &lines);
        let mut twice = DataConfig { held_out: 0.0, ..config(&[(&path, "x")]) };
        twice.sources[0].weight = 2.0;
        assert_eq!(load_tiny(&twice).unwrap_err().code(), "corpus::duplicate_id");
    }

    #[test]
    fn a_file_that_gives_nothing_to_train_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let load_lines = |lines: &[&str]| {
            let path = file(folder.path(), "talk.jsonl", lines);
            load_tiny(&config(&[(&path, "talk")])).unwrap_err()
        };
        for lines in [&[][..], &["", " "]] {
            assert_eq!(load_lines(lines).code(), "corpus::empty_file");
        }
        let silent = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}"#;
        let error = load_lines(&[silent]);
        assert_eq!(error.code(), "corpus::nothing_to_train");
        assert!(error.message().contains("talk.jsonl: none of its 1 records"), "{error}");
        let error = load_lines(&[r#"{"text": "a"}"#, r#"{"conversation": []}"#]);
        assert!(error.message().contains("talk.jsonl:2: "), "{error}");
    }

    #[test]
    fn a_conversation_without_an_answer_is_counted_and_a_user_may_speak_twice() {
        let folder = tempfile::tempdir().unwrap();
        let turn = |role: &str| format!(r#"{{"role": "{role}", "content": "words"}}"#);
        let chat = |roles: &[&str]| {
            let turns = roles.iter().map(|role| turn(role)).collect::<Vec<_>>().join(", ");
            format!(r#"{{"messages": [{turns}]}}"#)
        };
        let lines = [chat(&["user"]), chat(&["user", "user", "assistant"])];
        let path = file(folder.path(), "talk.jsonl", &lines.each_ref().map(String::as_str));
        let corpus = load_tiny(&DataConfig { held_out: 0.0, ..config(&[(&path, "talk")]) }).unwrap();
        assert_eq!(corpus.train.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["talk:2"]);
        assert_eq!(corpus.report.roots[0].untrained_ids, ["talk:1"]);
    }

    #[test]
    fn another_template_than_the_base_ships_is_trained_with_where_that_is_accepted() {
        let talk = fixtures::path("corpus/smalltalk.jsonl");
        let stale = fixtures::path("templates/forcepusher-gemma4.jinja").display().to_string();
        let other = DataConfig { template: Some(stale), ..config(&[(&talk, "talk")]) };
        assert_eq!(load_tiny(&other).unwrap_err().code(), "corpus::template_mismatch");
        let plugin = PluginRef::resolve(Kind::CorpusFilter, "keep-all", &[]).unwrap();
        let mut filter = CorpusFilter::load(&plugin, None).unwrap();
        let accepted = TemplateConfig { accept_mismatch: true, ..TemplateConfig::default() };
        let corpus = load(&other, &accepted, &fixtures::path("tiny-base"), 2048, &mut filter, &mut |_, _| {}).unwrap();
        assert!(corpus.warnings.iter().any(|warning| warning.contains("not the template the base ships")));
    }

    #[test]
    fn an_undecidable_record_is_refused_by_id_and_the_others_are_trained() {
        let folder = tempfile::tempdir().unwrap();
        let inside =
            r#"{"id": "odd", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
            "tool_responses": [{"name": "f", "response": "c"}]}]}"#
                .replace('\n', " ");
        let plain =
            r#"{"id": "even", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
        let path = file(folder.path(), "talk.jsonl", &[&inside, plain]);
        let corpus = load_tiny(&DataConfig { held_out: 0.0, ..config(&[(&path, "talk")]) }).unwrap();
        assert_eq!(corpus.train.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["even"]);
        assert_eq!(corpus.report.refused[0].id, "odd");
        assert!(corpus.report.refused[0].reason.contains("talk.jsonl:1: record \"odd\": message 2"));
        assert!(corpus.warnings.iter().any(|warning| warning.contains("refused and not trained: 1")));
        let encoder =
            Encoder::open(&fixtures::path("tiny-base"), Some("base"), 2048, EncodeOptions::default()).unwrap();
        assert_eq!(encode_for_scoring(&encoder, &path).unwrap_err().code(), "corpus::undecidable_spans");
    }

    #[test]
    fn the_cost_of_a_limit_is_what_a_load_under_it_reports() {
        let path = fixtures::path("corpus/stage.jsonl");
        let unlimited = DataConfig { max_seq_len: usize::MAX, ..config(&[(&path, "stage")]) };
        let corpus = load_tiny(&unlimited).unwrap();
        for limit in [64, 512] {
            let limited = load_tiny(&DataConfig { max_seq_len: limit, ..unlimited.clone() }).unwrap().report;
            let mut cost = corpus.cost_of_limit(limit);
            // in the order in which they were found
            cost.roots[0].untrained_ids.clone_from(&limited.roots[0].untrained_ids);
            assert_eq!(cost, limited);
            assert!(cost.roots[0].trained_tokens_lost > 0);
        }
    }

    #[test]
    fn conversations_split_at_their_turns_lose_nothing_and_stay_on_one_side() {
        let folder = tempfile::tempdir().unwrap();
        let turn = |role: &str, words: String| serde_json::json!({"role": role, "content": words});
        let talk = |n: usize| {
            let turns =
                (0..8).flat_map(|t| [turn("user", format!("{n} {t}?")), turn("assistant", format!("{n} {t}."))]);
            serde_json::json!({"id": format!("r{n}"), "messages": turns.collect::<Vec<_>>()}).to_string()
        };
        let talks: Vec<String> = (0..30).map(talk).collect();
        let path = file(folder.path(), "talk.jsonl", &talks.iter().map(String::as_str).collect::<Vec<_>>());
        let limited = |overlong, max_seq_len| {
            load_tiny(&DataConfig { overlong, max_seq_len, held_out: 0.3, ..config(&[(&path, "talk")]) }).unwrap()
        };
        let whole = limited(Overlong::Truncate, 4096);
        let split = limited(Overlong::SplitTurns, 64);
        let root = &split.report.roots[0];
        assert_eq!((root.conversations_split, root.parts), (30, root.records));
        assert_eq!((root.trained_tokens_lost, root.records_cut, root.records_untrained), (0, 0, 0));
        assert_eq!(root.trained_tokens, whole.report.roots[0].trained_tokens);
        assert!(split.report.to_string().contains("talk: 30 conversations split at their turns"), "{}", split.report);
        let of = |records: &[Record]| -> HashSet<String> {
            records.iter().map(|record| record.id.split('/').next().unwrap().to_string()).collect()
        };
        assert_eq!(of(&split.held_out), of(&whole.held_out));
        assert!(of(&split.train).is_disjoint(&of(&split.held_out)));
    }

    #[test]
    fn the_report_counts_what_is_trained_from() {
        let folder = tempfile::tempdir().unwrap();
        let line = |n: usize| format!(r#"{{"id": "r{n}", "text": "{}"}}"#, "word ".repeat(10 * (n % 4 + 1)));
        let lines: Vec<String> = (0..200).map(line).collect();
        let path = file(folder.path(), "text.jsonl", &lines.iter().map(String::as_str).collect::<Vec<_>>());
        let mut config = DataConfig { max_seq_len: 24, ..config(&[(&path, "text")]) };
        config.sources[0].cap = Some(40);
        config.sources[0].weight = 2.0;
        for overlong in [Overlong::Truncate, Overlong::Drop] {
            let corpus = load_tiny(&DataConfig { overlong, ..config.clone() }).unwrap();
            let root = &corpus.report.roots[0];
            let used = corpus.sources[0].records - corpus.sources[0].capped;
            assert_eq!((used, root.records), (40, 40 + corpus.sources[0].copies));
            assert_eq!(root.records_kept as usize, corpus.train.len() + corpus.held_out.len());
            let tokens: usize = corpus.train.iter().chain(&corpus.held_out).map(|record| record.tokens.len()).sum();
            assert_eq!(root.tokens_kept as usize, tokens);
            assert_eq!(root.records, root.records_kept + root.records_dropped);
        }
        let error = load_tiny(&DataConfig { overlong: Overlong::Error, ..config }).unwrap_err();
        assert!(error.code() == "corpus::overlong" && error.message().contains("text.jsonl:"), "{error}");
    }

    #[test]
    fn scoring_reads_whole_records_in_order() {
        let encoder =
            Encoder::open(&fixtures::path("tiny-base"), Some("base"), 2048, EncodeOptions::default()).unwrap();
        let records = encode_for_scoring(&encoder, &fixtures::path("corpus/verse.jsonl")).unwrap();
        assert_eq!(records.len(), 112);
        assert!(records.iter().any(|record| record.tokens.len() > 512));
        assert!(records[0].id.ends_with("-0") && records[1].id.ends_with("-1"));
        let source = SourceConfig::new(fixtures::path("corpus/verse.jsonl"), "verse");
        assert_eq!(first_records(&encoder, &source, 3).unwrap(), records[..3]);
    }
}
