//! A conversation that is too long, in several records of whole turns.

use super::choice;
use super::encode::{Encoder, Record};
use super::file::Line;
use super::reader::{self, Chat, Content};
use crate::config::SourceConfig;
use crate::error::Result;
use serde_json::Value;

/// The conversation `record`, which stands in `line`, in parts of at most `limit` tokens: as many exchanges in each as fit, an
/// exchange being a user's message and all up to the next one. Each part begins with the messages before the first exchange,
/// such as a system message, and has the tools; its id is the record's with `/1`, `/2` and so on. What is trained is decided
/// for the whole conversation, so that a message is trained in one part or in none.
///
/// An exchange that is too long by itself is a part, longer than `limit`. A record that is no conversation, has one exchange
/// alone or a given prompt, stays as it is.
///
/// # Errors
/// As [`Encoder::encode`].
pub fn split(
    encoder: &Encoder,
    line: &Line,
    source: &SourceConfig,
    record: Record,
    limit: usize,
) -> Result<Vec<Record>> {
    let raw = reader::parse_row(&source.path, line.line, line.json.as_bytes(), &source.columns)?;
    let Some(Content::Chat(chat)) = raw.map(|raw| raw.content) else { return Ok(vec![record]) };
    if chat.trained_from > 0 {
        return Ok(vec![record]);
    }
    let (chat, chosen) = choice::choose(&chat, encoder.options().train_on)?;
    let (head, mut starts) = exchanges(&chat.messages);
    if starts.len() < 2 {
        return Ok(vec![record]);
    }
    let part = |from: usize, to: usize, id: String| {
        let messages = [&chat.messages[..head], &chat.messages[from..to]].concat();
        let chosen = [&chosen[..head], &chosen[from..to]].concat();
        // the messages before the first exchange are trained once, if at all
        let trained_from = if from > head { head } else { 0 };
        let place = format!("{}:{}: record {id:?}", source.path.display(), line.line);
        let part = Chat { messages, tools: chat.tools.clone(), trained_from };
        encoder.encode_part(&part, &chosen, id, record.root).map_err(|error| error.at(&place))
    };
    starts.push(chat.messages.len());
    let mut parts: Vec<Record> = Vec::new();
    let mut first = 0;
    while first + 1 < starts.len() {
        let id = format!("{}/{}", record.id, parts.len() + 1);
        let mut last = first + 1;
        let mut fits = part(starts[first], starts[last], id.clone())?;
        while last + 1 < starts.len() {
            let longer = part(starts[first], starts[last + 1], id.clone())?;
            if longer.tokens.len() > limit {
                break;
            }
            fits = longer;
            last += 1;
        }
        parts.push(fits);
        first = last;
    }
    Ok(parts)
}

/// How many messages stand before the first exchange, and where exchanges begin.
fn exchanges(messages: &[Value]) -> (usize, Vec<usize>) {
    let role = |i: usize| messages[i]["role"].as_str().unwrap_or_default();
    let head = (0..messages.len()).find(|&i| !matches!(role(i), "system" | "developer")).unwrap_or(messages.len());
    let begins = |&i: &usize| i == head || role(i) == "user" && role(i - 1) != "user";
    (head, (head..messages.len()).filter(begins).collect())
}

#[cfg(test)]
mod tests {
    use super::super::EncodeOptions;
    use super::super::duplicates::Sketch;
    use super::super::fixtures::{encode, encoder_with, trained_text};
    use super::*;
    use crate::config::TrainOn;
    use serde_json::json;
    use std::path::Path;

    const LIMIT: usize = 60;

    fn parts(record: &Value, train_on: TrainOn, limit: usize) -> (Encoder, Record, Vec<Record>) {
        let encoder = encoder_with(EncodeOptions { train_on, ..EncodeOptions::default() });
        let whole = encode(&encoder, record).unwrap();
        let json = record.to_string();
        let raw = reader::parse_row(Path::new("talk.jsonl"), 1, json.as_bytes(), &Default::default()).unwrap().unwrap();
        let sketch = Sketch::of(&raw.content);
        let line = Line {
            id: whole.id.to_string(),
            named: true,
            line: 1,
            json,
            key: 0,
            sketch,
            shape: raw.shape,
            unshown_thought: false,
        };
        let parts = split(&encoder, &line, &SourceConfig::new("talk.jsonl", "talk"), whole.clone(), limit).unwrap();
        (encoder, whole, parts)
    }

    fn talk(exchanges: usize) -> Value {
        let turn = |role: &str, text: String| json!({"role": role, "content": text});
        let mut messages = vec![turn("system", "Be brief.".into())];
        for n in 0..exchanges {
            messages.extend([turn("user", format!("Question {n}?")), turn("assistant", format!("Answer {n}."))]);
        }
        json!({"id": "long", "messages": messages, "tools": null})
    }

    #[test]
    fn every_trained_token_is_in_one_part_and_each_part_has_the_system_message() {
        for train_on in [TrainOn::Assistant, TrainOn::All] {
            let (encoder, whole, parts) = parts(&talk(12), train_on, LIMIT);
            assert!(whole.tokens.len() > LIMIT && parts.len() > 2);
            let text = |record: &Record| encoder.tokenizer().unwrap().decode(&record.tokens.ids(), false).unwrap();
            for (n, part) in parts.iter().enumerate() {
                assert_eq!(*part.id, format!("long/{}", n + 1));
                assert!(
                    part.tokens.len() <= LIMIT
                        && text(part).starts_with("<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n")
                );
            }
            let trained: String = parts.iter().map(|part| trained_text(&encoder, part)).collect();
            assert_eq!(trained, trained_text(&encoder, &whole));
            let total: usize = parts.iter().map(Record::trained_tokens).sum();
            assert_eq!(total, whole.trained_tokens());
        }
    }

    #[test]
    fn what_is_trained_is_decided_for_the_whole_conversation() {
        let mut talk = talk(12);
        talk["messages"][4]["train"] = true.into();
        let (encoder, _, parts) = parts(&talk, TrainOn::LastTurn, LIMIT);
        let trained: Vec<String> =
            parts.iter().map(|part| trained_text(&encoder, part)).filter(|t| !t.is_empty()).collect();
        assert_eq!(trained, ["Answer 1.<turn|>", "Answer 11.<turn|>"]);
    }

    #[test]
    fn a_turn_that_is_too_long_by_itself_is_a_part_and_what_has_no_turns_stays() {
        let mut long = talk(3);
        long["messages"][4]["content"] = "word ".repeat(LIMIT).into();
        let (_, _, found) = parts(&long, TrainOn::Assistant, LIMIT);
        let over: Vec<bool> = found.iter().map(|part| part.tokens.len() > LIMIT).collect();
        assert_eq!(over, [false, true, false]);
        let turn = |role: &str| json!({"role": role, "content": "word ".repeat(20)});
        let given = json!({"id": "p", "prompt": [turn("user"), turn("assistant"), turn("user")], "completion": [turn("assistant")]});
        let one = json!({"id": "one", "messages": [turn("user"), turn("user"), turn("assistant"), turn("assistant")]});
        for record in [json!({"id": "text", "text": "word ".repeat(LIMIT)}), given, one] {
            let (_, whole, found) = parts(&record, TrainOn::Assistant, 10);
            assert_eq!(found, [whole]);
        }
    }
}
