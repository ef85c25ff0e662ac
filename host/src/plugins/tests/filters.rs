use super::*;

fn record<'a>(id: &'a str, json: &'a str, tokens: u32) -> Candidate<'a> {
    Candidate { id, root: "talk", json, tokens, trained_tokens: tokens / 2 }
}

const CHUNK: [Candidate<'static>; 3] = [
    Candidate { id: "one", root: "talk", json: r#"{"text": "a"}"#, tokens: 4, trained_tokens: 3 },
    Candidate { id: "two", root: "talk", json: r#"{"text": "b"}"#, tokens: 40, trained_tokens: 30 },
    Candidate { id: "three", root: "talk", json: r#"{"id": "x",  "text": "b"}"#, tokens: 40, trained_tokens: 30 },
];

fn filter(name: &str, config: Value) -> CorpusFilter {
    CorpusFilter::load(&bundled(Kind::CorpusFilter, name), Some(&config)).unwrap()
}

fn hostile(act: &str) -> CorpusFilter {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-filter.wasm");
    let plugin = PluginRef::resolve(Kind::CorpusFilter, path, &[]).unwrap();
    CorpusFilter::load(&plugin, Some(&json!({ "act": act }))).unwrap()
}

#[test]
fn keep_all_keeps_all() {
    assert_eq!(filter("keep-all", json!({})).filter(0, &CHUNK).unwrap(), [const { Verdict::Keep }; 3]);
}

#[test]
fn length_and_dedup_drops_with_its_reasons() {
    let mut filter = filter("length-and-dedup", json!({"min_tokens": 8}));
    let verdicts = filter.filter(0, &CHUNK).unwrap();
    let Verdict::Drop(short) = &verdicts[0] else { panic!("{verdicts:?}") };
    assert!(short.contains("shorter than 8 tokens"), "{short}");
    assert_eq!(verdicts[1], Verdict::Keep);
    let Verdict::Drop(copy) = &verdicts[2] else { panic!("{verdicts:?}") };
    assert!(copy.contains("copy"), "{copy}");
    // The next chunk of the same corpus is compared with the first; a new corpus is not.
    assert!(matches!(filter.filter(3, &CHUNK[1..2]).unwrap()[0], Verdict::Drop(_)));
    assert_eq!(filter.filter(0, &CHUNK[1..2]).unwrap(), [Verdict::Keep]);
}

#[test]
fn answers_against_the_rules_are_refused_with_their_record() {
    for (act, parts) in [
        ("too-few", &["2 of 3 records have an answer", "record \"three\" (number 3 of the corpus)"][..]),
        ("too-many", &["4 answers for 3 records"]),
        ("missing-text", &["0 texts for 1 records", "one text for each"]),
        ("surplus-text", &["1 texts for 0 records"]),
        ("empty-reason", &["record \"one\" (number 1 of the corpus) is dropped without a reason"]),
        ("no-json", &["what is to replace record \"one\"", "is no JSON"]),
        ("no-object", &["what is to replace record \"one\"", "is no object"]),
    ] {
        let error = hostile(act).filter(0, &CHUNK).expect_err(act);
        assert_error(&error, "plugin::invalid_verdicts", &["plugin hostile-filter 0.1.0", "filter: "]);
        assert_error(&error, "plugin::invalid_verdicts", parts);
        assert_eq!(error.exit_code(), 5);
    }
    let error = hostile("panic").filter(0, &CHUNK).unwrap_err();
    assert_error(&error, "plugin::trapped", &["hostile-filter 0.1.0", "filter", "record one is cursed"]);
}

#[test]
fn a_reason_is_one_bounded_line() {
    let verdicts = hostile("long-reason").filter(0, &CHUNK).unwrap();
    let Verdict::Drop(reason) = &verdicts[0] else { panic!("{verdicts:?}") };
    assert!(reason.len() < 2100, "{}", reason.len());
}

#[test]
fn a_filter_whose_answers_depend_on_the_chunks_does_not_conform() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-filter.wasm");
    let plugin = PluginRef::resolve_any(path, &[]).unwrap();
    for (act, property) in [
        ("cut-dependent", "how the corpus is cut into chunks changes no answer"),
        ("unknown-shape", "what replaces a record can be trained"),
    ] {
        let properties = check::check(&plugin, Some(&json!({ "act": act }))).unwrap();
        let failed = properties.iter().find(|found| found.name == property).unwrap();
        assert!(failed.failure.is_some(), "{act}: {properties:?}");
    }
}

#[test]
fn long_records_go_through() {
    let text = json!({"text": "long ".repeat(1 << 20)}).to_string();
    assert_eq!(filter("length-and-dedup", json!({})).filter(0, &[record("long", &text, 9)]).unwrap(), [Verdict::Keep]);
}
