use super::*;
use crate::corpus::{EncodeOptions, Encoder, Record, encode_all, encode_for_scoring, fixtures};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

fn encoder() -> Encoder {
    Encoder::open(&fixtures::path("tiny-base"), Some("base"), 2048, EncodeOptions::default()).unwrap()
}

fn verse() -> PathBuf {
    fixtures::path("corpus/verse.jsonl")
}

fn encode(folder: &Path, path: &Path) -> (Vec<Record>, CacheUse, Vec<String>) {
    let encoder = encoder();
    let mut cached = CachedEncoder::new(&encoder, Some(folder));
    let records = encode_all(&mut cached, path).unwrap();
    let (used, warnings) = cached.finish();
    (records, used.unwrap(), warnings)
}

fn counts(found: u64, encoded: u64) -> CacheUse {
    CacheUse { found, encoded }
}

fn cache_file(folder: &Path) -> PathBuf {
    let files = list(folder, true).unwrap();
    assert_eq!(files.len(), 1);
    files[0].path.clone()
}

#[test]
fn what_is_kept_equals_what_is_encoded_and_only_new_records_are_encoded() {
    let folder = tempfile::tempdir().unwrap();
    let plain = encode_for_scoring(&encoder(), &verse()).unwrap();
    let text = fs::read_to_string(verse()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let part = folder.path().join("verse.jsonl");
    fs::write(&part, lines[..40].join("\n")).unwrap();
    let (records, used, warnings) = encode(folder.path(), &part);
    assert_eq!((records.as_slice(), used, warnings), (&plain[..40], counts(0, 40), vec![]));
    // grown, and elsewhere
    let (records, used, _) = encode(folder.path(), &verse());
    assert_eq!((records, used), (plain.clone(), counts(40, plain.len() as u64 - 40)));
    let (records, used, _) = encode(folder.path(), &verse());
    assert_eq!((records, used), (plain.clone(), counts(plain.len() as u64, 0)));
    assert_eq!(list(folder.path(), true).unwrap()[0].records, plain.len() as u64);
}

#[test]
fn equal_records_are_encoded_once_and_what_cannot_be_kept_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixed.jsonl");
    let undecidable = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_responses": [{"name": "f"}], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}"#;
    let lines = [r#"{"text": "a b"}"#, r#"{"id": "copy", "text": "a b"}"#, r#"{"input_ids": [7, 8, 9]}"#];
    fs::write(&path, lines.join("\n")).unwrap();
    let (records, used, _) = encode(folder.path(), &path);
    assert_eq!((records[0].tokens == records[1].tokens, used), (true, counts(1, 1)));
    assert_eq!(records[2].tokens.ids(), [7, 8, 9]);
    fs::write(&path, [undecidable, undecidable].join("\n")).unwrap();
    for _ in 0..2 {
        let encoder = encoder();
        let mut cached = CachedEncoder::new(&encoder, Some(folder.path()));
        assert_eq!(encode_all(&mut cached, &path).unwrap_err().code(), "corpus::undecidable_spans");
        assert_eq!(cached.finish().0, Some(counts(0, 1)));
    }
    assert_eq!(list(folder.path(), true).unwrap()[0].records, 1);
}

#[test]
fn row_10_another_tokenizer_template_token_or_option_is_another_file() {
    let tiny = encoder().identity().unwrap();
    let variants: [fn(&mut Identity); 6] = [
        |identity| identity.encode_version += 1,
        |identity| identity.tokenizer_sha256.push('0'),
        |identity| identity.special_tokens.clear(),
        |identity| identity.text_bos = None,
        |identity| identity.template_sha256 = None,
        |identity| identity.options["train_on"] = "all".into(),
    ];
    let mut names = HashSet::from([tiny.file_name()]);
    for change in variants {
        let mut other = tiny.clone();
        change(&mut other);
        assert!(names.insert(other.file_name()), "{other:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    fs::create_dir(&base).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let from = fixtures::path("tiny-base").join(name);
        if from.exists() {
            fs::copy(from, base.join(name)).unwrap();
        }
    }
    let identity = || Encoder::open(&base, Some("base"), 2048, EncodeOptions::default()).unwrap().identity().unwrap();
    assert_eq!(identity(), tiny, "the folder is not in the key");
    let swapped = fs::read_to_string(base.join("tokenizer.json")).unwrap() + "\n";
    fs::write(base.join("tokenizer.json"), swapped).unwrap();
    assert_ne!(identity(), tiny);
}

/// The verses in a cache of their own.
struct Written {
    /// As they are encoded without a cache.
    plain: Vec<Record>,
    /// How many they are.
    all: u64,
    path: PathBuf,
    /// The file's bytes.
    whole: Vec<u8>,
    /// Where its first line ends.
    first_line: usize,
}

fn written(folder: &Path) -> Written {
    let plain = encode_for_scoring(&encoder(), &verse()).unwrap();
    encode(folder, &verse());
    let path = cache_file(folder);
    let whole = fs::read(&path).unwrap();
    let first_line = whole.iter().position(|&byte| byte == b'\n').unwrap();
    Written { all: plain.len() as u64, plain, path, whole, first_line }
}

#[test]
fn damage_is_found_said_and_encoded_again() {
    let folder = tempfile::tempdir().unwrap();
    let Written { plain, all, path, whole, first_line } = written(folder.path());
    let flip = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    // a bit of an entry's tokens, of its header, of the first line; a line of no one
    let cases = [(flip(first_line + 40), 1), (flip(first_line + 2), 1), (flip(3), 0), (b"{}\n".to_vec(), all)];
    for (bytes, lost) in cases {
        fs::write(&path, &bytes).unwrap();
        assert!(list(folder.path(), true).unwrap()[0].damaged.is_some() || bytes.len() < 10);
        let (records, used, warnings) = encode(folder.path(), &verse());
        assert_eq!((records, used), (plain.clone(), counts(all - lost, lost)));
        assert!(warnings.len() == 1 && warnings[0].contains("was damaged"), "{warnings:?}");
        let (records, used, warnings) = encode(folder.path(), &verse());
        assert_eq!((records, used, warnings), (plain.clone(), counts(all, 0), vec![]), "it is whole again");
        assert_eq!(list(folder.path(), true).unwrap()[0].damaged, None);
    }
}

#[test]
fn what_a_killed_process_wrote_is_kept_up_to_its_last_whole_record() {
    let folder = tempfile::tempdir().unwrap();
    let Written { plain, all, path, whole, first_line } = written(folder.path());
    let first_line = first_line + 1;
    for end in [0, 1, first_line, first_line + 31, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..end]).unwrap();
        let (records, used, _) = encode(folder.path(), &verse());
        assert_eq!(records, plain);
        let kept = entry::Entries::new(&whole[..end.max(first_line)], first_line).count() as u64;
        assert_eq!(used, counts(kept, all - kept), "cut at {end}");
        assert_eq!(fs::read(&path).unwrap(), whole, "cut at {end}, it ends with the same bytes");
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_gone_on_without() {
    let folder = tempfile::tempdir().unwrap();
    let no_folder = folder.path().join("file");
    fs::write(&no_folder, "").unwrap();
    let (records, used, warnings) = encode(&no_folder, &verse());
    assert_eq!(used, counts(0, records.len() as u64));
    assert!(warnings.len() == 1 && warnings[0].contains("cannot be written"), "{warnings:?}");
}

#[test]
fn several_writers_at_once_lose_and_mix_nothing_and_share_their_work() {
    let folder = tempfile::tempdir().unwrap();
    let plain = encode_for_scoring(&encoder(), &verse()).unwrap();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4).map(|_| scope.spawn(|| encode(folder.path(), &verse()).0)).collect();
        writers.into_iter().for_each(|writer| assert_eq!(writer.join().unwrap(), plain));
    });
    assert_eq!(list(folder.path(), true).unwrap()[0].damaged, None);
    let bytes = fs::metadata(cache_file(folder.path())).unwrap().len();
    let alone = tempfile::tempdir().unwrap();
    assert_eq!(encode(folder.path(), &verse()).1, counts(plain.len() as u64, 0));
    encode(alone.path(), &verse());
    assert_eq!(bytes, fs::metadata(cache_file(alone.path())).unwrap().len(), "each record once");
}

/// An encoding that changes while [`ENCODE_VERSION`] stays would be read from old caches as it was.
#[test]
fn the_encode_version_stands_for_these_encodings() {
    let mut hasher = Sha256::new();
    for root in ["stage", "smalltalk", "verse"] {
        for record in encode_for_scoring(&encoder(), &fixtures::path(&format!("corpus/{root}.jsonl"))).unwrap() {
            record.tokens.ids().iter().for_each(|id| hasher.update(id.to_le_bytes()));
            record.tokens.labels().iter().for_each(|label| hasher.update(label.to_le_bytes()));
        }
    }
    let digest = crate::hash::hex(&hasher.finalize());
    assert_eq!(
        (ENCODE_VERSION, &digest[..16]),
        (2, "2919b112159b1151"),
        "raise ENCODE_VERSION, then put the new digest here"
    );
}
