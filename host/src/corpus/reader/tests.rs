#[path = "../../../../fuzz/mutations.rs"]
mod mutations;

use super::*;
pub use mutations::mutations;
use serde_json::json;
use std::io::{Read, Write};

fn parse(line: impl AsRef<[u8]>) -> Result<Option<RawRecord>> {
    parse_row(Path::new("data/talk.jsonl"), 7, line.as_ref(), &Columns::new())
}

fn refused(line: impl AsRef<[u8]>, code: &str, says: &str) {
    let error = parse(line).unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains("data/talk.jsonl:7: "), "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

pub type NumberedRows = Vec<(u64, Vec<u8>)>;

/// The rows of a file called `name` that holds `bytes`; its size and hash are checked.
pub fn rows(name: &str, bytes: &[u8]) -> Result<(NumberedRows, Format)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let mut rows = Rows::open(&path, &Columns::new())?;
    let (format, mut all) = (rows.format(), Vec::new());
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            assert_eq!(rows.finish()?, (bytes.len() as u64, crate::hash::sha256(bytes)));
            return Ok((all, format));
        }
        all.extend(chunk);
    }
}

fn lines(bytes: &[u8]) -> Result<Vec<(u64, Vec<u8>)>> {
    rows("file.jsonl", bytes).map(|(rows, _)| rows)
}

#[test]
fn three_shapes_are_read() {
    let chat = parse(r#"{"id": 3, "messages": [{"role": "user", "content": "a"}], "tools": [1], "root": "x"}"#);
    let chat = chat.unwrap().unwrap();
    assert_eq!((chat.id.as_str(), chat.line), ("3", 7));
    let messages = vec![json!({"role": "user", "content": "a"})];
    assert_eq!(chat.content, Content::Chat(Chat { messages, tools: json!([1]), trained_from: 0 }));
    let text = parse(r#"{"text": "plain", "messages": null}"#).unwrap().unwrap();
    assert_eq!((text.id.as_str(), text.content), ("talk:7", Content::Text("plain".into())));
    let tokens = parse(r#"{"input_ids": [2, 5, 6], "labels": [-100, -100, 6]}"#).unwrap().unwrap();
    assert_eq!(tokens.content, Content::Tokens { ids: vec![2, 5, 6], labels: Some(vec![-100, -100, 6]) });
    assert_eq!(parse("  \r\n").unwrap(), None);
}

#[test]
fn row_7_an_unknown_shape_names_the_keys_seen_and_known() {
    let line = r#"{"id": "a", "conversation": []}"#;
    refused(line, "corpus::unknown_shape", "keys seen: id, conversation");
    refused(
        line,
        "corpus::unknown_shape",
        "messages, conversations, instruction+output, prompt+completion, text, input_ids",
    );
    refused(r#"{"messages": [], "text": "a"}"#, "corpus::unknown_shape", "more than one of the keys messages, text");
    refused(r#"{"messages": []}"#, "corpus::unknown_shape", "`messages` is empty");
    refused(r#"{"messages": "user: hello"}"#, "corpus::unknown_shape", "`messages` is a string");
    refused(r#"["a"]"#, "corpus::unknown_shape", "the row is a list");
}

#[test]
fn row_8_values_stay_as_each_record_has_them() {
    for argument in [json!("12:00"), json!(12), json!(1.0), json!(null)] {
        let calls = json!([{"function": {"name": "wake", "arguments": {"time": argument}}}]);
        let line = json!({"messages": [{"role": "assistant", "tool_calls": calls}]}).to_string();
        let Content::Chat(chat) = parse(line).unwrap().unwrap().content else { panic!("not a chat") };
        assert_eq!(chat.messages[0]["tool_calls"], calls);
    }
}

#[test]
fn row_9_arguments_as_json_text_are_the_object_they_spell() {
    let arguments = |given: Value| {
        let call = json!({"function": {"name": "weather", "arguments": given}});
        let line = json!({"messages": [{"role": "assistant", "tool_calls": [call]}]}).to_string();
        parse(line).map(|record| match record.unwrap().content {
            Content::Chat(chat) => chat.messages[0]["tool_calls"][0]["function"]["arguments"].clone(),
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(arguments(json!("{\"city\": \"Oslo\"}")).unwrap(), json!({"city": "Oslo"}));
    assert_eq!(arguments(json!({"city": "Oslo"})).unwrap(), json!({"city": "Oslo"}));
    assert_eq!(arguments(json!("")).unwrap(), json!({}));
    assert!(arguments(json!("{\"city\": ")).unwrap_err().message().contains("not JSON"));
    assert!(arguments(json!("[1]")).unwrap_err().message().contains("are a list, not an object"));
}

#[test]
fn broken_lines_are_named() {
    refused(r#"{"text": "a"#, "corpus::bad_json", "column");
    refused(b"{\"text\": \"\xFF\"}", "corpus::invalid_utf8", "byte 11 ");
    refused(b"{\"te\0xt\"}", "corpus::nul_byte", "byte 5 ");
    for half in [r"\ud800", r"\udc00", r"\ud83d\u0041", r"\ud83d \ude00"] {
        refused(format!(r#"{{"text": "{half}"}}"#), "corpus::bad_json", "column");
    }
    refused(r#"{"text": ["a"]}"#, "corpus::unknown_shape", "`text` is a list");
    refused(r#"{"id": [1], "text": "a"}"#, "corpus::unknown_shape", "`id` is a list");
    let deep = format!("{{\"text\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    refused(deep, "corpus::bad_json", "recursion");
    let chat = |tools: &str, arguments: &str| {
        let call = format!(r#"[{{"function": {{"name": "f", "arguments": {arguments}}}}}]"#);
        let said = r#"{"role": "user", "content": "order 1234567890123456789012 and \"2\""}"#;
        let answer = format!(r#"{{"role": "assistant", "tool_calls": {call}}}"#);
        format!(r#"{{"messages": [{said}, {answer}], "tools": {tools}, "hash": 123456789012345678901234567890}}"#)
    };
    let large = "123456789012345678901234";
    let as_text = format!(r#""{{\"n\": {large}}}""#);
    for (arguments, code) in [(format!(r#"{{"n": {large}}}"#), "corpus::bad_json"), (as_text, "corpus::bad_message")] {
        refused(chat("null", &arguments), code, "123456789012345678901234 has more than 64 bits");
    }
    refused(chat(&format!("[{{\"most\": -{large}}}]"), "{}"), "corpus::bad_json", "-123456789012345678901234 has");
    assert!(parse(chat("[1e30, 18446744073709551615, -9223372036854775808]", "{}")).is_ok());
}

#[test]
fn messages_are_checked_one_by_one() {
    let message = |message: &str| format!(r#"{{"messages": [{{"role": "user", "content": "a"}}, {message}]}}"#);
    let bad = "corpus::bad_message";
    refused(message(r#"{"role": "model", "content": "a"}"#), bad, "message 2: unknown role \"model\"");
    refused(message(r#"{"from": "gpt", "value": "a"}"#), bad, "keys seen: from, value");
    refused(message(r#"{"role": "user"}"#), bad, "no `content`");
    refused(message(r#"{"role": "user", "content": 3}"#), bad, "`content` is a number");
    refused(message(r#"{"role": "user", "content": [["a"]]}"#), bad, "a part of `content` is a list");
    refused(message(r#"{"role": "user", "content": [{"type": "image"}]}"#), bad, "type \"image\"");
    refused(message(r#"{"role": "assistant", "tool_calls": {}}"#), bad, "no `content`");
    refused(message(r#""hello""#), bad, "it is a string");
    assert!(parse(message(r#"{"role": "user", "content": "consecutive"}"#)).is_ok());
    assert!(parse(message(r#"{"role": "user", "content": [{"type": "text", "text": "a"}]}"#)).is_ok());
}

#[test]
fn labels_must_be_unshifted_and_complete() {
    refused(r#"{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}"#, "corpus::bad_labels", "label 0 is 6");
    refused(r#"{"input_ids": [5, 6, 7], "labels": [5]}"#, "corpus::bad_labels", "1 labels for 3 tokens");
    refused(r#"{"input_ids": [5, -1]}"#, "corpus::unknown_shape", "-1 is no token id");
    refused(r#"{"input_ids": [5, 1.5]}"#, "corpus::unknown_shape", "not a list of integers");
    refused(r#"{"input_ids": []}"#, "corpus::unknown_shape", "empty");
}

#[test]
fn a_byte_order_mark_and_windows_line_ends_are_tolerated() {
    let all = lines(b"\xEF\xBB\xBF{\"text\": \"a\"}\r\n\r\n{\"text\": \"b\"}").unwrap();
    let records: Vec<_> = all.iter().filter_map(|(_, bytes)| parse(bytes).unwrap()).collect();
    assert_eq!(all.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 2, 3]);
    let texts: Vec<_> = records.into_iter().map(|record| record.content).collect();
    assert_eq!(texts, [Content::Text("a".into()), Content::Text("b".into())]);
}

#[test]
fn chunks_cover_every_line_in_order() {
    let bytes: Vec<u8> = (0..3 * 4096).flat_map(|i| format!("{i}\n").into_bytes()).collect();
    let all = lines(&bytes).unwrap();
    assert_eq!(all.len(), 3 * 4096);
    assert!(
        all.iter().enumerate().all(|(i, (line, text))| *line == i as u64 + 1 && *text == format!("{i}\n").into_bytes())
    );
}

#[test]
fn a_line_past_the_limit_is_refused() {
    let mut bytes = b"{}\n".to_vec();
    bytes.resize(3 + rows::ROW_BYTES_MAX + 1, b'x');
    let error = lines(&bytes).unwrap_err();
    assert_eq!(error.code(), "corpus::row_too_long");
    assert!(error.message().contains(":2: "), "{error}");
}

fn chat_of(line: &str) -> Chat {
    match parse(line).unwrap().unwrap().content {
        Content::Chat(chat) => chat,
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_conversations_become_messages() {
    let sharegpt = chat_of(
        r#"{"system": "Be brief.", "tools": "[{\"name\": \"f\"}]", "conversations": [{"from": "human", "value": "a", "weight": 0},
        {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "b"}, {"role": "user", "content": "c"}]}"#,
    );
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
    let expected = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "a", "weight": 0}),
        json!({"role": "assistant", "tool_calls": [call]}),
        json!({"role": "tool", "content": "2"}),
        json!({"role": "assistant", "content": "b"}),
        json!({"role": "user", "content": "c"}),
    ];
    assert_eq!((sharegpt.messages, sharegpt.tools), (expected.to_vec(), json!([{"name": "f"}])));
    refused(
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}"#,
        "corpus::bad_message",
        "message 2: unknown speaker \"narrator\"",
    );
    refused(r#"{"conversations": [{"from": "gpt"}]}"#, "corpus::bad_message", "message 1: no `from` and `value`");

    let turns =
        |user: &str| vec![json!({"role": "user", "content": user}), json!({"role": "assistant", "content": "c"})];
    let alpaca =
        |input: &str| chat_of(&json!({"instruction": "a", "input": input, "output": "c"}).to_string()).messages;
    assert_eq!(alpaca("b"), turns("a\n\nb"));
    assert_eq!(alpaca(""), turns("a"));
    let earlier = json!({"instruction": "e", "output": "f", "history": [["a", "c"]], "tools": "[{\"name\": \"g\"}]"});
    let chat = chat_of(&earlier.to_string());
    assert_eq!((chat.messages[..2].to_vec(), chat.messages.len()), (turns("a"), 4));
    assert_eq!((&chat.messages[3]["content"], chat.tools), (&json!("f"), json!([{"name": "g"}])));
    refused(
        r#"{"instruction": "a", "output": "b", "history": [["a"]]}"#,
        "corpus::unknown_shape",
        "`history`: invalid length 1",
    );
}

#[test]
fn a_prompt_and_its_completion_are_texts_or_messages() {
    let texts = parse(r#"{"prompt": "2 + 2 =", "completion": " 4"}"#).unwrap().unwrap().content;
    assert_eq!(texts, Content::Completion { prompt: "2 + 2 =".into(), completion: " 4".into() });
    let turn = |role: &str| json!({"role": role, "content": "a"});
    let line = json!({"prompt": [turn("user"), turn("assistant"), turn("user")], "completion": [turn("assistant")]});
    let chat = chat_of(&line.to_string());
    assert_eq!((chat.messages.len(), chat.trained_from), (4, 3));
    refused(r#"{"prompt": "a", "completion": []}"#, "corpus::unknown_shape", "`completion` is a list");
    let both = chat_of(r#"{"prompt": "hi", "messages": [{"role": "user", "content": "a"}]}"#);
    assert_eq!(both.messages.len(), 1, "a prompt alone is no shape");
}

#[test]
fn columns_give_names_and_decide_between_shapes() {
    let parse = |line: &str, columns: &[(&str, &str)]| {
        let columns = columns.iter().map(|(key, column)| (key.to_string(), column.to_string())).collect();
        parse_row(Path::new("talk.jsonl"), 1, line.as_bytes(), &columns)
    };
    let line = r#"{"no": 5, "body": "a", "text": "b"}"#;
    let record = parse(line, &[("text", "body"), ("id", "no")]).unwrap().unwrap();
    assert_eq!((record.id.as_str(), record.content), ("5", Content::Text("a".into())));
    let swapped = parse(r#"{"prompt": "a", "completion": "b"}"#, &[("prompt", "completion"), ("completion", "prompt")]);
    let expected = Content::Completion { prompt: "b".into(), completion: "a".into() };
    assert_eq!(swapped.unwrap().unwrap().content, expected);
    let line = r#"{"instruction": "a", "output": "b", "text": "a b"}"#;
    assert!(matches!(parse(line, &[]).unwrap().unwrap().content, Content::Chat(_)), "the prompt of Alpaca's own files");
    let line = r#"{"prompt": "a", "completion": "b", "text": "a b"}"#;
    assert_eq!(parse(line, &[]).unwrap_err().code(), "corpus::unknown_shape");
    let absent = parse(r#"{"text": "b"}"#, &[("text", "body")]).unwrap().unwrap();
    assert_eq!(absent.content, Content::Text("b".into()), "a row without the column keeps its own key");
    assert_eq!(parse(line, &[("text", "text")]).unwrap().unwrap().content, Content::Text("a b".into()));
    let error = parse(line, &[("messages", "dialog")]).unwrap_err();
    assert!(error.message().contains("prompt+completion, text"), "{error}");
}

/// The texts of a file of `text` records, how it holds them, and the numbers of the rows.
fn texts(name: &str, bytes: &[u8]) -> (Vec<String>, Format, Vec<u64>) {
    let (rows, format) = rows(name, bytes).unwrap();
    let text = |(_, bytes): &(u64, Vec<u8>)| match parse(bytes).unwrap()?.content {
        Content::Text(text) => Some(text),
        other => panic!("{other:?}"),
    };
    (rows.iter().filter_map(text).collect(), format, rows.iter().map(|(row, _)| *row).collect())
}

#[test]
fn json_is_an_array_or_an_object_with_one() {
    let expected = ["a", "b,]}", "\"c\\"].map(String::from).to_vec();
    let array = r#"[{"text": "a"}, {"text": "b,]}", "tags": [[1], {}]},
        {"text": "\"c\\"}]"#;
    assert_eq!(texts("a.json", array.as_bytes()), (expected.clone(), Format::Json, vec![1, 2, 3]));
    let object = format!("\u{FEFF}{{\"meta\": {{\"tags\": [\"[\"]}}, \"data\": {array}\n, \"version\": 2}}\n");
    assert_eq!(texts("a.json", object.as_bytes()), (expected, Format::Json, vec![1, 2, 3]));
    for (blank, first) in [("", "a".to_string()), (&" \r\n".repeat(1 << 19), "a".repeat(2 << 20))] {
        let lines = format!("{blank}{{\"text\": \"{first}\"}}\n{{\"text\": \"b\"}}\n");
        let (texts, format, _) = texts("a.json", lines.as_bytes());
        assert!(texts == [first, "b".into()] && format == Format::Jsonl, "longer than what is read at once");
    }
    for empty in ["", " \n", "[]", "[ ]", "{\"data\": []}"] {
        assert!(texts("a.json", empty.as_bytes()).0.is_empty(), "{empty:?}");
    }
}

#[test]
fn a_json_document_that_is_not_whole_is_refused() {
    for (text, code, says) in [
        (r#"[{"text": "a"}, {"text": "b"}"#, "corpus::bad_json", "a.json:2: no record ends here"),
        (r#"[{"text": "a"},]"#, "corpus::bad_json", "a.json:2: no record ends here"),
        (r#"[,{"text": "a"}]"#, "corpus::bad_json", "a.json:1: no record ends here"),
        (r#"[{"text": "a"}] x"#, "corpus::bad_json", "around the array"),
        (r#"{"data": [{"text": "a"}]"#, "corpus::bad_json", "around the array"),
        (r#"{"data": [{"text": "a"}], "more": []}"#, "corpus::unknown_shape", "2 arrays: data, more"),
        ("{\n\"data\": 3}", "corpus::unknown_shape", "0 arrays"),
    ] {
        let error = rows("a.json", text.as_bytes()).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(says), "{error}");
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_files_are_read_whatever_their_names_are() {
    let lines: String = (0..50_000).map(|i| format!("{{\"text\": \"{i}\"}}\n")).collect();
    let expected: Vec<String> = (0..50_000).map(|i| i.to_string()).collect();
    let (first, second) = lines.split_at(400_000);
    let zstd = |text: &str| zstd::encode_all(text.as_bytes(), 3).unwrap();
    for (name, bytes) in [
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        ("a.jsonl", gzip(lines.as_bytes())),
        ("a.jsonl.gz", [gzip(first.as_bytes()), gzip(second.as_bytes())].concat()),
        ("a.jsonl.zst", zstd(&lines)),
        ("a.jsonl.zst", [zstd(first), zstd(second)].concat()),
    ] {
        let (texts, format, _) = texts(name, &bytes);
        assert!(texts == expected && format == Format::Jsonl, "{name}");
        for broken in [bytes[..bytes.len() / 2].to_vec(), bytes[..bytes.len() - 1].to_vec()] {
            let error = rows(name, &broken).unwrap_err();
            assert_eq!(error.code(), "corpus::bad_compression", "{error}");
            assert!(error.message().contains(name), "{error}");
        }
    }
}

#[test]
fn a_small_file_that_unpacks_to_gigabytes_ends_at_the_longest_row() {
    let zeros = std::io::repeat(b' ').take(3 << 30);
    let bomb = zstd::encode_all(zeros, 3).unwrap();
    assert!(bomb.len() < 1 << 20);
    let error = rows("a.jsonl.zst", &bomb).unwrap_err();
    assert_eq!(error.code(), "corpus::row_too_long");
}

#[test]
fn whatever_a_row_or_a_file_holds_is_read_or_refused_with_its_place() {
    let lines: [&[u8]; 5] = [
        br#"{"id": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": "[]"}"#,
        br#"{"conversations": [{"from": "function_call", "value": "{\"name\": \"f\"}"}], "system": "s"}"#,
        br#"{"instruction": "a", "input": null, "output": "b\u00e9\ud83d\ude00"}"#,
        br#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
        br#"{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "text": null}"#,
    ];
    let mut read = 0;
    mutations(&lines, 20_000, |bytes| match parse(bytes) {
        Ok(record) => read += usize::from(record.is_some()),
        Err(error) => assert!(error.code().starts_with("corpus::") && error.message().contains(":7: "), "{error}"),
    });
    assert!(read > 200, "{read}");
    let packed = (gzip(br#"[{"text": "a"}]"#), zstd::encode_all(&b"{\"text\": \"a\"}\n"[..], 1).unwrap());
    let files: [&[u8]; 4] =
        [br#"[{"text": "a"}, {"text": "]"}]  "#, br#"{"n": [], "data": [{"text": "a"}]}"#, &packed.0, &packed.1];
    mutations(&files, 2000, |bytes| {
        if let Err(error) = rows("mutated.json", bytes) {
            assert!(error.code().starts_with("corpus::") && error.message().contains("mutated.json"), "{error}");
        }
    });
}
