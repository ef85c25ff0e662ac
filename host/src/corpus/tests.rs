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
        let ids = |records: &[Record]| records.iter().filter(of_root).map(|r| r.tokens.ids()).collect::<HashSet<_>>();
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
    assert!(twice.train.iter().any(|record| *record.id == format!("{}#2", once.train[0].id)));
    assert_eq!(twice.sources[0].copies as usize, once.train.len());
    assert!(
        twice.sources[0].to_string().contains("2 files: jsonl of messages, json of messages, 200 records, "),
        "{}",
        twice.sources[0]
    );
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
    let path = file(folder.path(), "a.jsonl", &[r#"{"prompt": "One two", "completion": " three"}"#, &chat.to_string()]);
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
    let ids: HashSet<&str> = corpus.train.iter().map(|record| &*record.id).collect();
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
    assert_eq!(corpus.train.iter().map(|record| &*record.id).collect::<Vec<_>>(), ["talk:2"]);
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
    let inside = r#"{"id": "odd", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
        "tool_responses": [{"name": "f", "response": "c"}]}]}"#
        .replace('\n', " ");
    let plain =
        r#"{"id": "even", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let path = file(folder.path(), "talk.jsonl", &[&inside, plain]);
    let corpus = load_tiny(&DataConfig { held_out: 0.0, ..config(&[(&path, "talk")]) }).unwrap();
    assert_eq!(corpus.train.iter().map(|record| &*record.id).collect::<Vec<_>>(), ["even"]);
    assert_eq!(corpus.report.refused[0].id, "odd");
    assert!(corpus.report.refused[0].reason.contains("talk.jsonl:1: record \"odd\": message 2"));
    assert!(corpus.warnings.iter().any(|warning| warning.contains("refused and not trained: 1")));
    let encoder = Encoder::open(&fixtures::path("tiny-base"), Some("base"), 2048, EncodeOptions::default()).unwrap();
    assert_eq!(encode_for_scoring(&encoder, &path).unwrap_err().code(), "corpus::undecidable_spans");
}

#[test]
fn thoughts_that_the_template_leaves_out_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let talk = |thought: &str| {
        let answer = serde_json::json!({"role": "assistant", "content": "Yes.", "reasoning_content": thought});
        serde_json::json!({"messages": [{"role": "user", "content": "Sure?"}, answer]}).to_string()
    };
    let path = file(folder.path(), "talk.jsonl", &[&talk("Let me see."), &talk("Hm."), &talk("")]);
    let corpus = load_tiny(&DataConfig { held_out: 0.0, ..config(&[(&path, "talk")]) }).unwrap();
    assert!(corpus.warnings.iter().any(|warning| warning.contains("not trained: 2 [")), "{:?}", corpus.warnings);
}

#[test]
fn the_cost_of_a_limit_is_what_a_load_under_it_reports() {
    let path = fixtures::path("corpus/stage.jsonl");
    let unlimited = DataConfig { max_seq_len: usize::MAX, ..config(&[(&path, "stage")]) };
    let corpus = load_tiny(&unlimited).unwrap();
    for (limit, overlong) in [(64, Overlong::Truncate), (512, Overlong::Truncate), (512, Overlong::Drop)] {
        let limited = load_tiny(&DataConfig { max_seq_len: limit, overlong, ..unlimited.clone() }).unwrap().report;
        let mut cost = corpus.cost_of_limit(limit, overlong);
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
        let turns = (0..8).flat_map(|t| [turn("user", format!("{n} {t}?")), turn("assistant", format!("{n} {t}."))]);
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
    let encoder = Encoder::open(&fixtures::path("tiny-base"), Some("base"), 2048, EncodeOptions::default()).unwrap();
    let records = encode_for_scoring(&encoder, &fixtures::path("corpus/verse.jsonl")).unwrap();
    assert_eq!(records.len(), 112);
    assert!(records.iter().any(|record| record.tokens.len() > 512));
    assert!(records[0].id.ends_with("-0") && records[1].id.ends_with("-1"));
    let source = SourceConfig::new(fixtures::path("corpus/verse.jsonl"), "verse");
    let first: Result<Vec<_>> = first_records(&encoder, &source, 3).unwrap().into_iter().collect();
    assert_eq!(first.unwrap(), records[..3]);
}
