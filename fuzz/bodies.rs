//! What is fuzzed. Each function takes any bytes, does with them what a run does, and panics where the program breaks a
//! promise: what it is given is read, or refused with a code and a place.

use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tunehost::corpus::{EncodeOptions, Encoder, NOT_TRAINED, Record, encode_for_scoring};
use tunehost::error::Result;

/// Rows in the tiny base's embedding.
const VOCABULARY: usize = 2048;
/// Who speaks in a made-up conversation.
const ROLES: [&str; 6] = ["system", "user", "assistant", "tool", "developer", "narrator"];

/// The bundled base, its template and every other one, and a folder for what is fuzzed.
pub struct Bench {
    base: PathBuf,
    encoders: Vec<Encoder>,
    folder: TempDir,
}

impl Bench {
    /// Opens the fixtures of the repository at `root`.
    pub fn open(root: &Path) -> Self {
        let base = root.join("tests/fixtures/tiny-base");
        let entries = fs::read_dir(root.join("tests/fixtures/templates")).expect("the templates are committed");
        let mut templates: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
        templates.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
        templates.sort();
        let open = |path: &PathBuf| Encoder::open(&base, path.to_str(), VOCABULARY, EncodeOptions::default());
        // one that prints all that differs between template engines is no chat template
        let encoders: Vec<Encoder> = templates.iter().filter_map(|path| open(path).ok()).collect();
        assert!(encoders.len() >= 3, "the chat templates fit the base");
        Self { base, encoders, folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// A file of any bytes, read and encoded record by record.
    pub fn file(&self, bytes: &[u8]) {
        let path = self.folder.path().join("fuzzed.json");
        fs::write(&path, bytes).expect("a temporary file");
        checked(encode_for_scoring(&self.encoders[0], &path), "fuzzed.json");
    }

    /// A conversation through every template: a line is a message, its first byte says whose. Lines of JSON are taken as JSON.
    pub fn conversation(&self, bytes: &[u8]) {
        let message = |line: &[u8]| {
            let role = ROLES[usize::from(line.first().copied().unwrap_or_default()) % ROLES.len()];
            let text = String::from_utf8_lossy(line.get(1..).unwrap_or_default()).into_owned();
            let given = serde_json::from_str::<serde_json::Value>(&text).ok().filter(serde_json::Value::is_object);
            given.unwrap_or_else(|| serde_json::json!({"role": role, "content": text}))
        };
        let messages: Vec<_> = bytes.split(|&byte| byte == b'\n').map(message).collect();
        let path = self.folder.path().join("fuzzed.jsonl");
        fs::write(&path, serde_json::json!({ "messages": messages }).to_string()).expect("a temporary file");
        for encoder in &self.encoders {
            checked(encode_for_scoring(encoder, &path), "fuzzed.jsonl:1: ");
        }
    }

    /// A chat template of any text: it is compiled, tried and refused, or trained with.
    pub fn template(&self, bytes: &[u8]) {
        let template = self.folder.path().join("fuzzed.jinja");
        fs::write(&template, bytes).expect("a temporary file");
        let path = self.folder.path().join("talk.jsonl");
        let talk = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
        fs::write(&path, talk).expect("a temporary file");
        match Encoder::open(&self.base, template.to_str(), VOCABULARY, EncodeOptions::default()) {
            Ok(encoder) => checked(encode_for_scoring(&encoder, &path), "talk.jsonl:1: "),
            Err(error) => assert!(error.code().starts_with("corpus::") || error.code() == "io::failed", "{error}"),
        }
    }
}

fn checked(records: Result<Vec<Record>>, place: &str) {
    match records {
        Ok(records) => records.iter().for_each(|record| {
            let (ids, labels) = (record.tokens.ids(), record.tokens.labels());
            assert_eq!(ids.len(), labels.len(), "{record:?}");
            let trained = ids.iter().zip(&labels).filter(|(_, label)| **label != NOT_TRAINED);
            assert!({ trained }.all(|(&id, &label)| id as i32 == label), "{record:?}");
            assert!(labels.first().is_none_or(|&first| first == NOT_TRAINED), "{record:?}");
        }),
        Err(error) => {
            assert!(error.code().starts_with("corpus::"), "{error}");
            assert!(error.message().contains(place), "{error}");
        }
    }
}
