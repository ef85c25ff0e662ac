//! Template, tokenizer and special tokens, held against each other before anything is trained.

use super::chat::PromptForm;
use super::encode::{Encoder, Record, greeting};
use super::reader::{self, Content};
use super::spans;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use minijinja::Value;
use regex::Regex;
use serde_json::json;
use std::path::Path;

/// Looks for markup between the messages of a short conversation, such as `<|turn>`, that is no token.
///
/// # Errors
/// `corpus::split_turn_token` with the pieces.
pub fn turn_tokens(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<()> {
    let messages = [("user", 0), ("assistant", 1), ("user", 2)];
    let messages = messages.map(|(role, turn)| json!({"role": role, "content": spans::mark(turn)}));
    let text = template.render(&spans::values(&messages), &Value::from(()), false)?;
    let markup = Regex::new(r"</?\|?\w+\|?>").expect("the pattern is a constant");
    let between = |from: usize| {
        let (_, after) = text.split_once(&spans::mark(from))?;
        after.split_once(&spans::mark(from + 1)).map(|(between, _)| between)
    };
    for found in [0, 1].into_iter().filter_map(between).flat_map(|between| markup.find_iter(between)) {
        let ids = tokenizer.encode(found.as_str())?.ids;
        if ids.len() != 1 {
            let pieces: Vec<_> = ids.iter().filter_map(|&id| tokenizer.token(id)).collect();
            let message = format!(
                "{} puts {} between messages, which the tokenizer cuts into {}: {pieces:?}",
                template.info().origin,
                found.as_str(),
                pieces.len()
            );
            return Err(Error::new("corpus::split_turn_token", message)
                .expected("one token")
                .help("the template and the tokenizer are of different models"));
        }
    }
    Ok(())
}

impl Encoder {
    /// What may be wrong with the tokenizer and the template although they work; each one a code and a sentence.
    ///
    /// # Errors
    /// `corpus::bad_json` for a broken `generation_config.json`.
    pub fn warnings(&self) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        let mut warn = |code: &str, text: String| warnings.push(format!("{text} [corpus::{code}]"));
        let Ok(tokenizer) = self.tokenizer() else { return Ok(warnings) };
        let (bound, vocab_size) = (tokenizer.id_bound(), self.vocab_size());
        if bound > vocab_size {
            let text = format!("the tokenizer knows ids up to {}, the model's vocabulary has {vocab_size}", bound - 1);
            warn("tokens_beyond_vocabulary", text);
        }
        let pad = tokenizer.special_id("pad_token");
        let eos = tokenizer.special_id("eos_token");
        if pad.is_some() && pad == eos {
            let text = "the pad token is also the eos token: other tools that mask padding will not train it";
            warn("pad_is_eos", text.into());
        }
        let Some(template) = self.template() else { return Ok(warnings) };
        let origin = &template.info().origin;
        if template.info().differs_from_base() {
            let text = format!("{origin} is not the template the base ships: serve with the one trained with");
            warn("template_mismatch", text);
        }
        if let Some(now) = template.info().now {
            let text = format!("{origin} prints the date, which is {now} for every record: template.now");
            warn("template_prints_date", text);
        }
        match self.end_of_turn() {
            None => warn(
                "no_end_of_turn",
                format!("{origin} ends an assistant's turn with no token: the model learns no end"),
            ),
            Some(end) => {
                if pad == Some(end.id) && pad != eos {
                    let text = format!("the pad token is also {}, which ends a turn and is trained", end.text);
                    warn("pad_is_end_of_turn", text);
                }
                if eos != Some(end.id) && !self.stops()?.contains(&end.id.into()) {
                    let text = format!(
                        "{origin} ends turns with {}, which is trained, but is neither the eos token nor in \
                         generation_config.json: servers will not stop there",
                        end.text
                    );
                    warn("end_of_turn_is_no_eos", text);
                }
            }
        }
        let chat = reader::chat("prompt", greeting(), serde_json::Value::Null)?;
        let (training, generation) =
            (self.prompt_text(&chat, PromptForm::Training)?, self.prompt_text(&chat, PromptForm::Generation)?);
        match generation.strip_prefix(training.as_str()) {
            Some("") => {}
            Some(extra) => {
                let text = format!(
                    "{origin}: the generation prompt ends in {extra:?}, which no trained turn begins with; \
                     template.empty_thought = true trains with it"
                );
                warn("prompt_mismatch", text);
            }
            None => {
                warn("prompt_mismatch", format!("{origin}: the generation prompt is not how a trained turn begins"));
            }
        }
        Ok(warnings)
    }

    /// A short conversation with two turns of the assistant, as a run would train it.
    ///
    /// # Errors
    /// `corpus::no_template` and those of a template that cannot render it.
    pub fn example(&self) -> Result<Record> {
        let turns =
            [("user", "Hello."), ("assistant", "Good morning."), ("user", "Thank you."), ("assistant", "Gladly.")];
        let messages: Vec<_> = turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        let chat = reader::chat("example", messages.into(), serde_json::Value::Null)?;
        let tokens = self.tokens(&Content::Chat(chat)).map_err(|e| e.at("a conversation of two turns"))?;
        Ok(Record { id: "a conversation of two turns".into(), root: 0, tokens })
    }

    /// The tokens at which servers stop, as the base's `generation_config.json` has them.
    fn stops(&self) -> Result<Vec<serde_json::Value>> {
        let config = super::read_json(&Path::new(self.base()).join("generation_config.json"))?.unwrap_or_default();
        Ok(match &config["eos_token_id"] {
            serde_json::Value::Array(list) => list.clone(),
            other => vec![other.clone()],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::EncodeOptions;
    use super::super::fixtures::{
        self, BaseFiles, VOCABULARY, encode, encoder, encoder_with, other_encoder, trained_text,
    };
    use super::*;

    fn warnings(template: &str, change: impl FnOnce(&mut BaseFiles)) -> String {
        other_encoder(template, EncodeOptions::default(), change).unwrap().warnings().unwrap().join("\n")
    }

    /// Each message between two pieces of markup.
    fn turns(open: &str, close: &str) -> String {
        format!("{{% for m in messages %}}{open}{{{{ m.role }}}}\n{{{{ m.content }}}}{close}\n{{% endfor %}}")
    }

    #[test]
    fn turn_tokens_in_pieces_are_an_error_that_shows_them() {
        let error = |open: &str, close: &str| {
            other_encoder(&turns(open, close), EncodeOptions::default(), |_| {}).err().unwrap()
        };
        let opening = error("<start_of_turn>", "<turn|>");
        assert_eq!(opening.code(), "corpus::split_turn_token");
        assert!(opening.message().contains("puts <start_of_turn> between messages"), "{opening}");
        let closing = error("<|turn>", "<end_of_turn>");
        assert_eq!(closing.code(), "corpus::split_end_of_turn");
        assert!(closing.message().contains("\"<end_of_turn>\""), "{closing}");
    }

    #[test]
    fn row_1_an_end_of_turn_at_which_servers_do_not_stop_is_trained_and_told() {
        let template = turns("<|turn>", "<turn|>");
        let eos_elsewhere = |base: &mut BaseFiles| {
            base.tokenizer_config["eos_token"] = "<eos>".into();
            base.generation_config["eos_token_id"] = 1.into();
        };
        let told = warnings(&template, eos_elsewhere);
        assert!(told.contains("ends turns with <turn|>") && told.contains("[corpus::end_of_turn_is_no_eos]"), "{told}");
        let encoder = other_encoder(&template, EncodeOptions::default(), eos_elsewhere).unwrap();
        let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        assert_eq!(trained_text(&encoder, &encode(&encoder, &json!({"messages": messages})).unwrap()), "b<turn|>");
        let no_end = warnings(&turns("<|turn>", ""), |_| {});
        assert!(no_end.contains("[corpus::no_end_of_turn]"), "{no_end}");
    }

    #[test]
    fn a_pad_that_is_eos_or_ends_turns_is_told() {
        let template = turns("<|turn>", "<turn|>");
        let pad = |eos: &str| {
            let eos = eos.to_string();
            warnings(&template, |base| {
                base.tokenizer_config["pad_token"] = "<turn|>".into();
                base.tokenizer_config["eos_token"] = eos.into();
            })
        };
        assert!(pad("<turn|>").contains("[corpus::pad_is_eos]"));
        let ends_turns = pad("<eos>");
        assert!(
            ends_turns.contains("[corpus::pad_is_end_of_turn]") && !ends_turns.contains("pad_is_eos"),
            "{ends_turns}"
        );
        assert!(!warnings(&template, |_| {}).contains("pad"));
    }

    #[test]
    fn a_date_and_a_prompt_that_training_does_not_have_are_told() {
        let template = "{{ '<pad>' if add_generation_prompt else bos_token }}{% for m in messages %}{{ m.content }}<mask>\
                        {% endfor %}{{ strftime_now('%Y') }}";
        let told = warnings(template, |_| {});
        for code in ["end_of_turn_is_no_eos", "template_prints_date", "prompt_mismatch"] {
            assert!(told.contains(&format!("[corpus::{code}]")), "{code}: {told}");
        }
    }

    #[test]
    fn a_template_that_the_base_does_not_ship_is_refused_with_both_hashes() {
        let stale = fixtures::path("templates/forcepusher-gemma4.jinja");
        let base = fixtures::path("tiny-base");
        let stale = Encoder::open(&base, stale.to_str(), VOCABULARY, EncodeOptions::default()).unwrap();
        assert!(stale.warnings().unwrap()[0].contains("not the template the base ships"));
        let error = stale.require_base_template().unwrap_err();
        assert_eq!(error.code(), "corpus::template_mismatch");
        let info = stale.template().unwrap().info();
        assert!(error.message().contains(&info.sha256), "{error}");
        assert!(error.message().contains(info.base_sha256.as_ref().unwrap()), "{error}");
        encoder().require_base_template().unwrap();
    }

    #[test]
    fn the_empty_thought_of_gemmas_larger_models_is_told_until_it_is_trained_with() {
        let told = encoder().warnings().unwrap();
        assert!(
            told.len() == 1 && told[0].contains("<|channel>thought") && told[0].contains("empty_thought"),
            "{told:?}"
        );
        let with = encoder_with(EncodeOptions { empty_thought: true, ..EncodeOptions::default() });
        assert!(with.warnings().unwrap().is_empty(), "{:?}", with.warnings());
    }
}
