use super::*;

/// A filter with these settings, as JSON.
fn filter(settings: &str) -> LengthAndDedup {
    LengthAndDedup::new(serde_json::from_str(settings).unwrap()).unwrap()
}

/// Neighbouring records of 10 tokens, 5 of them trained.
fn chunk(first: u64, records: &[String]) -> Chunk {
    Chunk {
        first,
        ids: (0..records.len()).map(|at| format!("r:{at}")).collect(),
        roots: vec!["r".into(); records.len()],
        records: records.to_vec(),
        tokens: vec![10; records.len()],
        trained_tokens: vec![5; records.len()],
    }
}

/// Each record's reason to be dropped; empty where it is kept.
fn reasons(verdicts: Verdicts) -> Vec<String> {
    let mut texts = verdicts.texts.into_iter();
    let reasons = verdicts.actions.iter().map(|action| match action {
        Action::Keep => String::new(),
        _ => texts.next().unwrap(),
    });
    let reasons = reasons.collect();
    assert!(texts.next().is_none());
    reasons
}

fn is_copy(first: &str, second: &str) -> bool {
    let records = [first.to_string(), second.to_string()];
    let reasons = reasons(filter("{}").filter(chunk(0, &records)).unwrap());
    assert_eq!(reasons[0], "", "{first}");
    reasons[1] == "copy of an earlier record"
}

fn texts(count: usize, distinct: usize) -> Vec<String> {
    (0..count).map(|at| format!(r#"{{"id": {at}, "text": "text {}"}}"#, at * 7 % distinct)).collect()
}

#[test]
fn lengths_are_bounded_on_both_sides() {
    let records: Vec<String> = texts(6, 100);
    let mut filter = filter(r#"{"min_tokens": 8, "max_tokens": 20, "min_trained_tokens": 2}"#);
    let chunk =
        Chunk { tokens: vec![7, 8, 20, 21, 10, 10], trained_tokens: vec![2, 2, 2, 2, 1, 0], ..chunk(0, &records) };
    let too_few = "fewer than 2 trained tokens";
    let expected = ["shorter than 8 tokens", "", "", "longer than 20 tokens", too_few, too_few];
    assert_eq!(reasons(filter.filter(chunk).unwrap()), expected);
}

#[test]
fn without_settings_only_copies_and_the_untrained_are_dropped() {
    let records = texts(4, 3);
    let chunk = Chunk { tokens: vec![0, 1, 1 << 30, 5], trained_tokens: vec![1, 1, 0, 1], ..chunk(0, &records) };
    let expected = ["", "", "fewer than 1 trained tokens", "copy of an earlier record"];
    assert_eq!(reasons(filter("{}").filter(chunk).unwrap()), expected);
}

#[test]
fn settings_that_leave_nothing_are_refused() {
    for settings in [r#"{"max_tokens": 0}"#, r#"{"min_tokens": 9, "max_tokens": 8}"#] {
        let refusal = LengthAndDedup::new(serde_json::from_str(settings).unwrap()).err().unwrap();
        assert!(refusal.contains("max_tokens must be at least 1 and min_tokens"), "{refusal}");
    }
}

#[test]
fn a_copy_has_the_same_content_however_it_is_spelt() {
    let chat =
        r#"{"id": "a", "messages": [{"role": "user", "content": "Hé"}], "tools": [{"a": 1, "b": {"c": 2, "d": 3}}]}"#;
    let spelt = r#"{"tools":[{"b":{"d":3,"c":2},"a":1}],"messages":[{"content":"H\u00e9","role":"user"}],"root":"x"}"#;
    assert!(is_copy(chat, spelt));
    assert!(is_copy(r#"{"text": "a"}"#, r#"{"text": "a", "tools": null, "id": 7, "source": "elsewhere"}"#));
    assert!(is_copy(r#"{"input_ids": [1, 2]}"#, r#"{"input_ids":[1,2]}"#));
    for (first, second) in [
        (r#"{"text": "a b"}"#, r#"{"text": "a  b"}"#),
        (r#"{"text": "a"}"#, r#"{"text": "A"}"#),
        (r#"{"text": "[1]"}"#, r#"{"input_ids": [1]}"#),
        (r#"{"input_ids": [1, 2]}"#, r#"{"input_ids": [2, 1]}"#),
        (r#"{"input_ids": [1, 2]}"#, r#"{"input_ids": [1, 2], "labels": [-100, 2]}"#),
        (chat, r#"{"messages": [{"role": "user", "content": "Hé"}]}"#),
        (chat, r#"{"messages": [{"role": "system", "content": "Hé"}], "tools": [{"a": 1, "b": {"c": 2, "d": 3}}]}"#),
    ] {
        assert!(!is_copy(first, second), "{first} {second}");
    }
}

#[test]
fn the_first_stays_unless_its_length_drops_it() {
    let records = vec![r#"{"text": "a"}"#.to_string(); 3];
    let chunk = Chunk { tokens: vec![1, 10, 10], ..chunk(0, &records) };
    let expected = ["shorter than 5 tokens", "", "copy of an earlier record"];
    assert_eq!(reasons(filter(r#"{"min_tokens": 5}"#).filter(chunk).unwrap()), expected);
}

#[test]
fn copies_may_be_kept() {
    let verdicts = filter(r#"{"dedup": "none"}"#).filter(chunk(0, &texts(20, 3))).unwrap();
    assert_eq!(verdicts.actions, [Action::Keep; 20]);
}

#[test]
fn it_does_not_matter_how_chunks_are_cut_and_the_first_starts_anew() {
    let records: Vec<String> = texts(40, 11).into_iter().chain((0..20).map(chat)).collect();
    for (settings, kept) in [("{}", 31), (r#"{"dedup": "near"}"#, 15)] {
        let mut filter = filter(settings);
        let whole = reasons(filter.filter(chunk(0, &records)).unwrap());
        assert_eq!(whole.iter().filter(|reason| reason.is_empty()).count(), kept);
        for size in [1, 3, 39] {
            let mut cut = Vec::new();
            for (at, part) in records.chunks(size).enumerate() {
                cut.extend(reasons(filter.filter(chunk((at * size) as u64, part)).unwrap()));
            }
            assert_eq!(cut, whole, "chunks of {size}, {settings}");
        }
    }
}

#[test]
fn a_record_that_is_no_json_is_named() {
    let refusal = filter("{}").filter(chunk(0, &["{".into()])).unwrap_err();
    assert!(refusal.starts_with("record r:0: EOF"), "{refusal}");
}

/// A chat whose answer is sixty words, the last ones changed.
fn chat(changed: usize) -> String {
    let word = |at: usize| if at < 60 - changed { format!("word{at}") } else { format!("other{at}") };
    let answer: Vec<String> = (0..60).map(word).collect();
    let answer = answer.join(" ");
    format!(
        r#"{{"messages": [{{"role": "user", "content": "Go on"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
    )
}

#[test]
fn near_copies_have_most_runs_of_three_words_in_common() {
    let records: Vec<String> = [0, 1, 0, 12, 13].into_iter().map(chat).collect();
    let near = "near copy of an earlier record";
    let expected = ["", near, "copy of an earlier record", "", near];
    assert_eq!(reasons(filter(r#"{"dedup": "near"}"#).filter(chunk(0, &records)).unwrap()), expected);
    let strict = r#"{"dedup": "near", "similarity": 1}"#;
    let expected = ["", "", "copy of an earlier record", "", ""];
    assert_eq!(reasons(filter(strict).filter(chunk(0, &records)).unwrap()), expected);
}

#[test]
fn near_copies_may_differ_in_case_and_white_space() {
    let records = [r#"{"text": "Good morning, World"}"#, r#"{"text": "good\n morning,  ÉCOLE"}"#];
    let shouted = [r#"{"text": "\tGOOD MORNING, WORLD"}"#, r#"{"text": "good morning, école "}"#];
    let records: Vec<String> = records.into_iter().chain(shouted).map(String::from).collect();
    let near = "near copy of an earlier record";
    assert_eq!(reasons(filter(r#"{"dedup": "near"}"#).filter(chunk(0, &records)).unwrap()), ["", "", near, near]);
    let tokens = [r#"{"input_ids": [1, 2, 3, 4]}"#, r#"{"input_ids": [4, 3, 2, 1]}"#].map(String::from);
    assert_eq!(reasons(filter(r#"{"dedup": "near"}"#).filter(chunk(0, &tokens)).unwrap()), ["", ""]);
}

#[test]
fn the_similarity_is_a_share_and_for_near_copies() {
    for (settings, expected) in [
        (r#"{"similarity": 0.9}"#, "similarity is for dedup"),
        (r#"{"dedup": "near", "similarity": 0}"#, "above 0 and at most 1, not 0"),
        (r#"{"dedup": "near", "similarity": 1.5}"#, "above 0 and at most 1, not 1.5"),
    ] {
        let refusal = LengthAndDedup::new(serde_json::from_str(settings).unwrap()).err().unwrap();
        assert!(refusal.contains(expected), "{refusal}");
    }
}
