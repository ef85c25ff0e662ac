//! Which bytes of a rendered conversation are trained: what the assistant says and the token that ends its turn.
//!
//! They are found by rendering the conversation again with something changed and comparing, never by markers in the
//! template. Where two renderings cannot be brought together the answer is an error, never a guess.

use super::end_of_turn::EndOfTurn;
use super::reader::Chat;
use super::template::ChatTemplate;
use crate::error::{Error, Result};
use minijinja::Value;
use serde_json::json;
use std::ops::Range;

/// Stands around a number where an assistant's words would be: private-use characters, which templates leave alone.
const OPEN: char = '\u{E000}';
const CLOSE: char = '\u{E001}';

/// Keys under which a message carries what the model thought; templates leave it out of earlier turns.
///
/// The first that is there counts.
pub const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A piece of what the assistant says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Index of its message.
    pub message: usize,
    /// Where it stands in the rendering.
    pub bytes: Range<usize>,
}

/// What the assistant says in `whole`, the rendering of `chat`: ascending, apart, none empty. A turn without words has
/// none.
///
/// # Errors
/// `corpus::undecidable_spans` with the reason.
pub fn of_assistant(template: &ChatTemplate, end: Option<&EndOfTurn>, chat: &Chat, whole: &str) -> Result<Vec<Span>> {
    let turns: Vec<_> = (0..chat.messages.len()).filter(|&i| chat.messages[i]["role"] == "assistant").collect();
    if turns.is_empty() {
        return Ok(Vec::new());
    }
    let end = end.map_or("", |end| end.text.as_str());
    let renderer = Renderer::new(template, &chat.tools);
    if let Some(spans) = renderer.by_skeleton(chat, &turns, whole, end)? {
        return Ok(spans);
    }
    renderer.by_prefixes(chat, &turns, whole, end)
}

/// How many bytes of `whole`, the rendering of `chat`, are a given prompt: its messages before `trained_from`, and the header
/// of the assistant's turn where one follows.
///
/// # Errors
/// `corpus::undecidable_spans` where they render differently once more follows.
pub fn given(template: &ChatTemplate, chat: &Chat, whole: &str) -> Result<usize> {
    if chat.trained_from == 0 {
        return Ok(0);
    }
    let renderer = Renderer::new(template, &chat.tools);
    let prompt = values(&chat.messages[..chat.trained_from]);
    let end = match chat.messages.get(chat.trained_from) {
        Some(next) if next["role"] == "assistant" => renderer.start(&prompt, whole)?,
        _ => Some(renderer.render(&prompt)?).filter(|text| whole.starts_with(text)).map(|text| text.len()),
    };
    end.ok_or_else(|| undecidable("the prompt renders differently once the completion follows"))
}

/// A template with the tools of one conversation.
pub struct Renderer<'a> {
    template: &'a ChatTemplate,
    tools: Value,
}

impl<'a> Renderer<'a> {
    /// `tools` as the record has them.
    pub fn new(template: &'a ChatTemplate, tools: &serde_json::Value) -> Self {
        Self { template, tools: Value::from_serialize(tools) }
    }

    /// The text of a conversation.
    pub fn render(&self, messages: &[Value]) -> Result<String> {
        self.template.render(messages, &self.tools, false)
    }

    /// The text of a conversation, with the prompt for the assistant's next turn.
    pub fn prompt(&self, messages: &[Value]) -> Result<String> {
        self.template.render(messages, &self.tools, true)
    }

    /// One more rendering, with marks for the words of every assistant turn: what stands between the marks must stand in
    /// `whole` too, and the rest of `whole` is what the assistant says. `None` where a turn is more than words, or the
    /// two renderings differ elsewhere.
    fn by_skeleton(&self, chat: &Chat, turns: &[usize], whole: &str, end: &str) -> Result<Option<Vec<Span>>> {
        if whole.contains([OPEN, CLOSE]) || !turns.iter().all(|&i| only_words(&chat.messages[i])) {
            return Ok(None);
        }
        let mut messages = chat.messages.clone();
        for &i in turns {
            messages[i]["content"] = mark(i).into();
        }
        let skeleton = self.render(&values(&messages))?;
        let mut rest = skeleton.as_str();
        let mut fixed = Vec::with_capacity(turns.len() + 1);
        for &i in turns {
            let Some((before, after)) = rest.split_once(&mark(i)) else { return Ok(None) };
            fixed.push(before);
            rest = after;
        }
        fixed.push(rest);
        if fixed.iter().any(|piece| piece.contains([OPEN, CLOSE])) || !whole.starts_with(fixed[0]) {
            return Ok(None);
        }
        let mut spans = Vec::new();
        let mut at = fixed[0].len();
        for (k, &i) in turns.iter().enumerate() {
            let last = k + 1 == turns.len();
            let Some(length) = words_length(&whole[at..], &words(&chat.messages[i]), fixed[k + 1], last) else {
                return Ok(None);
            };
            if length > 0 {
                spans.push(Span { message: i, bytes: at..with_end(whole, at + length, end) });
            }
            at += length + fixed[k + 1].len();
        }
        Ok(Some(spans))
    }

    /// Turn by turn: the conversation up to the turn, with and without it, must be a prefix of `whole`; what lies
    /// between is what the assistant says, its tool calls and thoughts with it.
    fn by_prefixes(&self, chat: &Chat, turns: &[usize], whole: &str, end: &str) -> Result<Vec<Span>> {
        let chat = self.without_unseen_reasoning(chat, whole)?;
        let all = values(&chat.messages);
        let mut spans: Vec<Span> = Vec::new();
        for &i in turns {
            let turn = format!("message {}", i + 1);
            if chat.messages[i]["tool_responses"].as_array().is_some_and(|list| !list.is_empty()) {
                let reason = "what tools answered stands inside the assistant's message: give it messages of role tool";
                return Err(undecidable(&format!("{turn}: {reason}")));
            }
            let around = self.around(&all[..i])?;
            let header = around.as_ref().map(|(header, _)| header.as_str());
            let start = self.start_after(header, &all[..i], whole)?.ok_or_else(|| {
                undecidable(&format!("{turn}: what comes before it renders differently once it is followed by more"))
            })?;
            let with_turn = self.render(&all[..=i])?;
            let mut found = Vec::new();
            if with_turn.len() >= start && whole.starts_with(&with_turn) {
                // words that are printed more than once do not tell
                let behind = around.as_ref().map(|(_, behind)| behind.as_str()).filter(|behind| !behind.contains(OPEN));
                let behind = behind.map(|behind| without_end(behind, end));
                let behind = behind.filter(|behind| with_turn.trim_end().ends_with(behind));
                let behind = behind.ok_or_else(|| {
                    undecidable(&format!("{turn}: its end cannot be told from what the template adds behind it"))
                })?;
                let stop = with_turn.trim_end().len() - behind.len();
                let said = start..with_turn[..stop].trim_end().len().max(start);
                let inner = with_turn[said.clone()].strip_suffix(end).unwrap_or(&with_turn[said.clone()]);
                let words = words(&chat.messages[i]);
                let behind_words = inner.rsplit_once(words.as_str()).map_or("", |(_, behind)| behind);
                let ended = !words.is_empty() && !calls_tools(&chat.messages[i]);
                if ended && !end.is_empty() && behind_words.contains(end) {
                    return Err(undecidable(&format!("{turn}: the template ends more than one turn with it")));
                }
                found.push(said);
            } else {
                if calls_tools(&chat.messages[i]) {
                    let mut calls = chat.messages[i].clone();
                    calls["content"] = "".into();
                    let calls = self.render(&[&all[..i], &values(&[calls])].concat())?;
                    if calls.len() < start || !whole.starts_with(&calls) {
                        return Err(undecidable(&format!(
                            "{turn}: its tool calls render differently when more follows"
                        )));
                    }
                    found.push(start..calls.trim_end().len().max(start));
                }
                if !words(&chat.messages[i]).is_empty() {
                    found.push(self.words_in_place(&chat, i, whole, end)?.ok_or_else(|| {
                        undecidable(&format!("{turn}: its words cannot be told from what the template adds"))
                    })?);
                }
            }
            let silent = words(&chat.messages[i]).is_empty() && !calls_tools(&chat.messages[i]);
            for bytes in found.into_iter().filter(|bytes| !bytes.is_empty() && !silent) {
                if spans.last().is_some_and(|before| before.bytes.end > bytes.start) {
                    return Err(undecidable(&format!("{turn}: it overlaps the turn before")));
                }
                spans.push(Span { message: i, bytes });
            }
        }
        Ok(spans)
    }

    /// Where the words of a turn after `before` begin in `whole`: behind the longest of two readings of its header.
    pub fn start(&self, before: &[Value], whole: &str) -> Result<Option<usize>> {
        self.start_after(self.header(before)?.as_deref(), before, whole)
    }

    fn start_after(&self, header: Option<&str>, before: &[Value], whole: &str) -> Result<Option<usize>> {
        let header = header.filter(|header| whole.starts_with(header)).map(str::len);
        if before.is_empty() {
            return Ok(header);
        }
        let prompt = self.prompt(before)?;
        let longer = whole.starts_with(&prompt) && header.is_none_or(|header| header < prompt.len());
        // without a generation prompt nothing tells where the header ends
        let prompted = longer && self.render(before).is_ok_and(|text| text != prompt);
        Ok(if prompted { Some(prompt.len()) } else { header })
    }

    /// What is rendered in front of an assistant's words after `before`.
    pub fn header(&self, before: &[Value]) -> Result<Option<String>> {
        Ok(self.around(before)?.map(|(header, _)| header))
    }

    /// What is rendered in front of an assistant's words after `before`, and what behind them.
    fn around(&self, before: &[Value]) -> Result<Option<(String, String)>> {
        let text = self.render(&[before, &[message("assistant", &mark(0))]].concat())?;
        Ok(text.split_once(&mark(0)).map(|(header, behind)| (header.to_string(), behind.to_string())))
    }

    /// The span of one turn's words by exchanging them for a mark in the whole conversation.
    fn words_in_place(&self, chat: &Chat, turn: usize, whole: &str, end: &str) -> Result<Option<Range<usize>>> {
        let mut messages = chat.messages.clone();
        messages[turn]["content"] = mark(turn).into();
        let marked = self.render(&values(&messages))?;
        let Some((before, after)) = marked.split_once(&mark(turn)) else { return Ok(None) };
        if !whole.starts_with(before) || !whole.ends_with(after) || before.len() + after.len() > whole.len() {
            return Ok(None);
        }
        let length = whole.len() - before.len() - after.len();
        let said = words(&chat.messages[turn]);
        let found = &whole[before.len()..before.len() + length];
        Ok(said.contains(found).then(|| before.len()..with_end(whole, before.len() + length, end)))
    }

    /// The conversation without the reasoning of earlier turns, or of all but the last, where it renders to the same text
    /// without: a prefix of the conversation would show it, since there the turn is the last one.
    fn without_unseen_reasoning(&self, chat: &Chat, whole: &str) -> Result<Chat> {
        let last_user = chat.messages.iter().rposition(|m| m["role"] == "user").unwrap_or(0);
        for earlier in [chat.messages.len().saturating_sub(1), last_user] {
            let mut shorter = chat.clone();
            for message in shorter.messages[..earlier].iter_mut().filter_map(|m| m.as_object_mut()) {
                message.retain(|key, _| !REASONING.contains(&key.as_str()));
            }
            if shorter != *chat && self.render(&values(&shorter.messages))? == whole {
                return Ok(shorter);
            }
        }
        Ok(chat.clone())
    }
}

/// How many bytes of `rest` are the assistant's words, when `after` follows them and ends the text if this is the `last`
/// turn. Templates trim the words and some leave thoughts out, so that they may be a part of `said`.
fn words_length(rest: &str, said: &str, after: &str, last: bool) -> Option<usize> {
    let follows = |tail: &str| if last { tail == after } else { tail.starts_with(after) };
    if rest.strip_prefix(said).is_some_and(follows) {
        return Some(said.len());
    }
    let length = if last {
        rest.len().checked_sub(after.len()).filter(|_| rest.ends_with(after))?
    } else {
        let mut places = rest.match_indices(after);
        let first = places.next()?.0;
        // two places would mean a choice
        if after.is_empty() || places.next().is_some() {
            return None;
        }
        first
    };
    said.contains(&rest[..length]).then_some(length)
}

/// What a template adds behind the last turn of a conversation: `behind` its words, without the token that ends the turn and white
/// space around.
fn without_end<'a>(behind: &'a str, end: &str) -> &'a str {
    let behind = behind.trim_start();
    behind.strip_prefix(end).unwrap_or(behind).trim()
}

/// `at`, or the end of the end-of-turn token where it stands there.
fn with_end(whole: &str, at: usize, end: &str) -> usize {
    if whole[at..].starts_with(end) { at + end.len() } else { at }
}

/// The text of a message: its string, or its text parts one after the other, trimmed as templates do.
fn words(message: &serde_json::Value) -> String {
    match &message["content"] {
        serde_json::Value::String(text) => text.trim().to_string(),
        serde_json::Value::Array(parts) => parts.iter().filter_map(|p| p["text"].as_str()).map(str::trim).collect(),
        _ => String::new(),
    }
}

fn only_words(message: &serde_json::Value) -> bool {
    let empty = |value: &serde_json::Value| value.is_null() || *value == json!([]) || *value == json!("");
    let mut pairs = message.as_object().into_iter().flatten();
    pairs.all(|(key, value)| key == "role" || key == "content" && !value.is_null() || empty(value))
}

fn calls_tools(message: &serde_json::Value) -> bool {
    message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

/// Text to find again in a rendering.
pub fn mark(turn: usize) -> String {
    format!("{OPEN}{turn}{CLOSE}")
}

/// A message as a template takes it.
pub fn message(role: &str, content: &str) -> Value {
    Value::from_serialize(json!({"role": role, "content": content}))
}

/// The messages as a template takes them.
///
/// A thought under any of its names is there under those that templates read, as transformers has it.
pub fn values(messages: &[serde_json::Value]) -> Vec<Value> {
    let value = |message: &serde_json::Value| {
        let thought = REASONING.iter().map(|key| &message[*key]).find(|thought| !thought.is_null()).cloned();
        let Some(thought) = thought else { return Value::from_serialize(message) };
        let mut message = message.clone();
        if message["thinking"].is_null() {
            message["thinking"] = thought.clone();
        }
        message["reasoning_content"] = thought;
        Value::from_serialize(message)
    };
    messages.iter().map(value).collect()
}

/// The error of a record whose trained part cannot be told.
pub fn undecidable(reason: &str) -> Error {
    Error::new("corpus::undecidable_spans", reason)
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::Tokenizer;
    use super::super::{fixtures, reader};
    use super::*;

    const GOOGLE: &str = "google-2026-05-via-forcepusher.jinja";
    const UNSLOTH: &str = "unsloth-gemma-4.jinja";

    /// A template of another family: other turn tokens, words kept as they are, thoughts shown in the last turn only.
    const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}\
        {{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn user(text: &str) -> serde_json::Value {
        json!({"role": "user", "content": text})
    }

    fn assistant(text: &str) -> serde_json::Value {
        json!({"role": "assistant", "content": text})
    }

    fn chat(messages: &[serde_json::Value]) -> Chat {
        reader::chat("here", json!(messages), json!(null)).unwrap()
    }

    fn spans_of(template: &ChatTemplate, end: &str, chat: &Chat) -> Result<Vec<String>> {
        let whole = template.render(&values(&chat.messages), &Value::from_serialize(&chat.tools), false).unwrap();
        let end = EndOfTurn { text: end.into(), id: 6 };
        let spans = of_assistant(template, Some(&end), chat, &whole)?;
        Ok(spans.into_iter().map(|span| whole[span.bytes].to_string()).collect())
    }

    fn gemma(name: &str, messages: &[serde_json::Value]) -> Vec<String> {
        spans_of(&fixtures::template(name), "<turn|>", &chat(messages)).unwrap()
    }

    #[test]
    fn row_1_every_end_of_turn_is_trained_whatever_the_eos_token_is() {
        let tokenizer = Tokenizer::open(&fixtures::path("tiny-base")).unwrap().unwrap();
        let end = EndOfTurn::find(&fixtures::template(GOOGLE), &tokenizer).unwrap().unwrap();
        assert_eq!(end, EndOfTurn { text: "<turn|>".into(), id: 6 });
        let found = gemma(GOOGLE, &[user("One?"), assistant("1."), user("Two?"), assistant("2.")]);
        assert_eq!(found, ["1.<turn|>", "2.<turn|>"]);
    }

    #[test]
    fn row_2_templates_without_markers_have_spans() {
        for name in
            [GOOGLE, UNSLOTH, "unsloth-gemma-4-edge.jinja", "forcepusher-gemma4.jinja", "python-semantics.jinja"]
        {
            let found = gemma(name, &[user("Hello?"), assistant("Good day.")]);
            assert!(found.len() == 1 && found[0].starts_with("Good day."), "{name}: {found:?}");
        }
    }

    #[test]
    fn what_a_template_adds_behind_the_last_turn_is_not_trained() {
        let turns = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}";
        let messages = [user("Hi you"), json!({"role": "assistant", "content": "Yo.", "name": "bob"})];
        let spans = |source: &str| spans_of(&fixtures::inline_template(source), "<turn|>", &chat(&messages));
        for behind in ["", "<|turn>system\nBe kind.<turn|>\n", "<|turn>user\n{{ messages[0].content }}<turn|>"] {
            assert_eq!(spans(&format!("{turns}{behind}")).unwrap(), ["Yo.<turn|>"], "{behind}");
        }
        let named = "{% if messages[-1].name %}<|turn>system\n{{ messages[-1].name }}<turn|>{% endif %}";
        let header = turns.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}");
        for source in [header, format!("{turns}{named}"), format!("{{{{ messages|tojson }}}}{turns}")] {
            assert_eq!(spans(&source).unwrap_err().code(), "corpus::undecidable_spans", "{source}");
        }
    }

    #[test]
    fn the_end_of_a_turn_may_stand_in_a_thought_and_a_call_with_a_thought_may_be_answered() {
        let call = json!([{"id": "c", "function": {"name": "f", "arguments": {"to": "a <turn|> b"}}}]);
        let answer = json!({"role": "tool", "tool_call_id": "c", "content": "1"});
        for key in REASONING {
            let calling = json!({"role": "assistant", "content": "Look.", "tool_calls": call, key: "Hm <turn|>"});
            let found = gemma(GOOGLE, &[user("?"), calling, answer.clone(), assistant("Yo.")]).concat();
            assert!(
                found.contains("Hm <turn|>") && found.contains("a <turn|> b") && found.ends_with("Yo.<turn|>"),
                "{found}"
            );
        }
    }

    #[test]
    fn a_thought_has_the_names_that_templates_read() {
        let template =
            fixtures::inline_template("{% for m in messages %}{{ m.reasoning_content }} {{ m.thinking }}.{% endfor %}");
        for key in REASONING {
            let message = json!({"role": "assistant", "content": "Yo.", key: "Hm"});
            assert_eq!(template.render(&values(&[message]), &Value::from(()), false).unwrap(), "Hm Hm.", "{key}");
        }
    }

    #[test]
    fn row_3_any_turn_tokens_will_do_and_what_cannot_be_decided_is_refused() {
        let plain = fixtures::inline_template("{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}");
        assert_eq!(spans_of(&plain, "", &chat(&[user("a"), assistant("b"), user("c")])).unwrap(), ["b"]);
        let counting = fixtures::inline_template(
            "{{ messages | length }}{% for m in messages %}<{{ m.content | length }}>{{ m.content }}{% endfor %}",
        );
        let error = spans_of(&counting, "", &chat(&[user("a"), assistant("four"), user("e")])).unwrap_err();
        assert_eq!(error.code(), "corpus::undecidable_spans");
        assert!(error.message().starts_with("message 2: "), "{error}");
        let changed = fixtures::inline_template("{% for m in messages %}<{{ m.content | upper }}>{% endfor %}");
        let found = spans_of(&changed, "", &chat(&[user("a"), assistant("bcd"), user("e")])).unwrap();
        assert_eq!(found, ["BCD"], "what the template adds is no token that ends the turn");
    }

    #[test]
    fn row_4_thoughts_that_the_template_strips_spill_nothing_into_other_turns() {
        let thought = "<|channel>thought\nLet me see.\n<channel|>Because.";
        for name in [GOOGLE, UNSLOTH] {
            let found = gemma(name, &[user("Why?"), assistant(thought), user("Sure?"), assistant("Yes.")]);
            assert_eq!(found, ["Because.<turn|>", "Yes.<turn|>"]);
        }
        let template = fixtures::inline_template(THINKING);
        let said = |text: &str, why: &str| json!({"role": "assistant", "content": text, "reasoning_content": why});
        let messages = [user("Why?"), said("Because.", "Hm."), user("Sure?"), said("Yes.", "Well.")];
        let found = spans_of(&template, "<|im_end|>", &chat(&messages)).unwrap();
        assert_eq!(found, ["Because.<|im_end|>", "<think>\nWell.\n</think>\n\nYes.<|im_end|>"]);
        let inside = [user("Why?"), assistant("<think>Hm.</think>Because."), user("Sure?"), assistant("Yes.")];
        let found = spans_of(&template, "<|im_end|>", &chat(&inside)).unwrap();
        assert_eq!(found, ["Because.<|im_end|>", "Yes.<|im_end|>"]);
    }

    #[test]
    fn adjacent_turns_are_trained_as_the_template_joins_them() {
        let messages = [user("Count."), assistant("One."), assistant("Two."), user("On."), assistant("Three.")];
        assert_eq!(gemma(GOOGLE, &messages), ["One.<turn|>", "Two.<turn|>", "Three.<turn|>"]);
        assert_eq!(gemma(UNSLOTH, &messages), ["One.", "Two.<turn|>", "Three.<turn|>"]);
    }

    #[test]
    fn tool_calls_are_trained_and_what_tools_answer_is_not() {
        let call = json!([{"id": "c", "function": {"name": "clock", "arguments": {}}}]);
        let answer = json!({"role": "tool", "tool_call_id": "c", "content": "nine"});
        let calling =
            |text: &str| json!({"role": "assistant", "content": text, "tool_calls": call, "reasoning": "Look."});
        let turn = [user("Time?"), calling(""), answer.clone(), assistant("Nine.")];
        let thought = "<|channel>thought\nLook.\n<channel|>";
        let called = "<|tool_call>call:clock{}<tool_call|><|tool_response>";
        for name in [GOOGLE, UNSLOTH] {
            assert_eq!(gemma(name, &turn), [format!("{thought}{called}"), "Nine.<turn|>".into()]);
            // once a user turn follows, the template leaves the thought out
            let more = [&turn[..], &[user("And?"), assistant("Ten.")]].concat();
            assert_eq!(gemma(name, &more), [called, "Nine.<turn|>", "Ten.<turn|>"]);
            // the template puts the words behind the answer
            let both = [user("Time?"), calling("I looked."), answer.clone(), assistant("Nine.")];
            assert_eq!(gemma(name, &both), [&format!("{thought}{called}"), "I looked.<turn|>", "Nine.<turn|>"]);
            assert_eq!(gemma(name, &turn[..2]), [format!("{thought}{called}")]);
        }
        let inside = json!({"role": "assistant", "content": "Nine.", "tool_calls": call,
            "tool_responses": [{"name": "clock", "response": "nine"}]});
        let error = spans_of(&fixtures::template(GOOGLE), "<turn|>", &chat(&[user("Time?"), inside])).unwrap_err();
        assert!(error.message().contains("messages of role tool"), "{error}");
    }

    #[test]
    fn words_that_look_like_markup_do_not_move_the_spans() {
        let turn = "<turn|>\n<|turn>user\nNo.<turn|>\n<|turn>model\n";
        let found = gemma(GOOGLE, &[user("Say it."), assistant(turn), user(turn), assistant("\u{E000}0\u{E001}")]);
        assert_eq!(found, [format!("{}<turn|>", turn.trim()), "\u{E000}0\u{E001}<turn|>".into()]);
        let found = gemma(UNSLOTH, &[user("Say it."), assistant("a"), user("a"), assistant("a")]);
        assert_eq!(found, ["a<turn|>", "a<turn|>"]);
    }

    #[test]
    fn a_turn_without_words_trains_nothing() {
        assert_eq!(gemma(GOOGLE, &[user("Hush."), assistant(" "), user("Now?"), assistant("Yes.")]), ["Yes.<turn|>"]);
        assert_eq!(gemma(GOOGLE, &[user("Anyone?")]), [""; 0]);
    }

    #[test]
    fn an_end_of_turn_in_pieces_is_an_error() {
        let tokenizer = Tokenizer::open(&fixtures::path("tiny-base")).unwrap().unwrap();
        let error = EndOfTurn::find(&fixtures::inline_template(THINKING), &tokenizer).unwrap_err();
        assert_eq!(error.code(), "corpus::split_end_of_turn");
        assert!(error.message().contains("<|im_end|>"), "{error}");
        let none = fixtures::inline_template("{% for m in messages %}{{ m.content }}\n{% endfor %}");
        assert_eq!(EndOfTurn::find(&none, &tokenizer).unwrap(), None);
    }
}
