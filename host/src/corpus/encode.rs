//! Records to tokens and labels.

use super::cache::{ENCODE_VERSION, Identity};
use super::chat::{ChatRenderer, PromptForm, Rendered};
use super::checks;
use super::end_of_turn::EndOfTurn;
use super::options::EncodeOptions;
use super::reader::{self, Chat, Content, RawRecord};
use super::spans;
use super::template::ChatTemplate;
use super::tokenizer::{Encoded, Tokenizer};
use super::tokens::Tokens;
use crate::error::{Error, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The label of a token that is not trained.
pub const NOT_TRAINED: i32 = -100;

/// One record as the model sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Unique in the corpus.
    pub id: Arc<str>,
    /// Index into the corpus' roots.
    pub root: u32,
    /// Its tokens. Labels are unshifted: position `t - 1` predicts `labels[t]`. The first token has nothing before it and
    /// is never trained.
    pub tokens: Tokens,
}

impl Record {
    /// How many of the first `limit` tokens are trained.
    pub fn trained_within(&self, limit: usize) -> usize {
        self.tokens.trained().take(limit).filter(|&trained| trained).count()
    }

    /// How many tokens are trained.
    pub fn trained_tokens(&self) -> usize {
        self.tokens.trained().filter(|&trained| trained).count()
    }
}

/// Tokenizer and template of a run.
pub struct Encoder {
    tokenizer: Option<Tokenizer>,
    chat: Option<ChatRenderer>,
    base: String,
    vocab_size: usize,
    options: EncodeOptions,
}

impl Encoder {
    /// Opens the tokenizer of the folder `base` and the template that `template` names (a path, or the word `base`), and
    /// checks them against each other. A base without `tokenizer.json` can still read `input_ids`. `vocab_size` is the
    /// number of rows in the model's embedding.
    ///
    /// # Errors
    /// `corpus::bad_tokenizer`, `corpus::tokenizer_mismatch`, `corpus::no_tokenizer`, `corpus::no_template`, `corpus::bad_template`,
    /// `corpus::split_turn_token`, `corpus::double_bos`, and those of a template that cannot be read.
    pub fn open(base: &Path, template: Option<&str>, vocab_size: usize, options: EncodeOptions) -> Result<Self> {
        let tokenizer = Tokenizer::open(base)?;
        let base_name = base.display().to_string();
        // Added tokens may lie beyond: those of towers that a text model was published without.
        if let Some(bound) = tokenizer.as_ref().map(Tokenizer::vocabulary_bound).filter(|&bound| bound > vocab_size) {
            let message = format!(
                "{base_name}: tokenizer.json has ids up to {}, the model's embedding has {vocab_size} rows",
                bound - 1
            );
            return Err(Error::new("corpus::tokenizer_mismatch", message)
                .help("the tokenizer is of another model: take the tokenizer.json that was published with this one"));
        }
        let mut encoder = Self { tokenizer, chat: None, base: base_name, vocab_size, options };
        if let Some(choice) = template {
            let tokenizer = encoder.tokenizer()?;
            let template = ChatTemplate::open(choice, base, tokenizer, options.now)?;
            let chat = ChatRenderer::new(template, tokenizer, options)?;
            checks::turn_tokens(chat.template(), tokenizer)?;
            encoder.chat = Some(chat);
            encoder.render_prompt(&greeting(), PromptForm::Training)?;
        }
        Ok(encoder)
    }

    /// Refuses a template that is not the one the base ships.
    ///
    /// # Errors
    /// `corpus::template_mismatch` with both hashes.
    pub fn require_base_template(&self) -> Result<()> {
        let Some(info) = self.template().map(ChatTemplate::info).filter(|info| info.differs_from_base()) else {
            return Ok(());
        };
        let shipped = info.base_sha256.as_deref().unwrap_or_default();
        let message = format!(
            "{} (sha256 {}) is not the template that {} ships (sha256 {shipped})",
            info.origin, info.sha256, self.base
        );
        Err(Error::new("corpus::template_mismatch", message).help(
            "set data.template to \"base\", or template.accept_mismatch to true to train with this one and serve with it",
        ))
    }

    /// The base's tokenizer.
    ///
    /// # Errors
    /// `corpus::no_tokenizer`.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| {
            Error::new("corpus::no_tokenizer", format!("{} has no tokenizer.json", self.base))
                .help("put the tokenizer.json there that was published with the model; without it records can only be `input_ids`")
        })
    }

    /// Rows of the model's embedding.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The base's folder, as it was named.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The chat template, if the run has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.chat.as_ref().map(ChatRenderer::template)
    }

    /// What decides, beside tokenizer and template, which tokens and labels a record becomes.
    pub fn options(&self) -> EncodeOptions {
        self.options
    }

    /// The token that ends an assistant's turn, where there is a template and it has one.
    pub fn end_of_turn(&self) -> Option<&EndOfTurn> {
        self.chat.as_ref().and_then(ChatRenderer::end_of_turn)
    }

    /// Whether the record has a thought that the template does not print.
    pub(super) fn leaves_out_thoughts(&self, content: &Content) -> bool {
        match (content, &self.chat) {
            (Content::Chat(chat), Some(renderer)) => renderer.leaves_out_thoughts(chat),
            _ => false,
        }
    }

    /// The tokens of a conversation whose next turn is the assistant's. `messages` is the list that a record's
    /// `messages` would be.
    pub fn render_prompt(&self, messages: &serde_json::Value, form: PromptForm) -> Result<Vec<u32>> {
        let chat = reader::chat("prompt", messages.clone(), serde_json::Value::Null)?;
        let text = self.prompt_text(&chat, form)?;
        Ok(self.encode_rendering(&text)?.ids)
    }

    /// The text of that prompt.
    pub(super) fn prompt_text(&self, chat: &Chat, form: PromptForm) -> Result<String> {
        self.require_chat()?.prompt(chat, form)
    }

    /// The record's tokens and labels at full length.
    ///
    /// # Errors
    /// All name `path`, the line and the record: `corpus::no_template`, `corpus::template_failed`, `corpus::double_bos`,
    /// `corpus::undecidable_spans`, `corpus::bad_choice`, `corpus::token_out_of_range`.
    pub fn encode(&self, path: &Path, root: u32, raw: &RawRecord) -> Result<Record> {
        self.record(path, root, raw, self.tokens(&raw.content))
    }

    /// The record with what [`Encoder::tokens`] made of its content, now or earlier.
    ///
    /// # Errors
    /// As [`Encoder::encode`].
    pub(super) fn record(&self, path: &Path, root: u32, raw: &RawRecord, tokens: Result<Tokens>) -> Result<Record> {
        let place = format!("{}:{}: record {:?}", path.display(), raw.line, raw.id);
        let tokens = tokens.map_err(|e| e.at(&place))?;
        if let Some(id) = tokens.ids().into_iter().find(|&id| id as usize >= self.vocab_size) {
            let message = format!("{place}: token {id} is beyond the model's vocabulary of {}", self.vocab_size);
            return Err(Error::new("corpus::token_out_of_range", message)
                .help("the tokenizer, or the one that made `input_ids`, is of another model"));
        }
        Ok(Record { id: raw.id.as_str().into(), root, tokens })
    }

    /// The tokens of `content` at full length. They depend on it and on [`Encoder::identity`] alone.
    pub(super) fn tokens(&self, content: &Content) -> Result<Tokens> {
        let (ids, mut labels) = match content {
            Content::Chat(chat) => self.labelled(self.require_chat()?.render(chat)?)?,
            Content::Text(text) => {
                let tokenizer = self.tokenizer()?;
                let mut ids = tokenizer.encode(text)?.ids;
                if let Some(bos) = tokenizer.text_bos().filter(|bos| ids.first() != Some(bos)) {
                    ids.insert(0, bos);
                }
                let labels = ids.iter().map(|&id| id as i32).collect();
                (ids, labels)
            }
            Content::Completion { prompt, completion } => self.completion(prompt, completion)?,
            Content::Tokens { ids, labels } => {
                let all = || ids.iter().map(|&id| id as i32).collect();
                (ids.clone(), labels.clone().unwrap_or_else(all))
            }
        };
        forget_first(&mut labels);
        Ok(Tokens::new(&ids, &labels))
    }

    /// Everything besides a record's content that decides its tokens; `None` without a tokenizer.
    pub(super) fn identity(&self) -> Option<Identity> {
        self.tokenizer.as_ref().map(|tokenizer| Identity {
            encode_version: ENCODE_VERSION,
            tokenizer_sha256: tokenizer.sha256().to_string(),
            special_tokens: tokenizer.special_tokens().clone(),
            text_bos: tokenizer.text_bos(),
            template_sha256: self.template().map(|template| template.info().sha256.clone()),
            options: serde_json::to_value(self.options).expect("options are names and numbers"),
        })
    }

    /// The two are tokenised apart, as they will be when the model continues the prompt; the eos token follows them.
    fn completion(&self, prompt: &str, completion: &str) -> Result<(Vec<u32>, Vec<i32>)> {
        let tokenizer = self.tokenizer()?;
        let mut ids = tokenizer.encode(prompt)?.ids;
        if let Some(bos) = tokenizer.text_bos().filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        let mut labels = vec![NOT_TRAINED; ids.len()];
        let mut trained = tokenizer.encode(completion)?.ids;
        let silent = trained.is_empty();
        trained.extend(tokenizer.special_id("eos_token").filter(|eos| !silent && trained.last() != Some(eos)));
        labels.extend(trained.iter().map(|&id| id as i32));
        ids.extend(trained);
        Ok((ids, labels))
    }

    /// A part of a conversation, trained as `chosen` says of its messages.
    ///
    /// # Errors
    /// `corpus::template_failed`, `corpus::undecidable_spans`, `corpus::double_bos`.
    pub(super) fn encode_part(&self, chat: &Chat, chosen: &[bool], id: String, root: u32) -> Result<Record> {
        let (ids, mut labels) = self.labelled(self.require_chat()?.render_chosen(chat, chosen)?)?;
        forget_first(&mut labels);
        Ok(Record { id: id.into(), root, tokens: Tokens::new(&ids, &labels) })
    }

    fn labelled(&self, rendered: Rendered) -> Result<(Vec<u32>, Vec<i32>)> {
        let Rendered { text, trained } = rendered;
        let Encoded { ids, offsets } = self.encode_rendering(&text)?;
        let mut labels = vec![NOT_TRAINED; ids.len()];
        for bytes in trained {
            let tokens = tokens_within(&offsets, &bytes);
            if !covers(&offsets[tokens.clone()], &bytes, &text) {
                return Err(spans::undecidable(&format!("tokens reach across an end of {:?}", &text[bytes])));
            }
            let said = &text[offsets[tokens.start].start..offsets[tokens.end - 1].end];
            let decoded = self.tokenizer()?.decode(&ids[tokens.clone()], false)?;
            // a decoder may leave out a space in front, and gives what the normaliser made
            let same = |a: &str, b: &str| a.trim_start() == b.trim_start();
            let normalized = |text| self.tokenizer()?.normalized(text);
            if !same(&decoded, said) && !same(&normalized(&decoded)?, &normalized(said)?) {
                return Err(spans::undecidable(&format!("the tokens of {said:?} decode to {decoded:?}")));
            }
            for t in tokens {
                labels[t] = ids[t] as i32;
            }
        }
        Ok((ids, labels))
    }

    /// A rendering's tokens, with exactly one bos token in front where the template or the tokenizer puts one.
    fn encode_rendering(&self, text: &str) -> Result<Encoded> {
        let tokenizer = self.tokenizer()?;
        let mut encoded = tokenizer.encode(text)?;
        let Some(bos) = tokenizer.special_id("bos_token") else { return Ok(encoded) };
        match encoded.ids.iter().take_while(|&&id| id == bos).count() {
            0 if tokenizer.adds_bos() => {
                encoded.ids.insert(0, bos);
                encoded.offsets.insert(0, 0..0);
            }
            0 | 1 => {}
            n => {
                let message = format!("the rendering begins with {n} bos tokens");
                return Err(Error::new("corpus::double_bos", message).expected("one"));
            }
        }
        Ok(encoded)
    }

    fn require_chat(&self) -> Result<&ChatRenderer> {
        self.chat.as_ref().ok_or_else(|| {
            Error::new("corpus::no_template", "the records have `messages`, and no chat template is named")
                .help("set `data.template` to a template file, or to \"base\" for the one the base ships")
        })
    }
}

/// Nothing stands before the first token that could predict it.
fn forget_first(labels: &mut [i32]) {
    if let Some(first) = labels.first_mut() {
        *first = NOT_TRAINED;
    }
}

/// A conversation that every template renders.
pub(super) fn greeting() -> serde_json::Value {
    serde_json::json!([{"role": "user", "content": "Hello."}])
}

/// The tokens that lie within `span`, both ends included. A token that also covers text outside is not one of them.
fn tokens_within(offsets: &[Range<usize>], span: &Range<usize>) -> Range<usize> {
    let first = offsets.partition_point(|token| token.start < span.start);
    let last = offsets.partition_point(|token| token.end <= span.end);
    first..last.max(first)
}

/// Whether `tokens`, which lie within `span`, leave out nothing of it but white space that is joined to what stands beside.
fn covers(tokens: &[Range<usize>], span: &Range<usize>, text: &str) -> bool {
    let (Some(first), Some(last)) = (tokens.first(), tokens.last()) else { return false };
    let blank = |range: Range<usize>| text.get(range).is_some_and(|text| text.trim().is_empty());
    blank(span.start..first.start) && blank(last.end..span.end)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{
        self, BaseFiles, VOCABULARY, encode, encoder, encoder_with, other_encoder, trained_text,
    };
    use super::*;
    use crate::config::TrainOn;
    use serde_json::{Value, json};

    #[test]
    fn ids_and_labels_equal_those_made_part_by_part_in_python() {
        let encoder = encoder();
        let golden = fixtures::json("corpus/golden-tokens.json");
        for row in golden.as_array().unwrap() {
            let record = encode(&encoder, &row["record"]).unwrap();
            assert_eq!(json!(record.tokens.ids()), row["input_ids"], "{}", record.id);
            assert_eq!(json!(record.tokens.labels()), row["labels"], "{}", record.id);
        }
        assert!(golden.as_array().unwrap().len() >= 20);
    }

    #[test]
    fn what_is_trained_decodes_back_to_what_the_assistant_says() {
        let encoder = encoder();
        let said = "¿Qué? 你好 🙂  tabs\tand\n\nlines e\u{301}";
        let messages = json!([{"role": "user", "content": "你好"}, {"role": "assistant", "content": said}]);
        let record = encode(&encoder, &json!({"messages": messages})).unwrap();
        assert_eq!(trained_text(&encoder, &record), format!("{said}<turn|>"));
        let last = record.tokens.len() - 1;
        assert_eq!(
            (record.tokens.labels()[last - 1], record.tokens.labels()[last]),
            (6, NOT_TRAINED),
            "the newline is not trained"
        );
    }

    #[test]
    fn offsets_cover_the_text_without_a_gap() {
        let text = "<bos><|turn>user\n  a  b 你🙂e\u{301}\u{10FFFF}<turn|>\n";
        let encoded = encoder().tokenizer().unwrap().encode(text).unwrap();
        let mut end = 0;
        for (range, id) in encoded.offsets.iter().zip(&encoded.ids) {
            assert!(range.start <= end && range.end >= end, "token {id} at {range:?} after {end}");
            end = range.end;
        }
        assert_eq!(end, text.len());
        assert_eq!(encoder().tokenizer().unwrap().decode(&encoded.ids, false).unwrap(), text);
    }

    #[test]
    fn a_span_is_covered_but_for_white_space_in_a_token_with_its_neighbour() {
        let text = "ab\n\ncd";
        let within = |tokens: &[Range<usize>], span: Range<usize>| {
            let found = tokens_within(tokens, &span);
            (found.clone(), covers(&tokens[found], &span, text))
        };
        assert_eq!(within(&[0..2, 2..3, 3..4, 4..6], 3..6), (2..4, true));
        assert_eq!(within(&[0..2, 2..4, 4..6], 3..6), (2..3, true));
        assert_eq!(within(&[0..2, 2..5, 5..6], 3..6), (2..3, false));
        assert_eq!(within(&[0..4, 4..6], 0..3), (0..0, false));
    }

    #[test]
    fn row_6_there_is_one_bos_token() {
        let adds_bos = |base: &mut BaseFiles| {
            base.tokenizer["post_processor"] = json!({"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}});
        };
        let turns = "{% for m in messages %}<|turn>{{ m.content }}<turn|>\n{% endfor %}";
        let messages = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        for template in [turns.to_string(), format!("{{{{ bos_token }}}}{turns}")] {
            let encoder = other_encoder(&template, EncodeOptions::default(), adds_bos).unwrap();
            let record = encode(&encoder, &messages).unwrap();
            assert_eq!(record.tokens.ids().into_iter().filter(|&id| id == 2).count(), 1);
            assert_eq!(record.tokens.ids()[0], 2);
            assert_eq!(trained_text(&encoder, &record), "b<turn|>");
        }
        let text = encode(&encoder(), &json!({"text": "<bos>a"})).unwrap();
        assert_eq!(text.tokens, encode(&encoder(), &json!({"text": "a"})).unwrap().tokens);
        let error = other_encoder(&format!("{{{{ bos_token }}}}<bos>{turns}"), EncodeOptions::default(), adds_bos)
            .err()
            .unwrap();
        assert_eq!(error.code(), "corpus::double_bos");
    }

    #[test]
    fn row_11_lengths_are_those_of_the_encoded_record() {
        let messages = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
        let record = encode(&encoder(), &messages).unwrap();
        let text = encoder().tokenizer().unwrap().decode(&record.tokens.ids(), false).unwrap();
        assert_eq!(text, "<bos><|turn>user\na<turn|>\n<|turn>model\nb<turn|>\n");
        assert_eq!(record.tokens.labels().len(), record.tokens.len());
        assert_eq!(record.trained_tokens(), 2);
    }

    #[test]
    fn the_first_token_is_never_trained() {
        for record in
            [json!({"text": "a b c"}), json!({"input_ids": [7, 8, 9]}), json!({"input_ids": [7, 8], "labels": [7, 8]})]
        {
            let record = encode(&encoder(), &record).unwrap();
            assert_eq!(record.tokens.labels()[0], NOT_TRAINED);
            assert!(
                record.tokens.labels()[1..]
                    .iter()
                    .zip(&record.tokens.ids()[1..])
                    .all(|(&label, &id)| label == id as i32)
            );
        }
    }

    #[test]
    fn a_token_beyond_the_vocabulary_names_the_record() {
        let error = encode(&encoder(), &json!({"id": "far", "input_ids": [5, 2048]})).unwrap_err();
        assert_eq!(error.code(), "corpus::token_out_of_range");
        assert!(error.message().contains("talk.jsonl:1: record \"far\": token 2048"), "{error}");
        let error =
            Encoder::open(&fixtures::path("tiny-base"), Some("base"), 1000, EncodeOptions::default()).err().unwrap();
        assert_eq!(error.code(), "corpus::tokenizer_mismatch");
        assert!(error.message().contains("ids up to 2047") && error.message().contains("1000 rows"), "{error}");
    }

    #[test]
    fn what_is_trained_can_be_chosen() {
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]);
        let trained = |messages: &Value, train_on| {
            let encoder = encoder_with(EncodeOptions { train_on, ..EncodeOptions::default() });
            trained_text(&encoder, &encode(&encoder, &json!({"messages": messages})).unwrap())
        };
        assert_eq!(trained(&messages, TrainOn::Assistant), "b<turn|>d<turn|>");
        assert_eq!(trained(&messages, TrainOn::LastTurn), "d<turn|>");
        let all = "<|turn>user\na<turn|>\n<|turn>model\nb<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\nd<turn|>\n";
        assert_eq!(trained(&messages, TrainOn::All), all);
        let mut chosen = messages.clone();
        chosen[1]["weight"] = 0.into();
        assert_eq!(trained(&chosen, TrainOn::Assistant), "d<turn|>");
        assert_eq!(trained(&chosen, TrainOn::All), all.replace("b<turn|>", ""));
        chosen[1]["weight"] = 1.into();
        assert_eq!(trained(&chosen, TrainOn::LastTurn), "b<turn|>d<turn|>");
    }

    #[test]
    fn a_template_that_prints_the_date_prints_the_configured_one() {
        let source = "{% for m in messages %}{{ m.content }}<turn|>{% endfor %}{{ strftime_now('%d/%m/%Y %H:%M') }}";
        let text = |now: &str| {
            let options = EncodeOptions { now: now.parse().unwrap(), ..EncodeOptions::default() };
            let encoder = other_encoder(source, options, |_| {}).unwrap();
            assert!(encoder.warnings().unwrap().iter().any(|w| w.contains(&format!("which is {now} for every"))));
            let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
            let record = encode(&encoder, &json!({"messages": messages})).unwrap();
            encoder.tokenizer().unwrap().decode(&record.tokens.ids(), false).unwrap()
        };
        assert!(text("2026-01-01").ends_with("01/01/2026 00:00"));
        assert!(text("2024-02-29T18:30:00").ends_with("29/02/2024 18:30"));
    }

    #[test]
    fn messages_need_a_template_that_the_run_chose() {
        let encoder = Encoder::open(&fixtures::path("tiny-base"), None, VOCABULARY, EncodeOptions::default()).unwrap();
        let error = encode(&encoder, &json!({"messages": [{"role": "user", "content": "a"}]})).unwrap_err();
        assert_eq!(error.code(), "corpus::no_template");
        assert!(error.to_string().contains("a template file, or to \"base\""), "{error}");
        assert!(encode(&encoder, &json!({"text": "a"})).is_ok());
    }

    #[test]
    fn a_base_without_a_tokenizer_reads_token_ids_alone() {
        let folder = tempfile::tempdir().unwrap();
        let encoder = Encoder::open(folder.path(), None, 100, EncodeOptions::default()).unwrap();
        assert_eq!(encode(&encoder, &json!({"input_ids": [1, 2]})).unwrap().tokens.ids(), [1, 2]);
        assert_eq!(encode(&encoder, &json!({"text": "a"})).unwrap_err().code(), "corpus::no_tokenizer");
    }

    #[test]
    fn prompts_come_as_servers_render_them_and_as_training_does() {
        let encoder = encoder();
        let messages = json!([{"role": "user", "content": "Hello?"}]);
        let text = |form| {
            let ids = encoder.render_prompt(&messages, form).unwrap();
            encoder.tokenizer().unwrap().decode(&ids, false).unwrap()
        };
        let training = "<bos><|turn>user\nHello?<turn|>\n<|turn>model\n";
        assert_eq!(text(PromptForm::Training), training);
        assert_eq!(text(PromptForm::Generation), format!("{training}<|channel>thought\n<channel|>"));
        let warnings = encoder.warnings().unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("<|channel>thought"), "{warnings:?}");
    }
}
