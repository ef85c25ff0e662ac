//! `{% generation %}` blocks of a template: what it says itself that the assistant says.

use super::end_of_turn::EndOfTurn;
use super::reader;
use super::spans::{self, Span};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use minijinja::Value;
use serde_json::json;
use std::ops::Range;

/// The blocks in place of `said`, what was found to be the assistant's without them: a block holds what one message says, and
/// white space beside it. One that holds the end of a turn alone is left out: a turn without words trains nothing.
///
/// # Errors
/// `corpus::undecidable_spans` for a block that holds more, or what several messages say.
pub fn honoured(blocks: Vec<Range<usize>>, said: &[Span], end: Option<&EndOfTurn>, whole: &str) -> Result<Vec<Span>> {
    let silent = |text: &str| text.is_empty() || end.is_some_and(|end| end.text == text);
    let mut spans = Vec::with_capacity(blocks.len());
    for block in blocks.into_iter().filter(|block| !silent(whole[block.clone()].trim())) {
        let refuse = |what: &str| {
            let message = format!("the generation block {:?} {what}", &whole[block.clone()]);
            Error::new("corpus::undecidable_spans", message)
                .help("template.generation_blocks = false goes without them")
        };
        let inside: Vec<&Span> =
            said.iter().filter(|s| s.bytes.start < block.end && s.bytes.end > block.start).collect();
        let Some(message) = inside.first().map(|span| span.message) else {
            return Err(refuse("holds nothing that the assistant says"));
        };
        if inside.iter().any(|span| span.message != message) {
            return Err(refuse("holds what several messages say"));
        }
        let (mut at, mut gaps) = (block.start, Vec::new());
        for span in inside {
            gaps.push(at..span.bytes.start.max(at));
            at = span.bytes.end.min(block.end);
        }
        gaps.push(at..block.end);
        if let Some(beside) = gaps.into_iter().map(|gap| whole[gap].trim()).find(|beside| !beside.is_empty()) {
            return Err(refuse(&format!("holds {beside:?}, which the assistant does not say")));
        }
        spans.push(Span { message, bytes: block });
    }
    Ok(spans)
}

/// Looks at the blocks of a short conversation, so that a template whose blocks cannot be used is known before any record.
///
/// # Errors
/// `corpus::bad_generation_block` where a block holds what the assistant does not say; `corpus::untrained_end_of_turn` where none
/// holds the token that ends its turn, and that is not the eos token either.
pub fn check(template: &ChatTemplate, end: Option<&EndOfTurn>, tokenizer: &Tokenizer) -> Result<()> {
    if !template.info().has_generation_blocks {
        return Ok(());
    }
    let origin = &template.info().origin;
    let messages = json!([{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]);
    let chat = reader::chat("probe", messages, json!(null))?;
    let (messages, tools) = (spans::values(&chat.messages), Value::from(()));
    let whole = template.render(&messages, &tools, false)?;
    let said = spans::of_assistant(template, end, &chat, &whole)?;
    let blocks = template.generation_blocks(&messages, &tools, &whole)?;
    let found = honoured(blocks, &said, end, &whole).map_err(|error| {
        Error::new("corpus::bad_generation_block", format!("{origin}: {}", error.message()))
            .expected("blocks around what the assistant says and the token that ends its turn")
            .help(
                "correct the template, or set template.generation_blocks to false to find what is trained without them",
            )
    })?;
    let Some(end) = end.filter(|end| tokenizer.special_id("eos_token") != Some(end.id)) else { return Ok(()) };
    if found.iter().any(|span| whole[span.bytes.clone()].contains(&end.text)) {
        return Ok(());
    }
    let message = format!(
        "{origin}: no generation block holds {}, which ends the assistant's turns and is not the eos token: a model \
         trained so learns no end",
        end.text
    );
    Err(Error::new("corpus::untrained_end_of_turn", message)
        .help("put it into the block, or set template.generation_blocks to false to train it with every turn"))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{self, BaseFiles, VOCABULARY, encode, other_encoder, trained_text};
    use super::super::{EncodeOptions, Encoder};
    use super::*;
    use crate::config::TrainOn;

    /// Gemma's turns with a block that holds `before`, the words and `after`; the end of turn follows where it is in neither.
    fn template(before: &str, after: &str) -> String {
        let block = format!("{{% generation %}}{before}{{{{ m.content }}}}{after}{{% endgeneration %}}");
        let end = if after.is_empty() { "<turn|>\n" } else { "" };
        format!(
            "{{% for m in messages %}}{{% if m.role == 'assistant' %}}<|turn>model\n{block}{end}\
             {{% else %}}<|turn>user\n{{{{ m.content }}}}<turn|>\n{{% endif %}}{{% endfor %}}"
        )
    }

    #[test]
    fn ids_and_trained_tokens_are_those_of_hugging_faces_assistant_mask() {
        let file = fixtures::path("templates/generation-blocks.jinja");
        let (base, options) = (fixtures::path("tiny-base"), EncodeOptions::default());
        let encoder = Encoder::open(&base, file.to_str(), VOCABULARY, options).unwrap();
        let conversations = fixtures::json("templates/golden.json")["conversations"].clone();
        let golden = fixtures::json("templates/mask-golden.json");
        let mut compared = 0;
        for row in golden.as_array().unwrap() {
            let found = conversations.as_array().unwrap().iter().find(|c| c["name"] == row["conversation"]).unwrap();
            let record = encode(&encoder, &json!({"messages": found["messages"], "tools": found["tools"]})).unwrap();
            assert_eq!(json!(record.tokens.ids()), row["input_ids"], "{}", row["conversation"]);
            let trained = record.tokens.trained().map(u32::from);
            let trained: Vec<u32> = trained.collect();
            if row["conversation"] == "empty words" {
                assert_eq!(trained.iter().sum::<u32>(), 0, "a turn without words trains nothing, also not its end");
                continue;
            }
            assert_eq!(json!(trained), row["assistant_masks"], "{}", row["conversation"]);
            compared += 1;
        }
        assert_eq!(compared, 19);
    }

    #[test]
    fn what_is_trained_of_the_blocks_can_be_chosen() {
        let turn = |role: &str, words: &str| json!({"role": role, "content": words});
        let mut messages =
            json!([turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]);
        let trained = |messages: &serde_json::Value, options| {
            let encoder = other_encoder(&template("", "<turn|>\n"), options, |_| {}).unwrap();
            trained_text(&encoder, &encode(&encoder, &json!({"messages": messages})).unwrap())
        };
        let options = EncodeOptions::default();
        assert_eq!(trained(&messages, options), "b<turn|>\nd<turn|>\n");
        let last = EncodeOptions { train_on: TrainOn::LastTurn, ..options };
        assert_eq!(trained(&messages, last), "d<turn|>\n");
        let without = EncodeOptions { generation_blocks: false, ..options };
        assert_eq!(trained(&messages, without), "b<turn|>d<turn|>", "the newline is not what the assistant says");
        messages[3]["train"] = false.into();
        assert_eq!(trained(&messages, options), "b<turn|>\n");
    }

    #[test]
    fn blocks_that_hold_what_the_assistant_does_not_say_are_known_before_any_record() {
        let open = |source: &str| other_encoder(source, EncodeOptions::default(), |_| {}).err().unwrap();
        let inverted = "{% for m in messages %}{% if m.role == 'user' %}{% generation %}{{ m.content }}<turn|>\
                        {% endgeneration %}{% else %}{{ m.content }}<turn|>{% endif %}\n{% endfor %}";
        for (source, part) in [
            (template("Well: ", "<turn|>"), "holds \"Well:\", which the assistant does not say"),
            (inverted.to_string(), "holds nothing that the assistant says"),
        ] {
            let error = open(&source);
            assert_eq!(error.code(), "corpus::bad_generation_block");
            assert!(error.message().contains(part), "{error}");
            assert!(error.to_string().contains("template.generation_blocks"), "{error}");
        }
        let joined =
            "{% generation %}{% for m in messages %}<|turn>{{ m.content }}<turn|>{% endfor %}{% endgeneration %}";
        assert_eq!(open(joined).code(), "corpus::bad_generation_block");
        let mangled = "{% for m in messages %}{% set x %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}\
                       {{ x | trim }}<turn|>{% endfor %}";
        assert!(open(mangled).message().contains("works on what its generation blocks print"));
    }

    #[test]
    fn row_1_a_block_without_the_end_of_turn_is_an_error_unless_that_is_eos() {
        let without_end = template("", "");
        let open = |change: fn(&mut BaseFiles), options| other_encoder(&without_end, options, change);
        // the tiny base's eos token is the end of turn
        assert!(open(|_| {}, EncodeOptions::default()).is_ok());
        let other_eos: fn(&mut BaseFiles) = |base| base.tokenizer_config["eos_token"] = "<eos>".into();
        let error = open(other_eos, EncodeOptions::default()).err().unwrap();
        assert_eq!(error.code(), "corpus::untrained_end_of_turn");
        assert!(error.message().contains("<turn|>"), "{error}");
        let ignored = EncodeOptions { generation_blocks: false, ..EncodeOptions::default() };
        let encoder = open(other_eos, ignored).unwrap();
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        assert_eq!(trained_text(&encoder, &encode(&encoder, &json!({"messages": messages})).unwrap()), "b<turn|>");
    }
}
