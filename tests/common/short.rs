//! A run of a third of a second that makes every kind of file, what must be in its folder, and the library that makes its file
//! operations fail.

use super::root;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Three steps, dropout on, a checkpoint after the second, which goes when the last is saved; with `more` lines.
pub fn config(dir: &Path, more: &str) -> PathBuf {
    let base = root().join("tests/fixtures/tiny-base");
    let base = base.display();
    let lines: Vec<String> =
        (0..24).map(|i| format!(r#"{{"id": "r{i}", "text": "{}"}}"#, format!("word {i} ").repeat(1 + i % 5))).collect();
    fs::write(dir.join("records.jsonl"), lines.join("\n")).unwrap();
    let path = dir.join("short.toml");
    let text = format!(
        r#"
name = "short"
model.base = "{base}"
data = {{ template = "{base}/chat_template.jinja", max_seq_len = 128, held_out = 0.2, sources = [{{ path = "records.jsonl", root = "records" }}] }}
lora.dropout = 0.1
train = {{ max_steps = 3, micro_batch = 2, accumulation = 1, lr = 1e-3 }}
checkpoint.keep_last = 1
plugins.checkpoint_scheduler = "every-n-steps"
plugins.config.checkpoint_scheduler.n = 2
eval.every_steps = 2
{more}
"#
    );
    fs::write(&path, text).unwrap();
    path
}

/// Every file that a resume must reproduce, by its path in the run folder. Clocks, the pid and the history of the run are in
/// the others; what a killed process left beside its place is nobody's.
pub fn contents(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with('.') || ["provenance.json", "timing.jsonl", "run.lock", "window.log"].contains(&name) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(run).unwrap().into(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// That the run in the folder `run` ended with the files of one that was not disturbed.
pub fn assert_same(whole: &BTreeMap<PathBuf, Vec<u8>>, run: &Path, how: &str) {
    let other = contents(run);
    assert!(whole.keys().eq(other.keys()), "{how}: {:?}", other.keys());
    for (path, bytes) in whole {
        assert!(*bytes == other[path], "{how}: {} differs", path.display());
    }
}

/// What a run says of itself.
pub fn provenance(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("provenance.json")).unwrap()).unwrap()
}

/// Builds the library of `tests/faults`, to be loaded by `LD_PRELOAD`.
pub fn fault_library(dir: &Path) -> PathBuf {
    let library = dir.join("faults.so");
    let source = root().join("tests/faults/faults.c");
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl").status();
    assert!(built.unwrap().success());
    library
}
