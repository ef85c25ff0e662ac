use super::*;

fn filter(settings: &str) -> RegexFilter {
    RegexFilter::new(serde_json::from_str(settings).unwrap()).unwrap()
}

/// What the settings make of one record: the reason or the new record, and a mark for which.
fn judge(settings: &str, record: &str) -> String {
    match filter(settings).judge(record).unwrap() {
        (Action::Keep, None) => "kept".into(),
        (Action::Drop, Some(reason)) => format!("dropped: {reason}"),
        (Action::Replace, Some(record)) => record,
        other => panic!("{other:?}"),
    }
}

const CHAT: &str = r#"{"id":"a","messages":[{"role":"system","content":"Be brief."},{"role":"user","name":"Zoë","content":[{"type":"text","text":"Mail me at a@b.org"},{"type":"text","text":"soon"}]},{"content":"I will.","role":"assistant","score":0.10000000000000001}],"b":1e2,"a":[]}"#;

#[test]
fn a_record_is_dropped_for_the_first_pattern_that_it_matches() {
    let settings = r#"{"drop": ["nothing", "(?i)^MAIL me", "soon"]}"#;
    assert_eq!(judge(settings, CHAT), r#"dropped: matches "(?i)^MAIL me" of drop"#);
    assert_eq!(judge(settings, r#"{"text": "how soon?"}"#), r#"dropped: matches "soon" of drop"#);
    assert_eq!(judge(settings, r#"{"text": "later", "source": "soon"}"#), "kept");
    assert_eq!(judge(r#"{"drop": ["org.*soon", "Zoë"]}"#, CHAT), "kept", "each part by itself, and content alone");
}

#[test]
fn one_pattern_of_keep_must_match() {
    let settings = r#"{"keep": ["^I will", "\\p{Han}"]}"#;
    assert_eq!(judge(settings, CHAT), "kept");
    assert_eq!(judge(settings, r#"{"text": "你好"}"#), "kept");
    assert_eq!(judge(settings, r#"{"text": "hello"}"#), "dropped: matches nothing of keep");
    assert_eq!(judge(r#"{"keep": ["a"], "drop": ["b"]}"#, r#"{"text": "ab"}"#), r#"dropped: matches "b" of drop"#);
}

#[test]
fn a_replaced_record_is_otherwise_the_same() {
    let settings =
        r#"{"replace": [{"pattern": "(\\w+)@(\\w+)\\.org", "with": "$2 at $1"}, {"pattern": "b at", "with": "<$$>"}]}"#;
    let expected = CHAT.replace("a@b.org", "<$> a").replace("0.10000000000000001", "0.1").replace("1e2", "100.0");
    assert_eq!(judge(settings, CHAT), expected);
    assert_eq!(judge(settings, r#"{"text": "x@y.org\n", "id": 1}"#), r#"{"text":"y at x\n","id":1}"#);
    assert_eq!(judge(settings, r#"{"text": "no address"}"#), "kept");
    assert_eq!(judge(r#"{"replace": [{"pattern": "a", "with": "a"}]}"#, r#"{"text": "a"}"#), "kept");
}

#[test]
fn only_messages_of_the_given_roles_are_looked_at() {
    let settings =
        r#"{"roles": ["assistant", "tool"], "drop": ["soon"], "replace": [{"pattern": "\\.$", "with": "!"}]}"#;
    assert_eq!(judge(settings, CHAT).matches('!').count(), 1);
    assert_eq!(judge(settings, r#"{"text": "soon"}"#), r#"dropped: matches "soon" of drop"#);
    let refusal = RegexFilter::new(serde_json::from_str(r#"{"roles": ["model"]}"#).unwrap()).err().unwrap();
    assert_eq!(refusal, r#"roles must be of system, developer, user, assistant, tool, not "model""#);
}

#[test]
fn messages_and_records_without_text_pass() {
    let call = r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}]}"#;
    assert_eq!(judge(r#"{"drop": [""]}"#, call), "kept");
    let mut filter = filter(r#"{"drop": [""], "keep": ["x"]}"#);
    let tokens = vec![r#"{"input_ids": [1, 2]}"#.to_string(); 2];
    let chunk = Chunk {
        first: 0,
        ids: vec!["a".into(), "b".into()],
        roots: vec!["r".into(); 2],
        records: tokens,
        tokens: vec![2; 2],
        trained_tokens: vec![2; 2],
    };
    assert!(!filter.told_of_tokens);
    assert_eq!(filter.filter(chunk).unwrap().actions, [Action::Keep; 2]);
    assert!(filter.told_of_tokens);
}

#[test]
fn texts_come_in_the_order_of_their_records() {
    let records = [r#"{"text": "a"}"#, r#"{"text": "b"}"#, r#"{"text": "c"}"#, r#"{"text": "a"}"#];
    let chunk = Chunk {
        first: 7,
        ids: ["1", "2", "3", "4"].map(String::from).into(),
        roots: vec!["r".into(); 4],
        records: records.map(String::from).into(),
        tokens: vec![1; 4],
        trained_tokens: vec![1; 4],
    };
    let verdicts = filter(r#"{"drop": ["a"], "replace": [{"pattern": "c", "with": "d"}]}"#).filter(chunk).unwrap();
    assert_eq!(verdicts.actions, [Action::Drop, Action::Keep, Action::Replace, Action::Drop]);
    assert_eq!(verdicts.texts, [r#"matches "a" of drop"#, r#"{"text":"d"}"#, r#"matches "a" of drop"#]);
}

#[test]
fn a_wrong_pattern_is_named() {
    for (settings, refusal) in [
        (r#"{"drop": ["a", "(b"]}"#, r#"drop has "(b", which is no regular expression: error: unclosed group"#),
        (r#"{"keep": ["a{2,1}"]}"#, r#"keep has "a{2,1}", which is no regular expression: error: invalid repetition"#),
        (r#"{"replace": [{"pattern": "\\q", "with": ""}]}"#, r#"replace has "\\q", which is no regular"#),
        (r#"{"drop": ["(\\w{1000}){1000}"]}"#, "which is no regular expression: Compiled regex exceeds size limit"),
    ] {
        let error = RegexFilter::new(serde_json::from_str(settings).unwrap()).err().unwrap();
        assert!(error.contains(refusal), "{error}");
    }
}
