//! The encode cache as runs use it: killed, shared, read-only, damaged; what encodes anew, and what memory it takes.

#![cfg(target_os = "linux")] // peak memory as /proc tells it

mod common;

use common::{copy_base, fails, ok, peak_mib, root, tunehost};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A configuration with a cache of its own and a corpus of `records` records of `words` words, no two alike.
fn config(dir: &Path, records: usize, words: usize) -> String {
    let base = root().join("tests/fixtures/tiny-base").display().to_string();
    let verse = fs::read_to_string(root().join("tests/fixtures/corpus/verse.jsonl")).unwrap();
    let known: Vec<&str> = verse.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty()).collect();
    let line = |at: usize| {
        let text: Vec<&str> = (0..words).map(|k| known[(at * 7 + k * (1 + at % 13)) % known.len()]).collect();
        json!({"text": format!("{at} {}", text.join(" "))}).to_string() + "\n"
    };
    fs::write(dir.join("records.jsonl"), (0..records).map(line).collect::<String>()).unwrap();
    let path = dir.join("config.toml");
    let text = format!(
        "name = \"cached\"\nmodel.base = \"{base}\"\n[data]\ntemplate = \"base\"\nmax_seq_len = 512\n\
         cache = \"{}\"\nsources = [{{ path = \"records.jsonl\", root = \"records\" }}]\n",
        dir.join("cache").display()
    );
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// What `cache fill` says it did: records found and encoded.
fn filled(output: &str) -> (u64, u64) {
    let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    (last["found"].as_u64().unwrap(), last["encoded"].as_u64().unwrap())
}

fn fill(config: &str, more: &[&str]) -> (u64, u64) {
    filled(&ok(&[&["cache", "fill", config, "--json"], more].concat()))
}

fn start_fill(config: &str) -> Child {
    tunehost(&["cache", "fill", config, "--json"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// The bytes of the one file of a cache.
fn encodings(folder: &Path) -> Vec<u8> {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::read(&files[0]).unwrap()
}

#[test]
fn a_fill_that_is_killed_again_and_again_ends_with_the_bytes_of_one_that_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 16_000, 30);
    let cache = dir.path().join("cache");
    assert_eq!(fill(&config, &[]), (0, 16_000));
    let whole = encodings(&cache);
    fs::remove_dir_all(&cache).unwrap();
    let size =
        || fs::read_dir(&cache).into_iter().flatten().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    for i in 0..3_u64 {
        let before: u64 = size();
        let mut child = start_fill(&config);
        while child.try_wait().unwrap().is_none() && size() < before + 10_000 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(i * 9));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success(), "it was killed in time");
    }
    // and in the middle of a write
    let path = fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    fs::File::options().write(true).open(path).unwrap().set_len(size() - 100).unwrap();
    let (found, encoded) = fill(&config, &[]);
    assert_eq!(found + encoded, 16_000);
    assert!(found > 8_000, "what was encoded before a kill is kept: {found}");
    assert!(encodings(&cache) == whole);
    ok(&["cache", "verify", "--folder", cache.to_str().unwrap()]);
}

#[test]
fn two_processes_at_once_keep_each_record_once_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 6000, 30);
    let cache = dir.path().join("cache");
    let both = [(); 2].map(|()| start_fill(&config));
    let both = both.map(|child| child.wait_with_output().unwrap());
    let both = both.map(|out| filled(std::str::from_utf8(&out.stdout).unwrap()));
    assert_eq!(both[0].0 + both[0].1, both[1].0 + both[1].1);
    let shared = encodings(&cache).len();
    fs::remove_dir_all(&cache).unwrap();
    let (_, records) = fill(&config, &[]);
    assert_eq!(encodings(&cache).len(), shared, "each record once");
    assert_eq!(both[0].0 + both[0].1, records);
    assert_eq!(fill(&config, &[]), (records, 0));
}

#[test]
fn row_10_what_changes_an_encoding_encodes_anew_and_nothing_else_does() {
    let dir = tempfile::tempdir().unwrap();
    let quickstart = "configs/quickstart.toml";
    let cache = format!("data.cache=\"{}\"", dir.path().join("cache").display());
    let stage = r#"data.sources=[{path = "tests/fixtures/corpus/verse.jsonl", root = "verse"}, {path = "chat.jsonl", root = "chat"}]"#;
    let chat =
        r#"{"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A king."}]}"#;
    fs::write(dir.path().join("chat.jsonl"), chat).unwrap();
    let stage = stage.replace("chat.jsonl", dir.path().join("chat.jsonl").to_str().unwrap());
    let shipped = "data.template=\"base\"";
    let fill =
        |more: &[&str]| fill(quickstart, &[&["--set", &cache, "--set", &stage, "--set", shipped], more].concat());
    let (_, records) = fill(&[]);
    assert_eq!(records, 113);
    for same in [
        &["--set", "run.root=\"elsewhere\""][..],
        &["--set", "data.max_seq_len=64"],
        &["--set", "data.overlong=\"drop\""],
        &["--set", "data.held_out=0.2"],
        &["--set", "train.seed=7"],
        &["--plugins", "sampler=shuffled"],
    ] {
        assert_eq!(fill(same), (records, 0), "{same:?}");
    }
    let base = copy_base(&dir.path().join("base"));
    let moved = format!("model.base=\"{}\"", base.display());
    assert_eq!(fill(&["--set", &moved]), (records, 0), "the same tokenizer elsewhere");
    let append = |name: &str, text: &str| {
        let path = base.join(name);
        let before = fs::read_to_string(&path).unwrap();
        fs::write(path, before + text).unwrap();
    };
    append("tokenizer.json", "\n");
    assert_eq!(fill(&["--set", &moved]), (0, records), "another tokenizer");
    append("chat_template.jinja", "{# another #}");
    assert_eq!(fill(&["--set", &moved]), (0, records), "another template");
    for other in ["data.train_on=\"all\"", "template.now=2025-05-05"] {
        assert_eq!(fill(&["--set", other]), (0, records), "{other}");
    }
}

#[test]
fn the_files_of_the_cache_are_listed_checked_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 1000, 30);
    let (_, records) = fill(&config, &[]);
    let cache = dir.path().join("cache");
    let folder = ["--folder", cache.to_str().unwrap()];
    let run = |args: &[&str]| ok(&[&["cache"], args, &folder[..]].concat());
    let listed: Value = serde_json::from_str(&run(&["ls", "--json"])).unwrap();
    assert_eq!(listed[0]["records"], records);
    assert_eq!(listed[0]["identity"]["options"]["train_on"], "assistant");
    let name = listed[0]["name"].as_str().unwrap();
    let table = run(&["verify"]);
    assert!(table.contains(name) && table.contains("whole"), "{table}");

    let path = listed[0]["path"].as_str().unwrap();
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
    let said = fails(&[&["cache", "verify"], &folder[..]].concat(), 3);
    assert!(said.contains("corpus::damaged_cache") && said.contains("nothing is lost"), "{said}");
    let out = tunehost(&["cache", "fill", &config]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(stderr.contains("was damaged") && stdout.contains(": 1 encoded"), "{stdout}{stderr}");
    run(&["verify"]);

    let said = fails(&[&["cache", "rm", "no-such"], &folder[..]].concat(), 2);
    assert!(said.contains("usage::no_cache_file") && said.contains("cache ls"), "{said}");
    run(&["rm", &name[..6]]);
    assert!(run(&["ls"]).starts_with("no encodings in "));
}

#[test]
fn a_folder_that_may_only_be_read_is_read_and_gone_on_without() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 1000, 30);
    let lines = fs::read_to_string(dir.path().join("records.jsonl")).unwrap();
    let some: Vec<&str> = lines.lines().take(300).collect();
    fs::write(dir.path().join("some.jsonl"), some.join("\n")).unwrap();
    let some = format!("data.sources=[{{path = \"{}\", root = \"r\"}}]", dir.path().join("some.jsonl").display());
    assert_eq!(fill(&config, &["--set", &some]), (0, 300));
    let cache = dir.path().join("cache");
    // root may write everywhere: another user, who needs the program and what it reads where it can be reached
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let program = dir.path().join("tunehost");
    fs::copy(env!("CARGO_BIN_EXE_tunehost"), &program).unwrap();
    let base = format!("model.base=\"{}\"", copy_base(&dir.path().join("base")).display());
    open(dir.path(), 0o755);
    open(&cache, 0o555);
    let mut command = Command::new(&program);
    command.args(["cache", "fill", &config, "--set", &base]).current_dir(dir.path());
    if fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0) {
        command.uid(65534).gid(65534);
    }
    let out = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    open(&cache, 0o755);
    assert!(out.status.success(), "{stdout}{stderr}");
    assert!(stderr.contains("cannot be written") && stdout.contains("300 found"), "{stdout}{stderr}");
}

/// In memory ids and labels of the larger corpus would take 36 MiB more than those of the smaller, four bytes a token each, on
/// top of what 12,000 more records take whatever their length (4 MiB: ids, and what they are compared by), and of the lines at hand.
#[test]
fn memory_does_not_grow_with_the_tokens_of_the_corpus() {
    let peaks = [4000, 16_000].map(|records| {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), records, 200);
        let mut batches = tunehost(&["corpus", "batches", &config]);
        batches.env("RAYON_NUM_THREADS", "2");
        ok(&["cache", "fill", &config]);
        let bytes = encodings(&dir.path().join("cache")).len() as f64;
        (peak_mib(batches), bytes / 1048576.0)
    });
    println!("peak MiB, MiB of encodings: {peaks:?}");
    let [small, large] = peaks;
    assert!(large.1 > small.1 + 15.0, "{peaks:?}");
    assert!(large.0 < small.0 + 28.0, "{peaks:?}");
}
