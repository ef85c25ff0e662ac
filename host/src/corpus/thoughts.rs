//! What a model thinks before it answers: what stands around it in a rendering, and the empty thought with which some
//! generation prompts begin the answer.

use super::spans::{self, Renderer, Span};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use minijinja::Value;
use serde_json::json;
use std::ops::Range;

/// What stands around thoughts that a template leaves where they are, in the words.
const IN_WORDS: [&str; 2] = ["<think>", "</think>"];

/// What a template puts around thoughts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delimiters {
    /// In front, without white space around it.
    open: String,
    /// Behind, without white space in front of it; white space behind it belongs to it.
    close: String,
}

impl Delimiters {
    /// Finds them by what the template makes of a thought, in an answer or in front of a tool call. A template that shows
    /// no thoughts of its own is taken to leave `<think>` and `</think>` in the words.
    ///
    /// # Errors
    /// `corpus::no_thoughts` where the template shows a thought and nothing that tells where it begins and ends.
    pub fn find(template: &ChatTemplate) -> Result<Self> {
        let renderer = Renderer::new(template, &serde_json::Value::Null);
        let (words, thought) = (spans::mark(0), spans::mark(1));
        let asked = json!({"role": "user", "content": "Hello."});
        let call = json!([{"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}]);
        for calls in [json!(null), call] {
            let mut answer = json!({"role": "assistant", "content": words});
            if !calls.is_null() {
                answer["tool_calls"] = calls;
            }
            let silent = renderer.render(&spans::values(&[asked.clone(), answer.clone()]))?;
            for key in spans::REASONING {
                answer[key] = thought.clone().into();
            }
            let text = renderer.render(&spans::values(&[asked.clone(), answer]))?;
            let Some((before, after)) = text.split_once(&thought) else { continue };
            let before_turn = spans::values(std::slice::from_ref(&asked));
            let start = renderer.start(&before_turn, &text)?.unwrap_or(before.len());
            let open = text.get(start..before.len()).unwrap_or_default();
            let same = silent.get(start..).and_then(|rest| after.strip_suffix(rest));
            let close = same.or(after.split_once(&words).map(|(close, _)| close)).unwrap_or_default();
            if open.trim().is_empty() || close.trim().is_empty() {
                let message = format!(
                    "{}: a thought stands between {open:?} and {close:?}, which do not tell where it begins and ends",
                    template.info().origin
                );
                return Err(Error::new("corpus::no_thoughts", message).help("set data.train_reasoning to true"));
            }
            return Ok(Self { open: open.trim().into(), close: close.trim_start().into() });
        }
        let [open, close] = IN_WORDS.map(String::from);
        Ok(Self { open, close })
    }

    /// The thoughts in what the assistant says, with what stands around them.
    ///
    /// # Errors
    /// `corpus::undecidable_spans` for one that does not end.
    pub fn within(&self, text: &str, said: &[Span]) -> Result<Vec<Range<usize>>> {
        let (end, blank) = self.close.split_at(self.close.trim_end().len());
        let mut thoughts = Vec::new();
        for Span { message, bytes } in said {
            let mut at = bytes.start;
            while let Some(open) = text[at..bytes.end].find(&self.open) {
                let inside = at + open + self.open.len();
                let Some(length) = text[inside..bytes.end].find(end) else {
                    let what = format!("a thought begins with {:?} and does not end with {end:?}", self.open);
                    return Err(spans::undecidable(&format!("message {}: {what}", message + 1)));
                };
                let close = inside + length + end.len();
                let close = close + if text[close..bytes.end].starts_with(blank) { blank.len() } else { 0 };
                thoughts.push(at + open..close);
                at = close;
            }
        }
        Ok(thoughts)
    }
}

/// What a generation prompt has behind the header of the turn: an empty thought, as a server renders it where thinking
/// is off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyThought {
    text: String,
    /// The first token of it, with which every thought begins.
    open: String,
}

impl EmptyThought {
    /// What the template's generation prompt has and a turn in training lacks.
    ///
    /// # Errors
    /// `corpus::no_empty_thought` where that is nothing, or more than an addition.
    pub fn find(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Self> {
        let greeting = spans::values(&[json!({"role": "user", "content": "Hello."})]);
        let found = Self::before(&Renderer::new(template, &serde_json::Value::Null), &greeting)?;
        let Some(text) = found.filter(|text| !text.trim().is_empty()) else {
            let message = format!(
                "{}: template.empty_thought is true, but the generation prompt has nothing that trained turns lack",
                template.info().origin
            );
            return Err(Error::new("corpus::no_empty_thought", message).help("set template.empty_thought to false"));
        };
        let first = tokenizer.encode(&text)?.offsets.first().cloned().unwrap_or_default();
        Ok(Self { open: text[first].to_string(), text })
    }

    /// What the generation prompt after `messages` has behind the header of the turn; `None` where it is not the header
    /// and something behind it.
    pub fn before(renderer: &Renderer, messages: &[Value]) -> Result<Option<String>> {
        let (Some(header), prompt) = (renderer.header(messages)?, renderer.prompt(messages)?) else { return Ok(None) };
        Ok(prompt.strip_prefix(header.as_str()).map(String::from))
    }

    /// What stands in front of the assistant's words after `messages`: it, or nothing.
    pub fn after(&self, renderer: &Renderer, messages: &[Value]) -> Result<&str> {
        let has = Self::before(renderer, messages)?.as_deref() == Some(&self.text);
        Ok(if has { &self.text } else { "" })
    }

    /// Puts it in front of the chosen turns where the generation prompt has it, into the text and between the spans; a turn that
    /// begins with a thought has its own. Where it stands now: it is given, as it is by a server, and not trained.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn insert(
        &self,
        renderer: &Renderer,
        messages: &[Value],
        chosen: &[bool],
        text: &mut String,
        said: &mut [Span],
    ) -> Result<Vec<Range<usize>>> {
        let mut inserted = Vec::new();
        // after a user's message the prompt begins the turn alike all through a conversation
        let mut after_user = None;
        let mut shift = 0;
        let mut last = None;
        for span in said {
            span.bytes = span.bytes.start + shift..span.bytes.end + shift;
            let first = last.replace(span.message) != Some(span.message);
            if !first || !chosen[span.message] || text[span.bytes.clone()].trim_start().starts_with(&self.open) {
                continue;
            }
            let before = &messages[..span.message];
            let asked =
                before.last().is_some_and(|m| m.get_attr("role").is_ok_and(|role| role.as_str() == Some("user")));
            let has = match (asked, after_user) {
                (true, Some(has)) => has,
                _ => !self.after(renderer, before)?.is_empty(),
            };
            if asked {
                after_user = Some(has);
            }
            if has {
                let (start, length) = (span.bytes.start, self.text.len());
                text.insert_str(start, &self.text);
                inserted.push(start..start + length);
                shift += length;
                span.bytes = start + length..span.bytes.end + length;
            }
        }
        Ok(inserted)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{self, encode, encoder_with, inline_template, other_encoder, trained_text};
    use super::super::{EncodeOptions, Encoder, PromptForm};
    use super::*;
    use crate::config::TrainOn;

    /// Another family: thoughts of the last turn, an empty one where it has none, and thoughts that stand in the words.
    const CHATML: &str = "{% for m in messages %}<|turn>{{ m.role }}\n\
        {% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}\
        {{ m.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}";

    const GEMMA: [&str; 3] =
        ["google-2026-05-via-forcepusher.jinja", "unsloth-gemma-4.jinja", "unsloth-gemma-4-edge.jinja"];

    fn empty_thought() -> EncodeOptions {
        EncodeOptions { empty_thought: true, ..EncodeOptions::default() }
    }

    fn without_reasoning() -> EncodeOptions {
        EncodeOptions { train_reasoning: false, ..EncodeOptions::default() }
    }

    fn gemma(name: &str, options: EncodeOptions) -> Result<Encoder> {
        let file = fixtures::path("templates").join(name);
        Encoder::open(&fixtures::path("tiny-base"), file.to_str(), 2048, options)
    }

    fn turn(role: &str, words: &str) -> serde_json::Value {
        json!({"role": role, "content": words})
    }

    /// The whole text of a conversation and the trained part of it.
    fn texts(encoder: &Encoder, messages: &serde_json::Value) -> (String, String) {
        let record = encode(encoder, &json!({"messages": messages})).unwrap();
        (encoder.tokenizer().unwrap().decode(&record.tokens.ids(), false).unwrap(), trained_text(encoder, &record))
    }

    #[test]
    fn delimiters_are_what_the_template_puts_around_a_thought() {
        for name in GEMMA {
            let found = Delimiters::find(&fixtures::template(name)).unwrap();
            assert_eq!((found.open.as_str(), found.close.as_str()), ("<|channel>thought", "<channel|>"), "{name}");
        }
        let found = Delimiters::find(&inline_template(CHATML)).unwrap();
        assert_eq!((found.open.as_str(), found.close.as_str()), ("<think>", "</think>\n\n"));
        let bare = "{% for m in messages %}{{ m.reasoning }}{{ m.content }}<turn|>{% endfor %}";
        assert_eq!(Delimiters::find(&inline_template(bare)).unwrap_err().code(), "corpus::no_thoughts");
    }

    #[test]
    fn thoughts_are_read_and_not_trained_where_that_is_asked_for() {
        let call = json!([{"id": "c", "function": {"name": "clock", "arguments": {}}}]);
        let mut calling = turn("assistant", "");
        calling["tool_calls"] = call;
        calling["reasoning"] = "Look.".into();
        let answer = json!({"role": "tool", "tool_call_id": "c", "content": "nine"});
        let messages = json!([turn("user", "Time?"), calling, answer, turn("assistant", "Nine.")]);
        let called = "<|tool_call>call:clock{}<tool_call|><|tool_response>Nine.<turn|>";
        let thought = "<|channel>thought\nLook.\n<channel|>";
        for name in GEMMA {
            let (whole, trained) = texts(&gemma(name, EncodeOptions::default()).unwrap(), &messages);
            assert_eq!(trained, format!("{thought}{called}"), "{name}");
            let (same, trained) = texts(&gemma(name, without_reasoning()).unwrap(), &messages);
            assert_eq!((same, trained.as_str()), (whole, called), "{name}");
        }
        let chatml = other_encoder(CHATML, without_reasoning(), |_| {}).unwrap();
        let mut last = turn("assistant", "Yes.");
        last["reasoning_content"] = "Well.".into();
        let inside = turn("assistant", "<think>Hm.</think>\n\nBecause.");
        let messages = json!([turn("user", "Why?"), inside, turn("user", "Sure?"), last]);
        assert_eq!(texts(&chatml, &messages).1, "Because.<turn|>Yes.<turn|>");
        let endless = json!({"messages": [turn("user", "Why?"), turn("assistant", "<think>Hm"), turn("user", "So?")]});
        let error = encode(&chatml, &endless).unwrap_err();
        assert_eq!(error.code(), "corpus::undecidable_spans");
        assert!(error.message().contains("message 2: a thought begins with \"<think>\" and does not end"), "{error}");
    }

    #[test]
    fn with_the_empty_thought_training_has_the_prompt_that_is_served() {
        let messages = json!([turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]);
        for name in [GEMMA[0], GEMMA[1]] {
            let last = EncodeOptions { train_on: TrainOn::LastTurn, ..empty_thought() };
            let encoder = gemma(name, last).unwrap();
            let (whole, trained) = texts(&encoder, &messages);
            assert_eq!(trained, "d<turn|>");
            let asked = json!(messages.as_array().unwrap()[..3]);
            let prompt = |form| {
                let ids = encoder.render_prompt(&asked, form).unwrap();
                encoder.tokenizer().unwrap().decode(&ids, false).unwrap()
            };
            assert!(whole.starts_with(&prompt(PromptForm::Generation)), "{whole}");
            assert_eq!(prompt(PromptForm::Training), prompt(PromptForm::Generation));
            assert_eq!(whole.matches("<|channel>thought\n<channel|>").count(), 1, "earlier turns have none");
            let every = gemma(name, empty_thought()).unwrap();
            let (whole, trained) = texts(&every, &messages);
            assert_eq!(trained, "b<turn|>d<turn|>");
            assert_eq!(whole.matches("<|turn>model\n<|channel>thought\n<channel|>").count(), 2);
            let all = encoder_with(EncodeOptions { train_on: TrainOn::All, ..empty_thought() });
            assert!(!texts(&all, &messages).1.contains("<|channel>"), "it is given, whatever is trained");
        }
    }

    #[test]
    fn the_empty_thought_stands_only_where_the_generation_prompt_has_it_and_no_thought_is() {
        let encoder = encoder_with(empty_thought());
        let call = json!([{"id": "c", "function": {"name": "clock", "arguments": {}}}]);
        let calling = json!({"role": "assistant", "content": "", "tool_calls": call, "reasoning": "Look."});
        let answer = json!({"role": "tool", "tool_call_id": "c", "content": "nine"});
        let messages = json!([turn("user", "Time?"), calling, answer, turn("assistant", "Nine.")]);
        let (whole, _) = texts(&encoder, &messages);
        assert!(
            !whole.contains("<|channel>thought\n<channel|>") && whole.contains("<|channel>thought\nLook."),
            "{whole}"
        );
        let twice = json!([turn("user", "Count."), turn("assistant", "One."), turn("assistant", "Two.")]);
        let (whole, trained) = texts(&encoder, &twice);
        assert_eq!(whole.matches("<|channel>").count(), 1, "{whole}");
        assert_eq!(trained, "One.<turn|>Two.<turn|>");
    }

    #[test]
    fn an_empty_thought_that_the_template_does_not_have_is_an_error() {
        let error = gemma("unsloth-gemma-4-edge.jinja", empty_thought()).err().unwrap();
        assert_eq!(error.code(), "corpus::no_empty_thought");
        assert!(error.message().contains("unsloth-gemma-4-edge.jinja"), "{error}");
    }
}
