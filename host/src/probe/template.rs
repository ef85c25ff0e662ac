//! What the run's template makes of a conversation, where its trained spans lie, and whether its special tokens are tokens.

use crate::config::{Config, Overlong};
use crate::corpus::inspect::{self, Marking};
use crate::corpus::{self, Encoder, Record, TemplateInfo};
use crate::error::{Error, Result};
use crate::model::lora::group;
use crate::plan::Source;
use serde::Serialize;
use std::fmt::{self, Display, Formatter};
use std::ops::Range;

/// Records that are looked at of each file.
const RECORDS: usize = 1;
/// Tokens of a record that are shown.
const SHOWN_TOKENS: usize = 200;

/// What a template and a tokenizer make of a corpus.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By rendering and encoding.
    pub source: Source,
    /// SHA-256 of `tokenizer.json`; null for a base that has none.
    pub tokenizer_sha256: Option<String>,
    /// The template; null where the run has none.
    pub template: Option<TemplateInfo>,
    /// Special tokens of the tokenizer, and the one that ends an assistant's turn.
    pub special_tokens: Vec<Special>,
    /// The length limit of the run.
    pub max_seq_len_tokens: usize,
    /// A conversation of two turns of the assistant, and the first record of each file.
    pub records: Vec<Shown>,
    /// Records among the first ones that are refused, and why.
    pub refused: Vec<String>,
    /// What may be wrong although it works, with codes.
    pub warnings: Vec<String>,
}

/// A special token.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Special {
    /// Its key in `tokenizer_config.json`, or `end of turn`.
    pub name: String,
    /// Its text.
    pub text: String,
    /// What the tokenizer makes of the text: one id, or it is cut into pieces.
    pub ids: Vec<u32>,
}

/// A record as the model sees it.
#[derive(Debug, Serialize)]
pub struct Shown {
    /// Its id.
    pub id: String,
    /// Its tokens, before the length limit.
    pub tokens: usize,
    /// What `data.overlong` makes of it where it is longer than `data.max_seq_len`; null where it is not.
    pub overlong: Option<Overlong>,
    /// Trained tokens within the limit.
    pub trained_tokens: usize,
    /// Ranges of tokens within the limit that are trained.
    pub trained_spans: Vec<Range<usize>>,
    /// Tokens that `text` shows, the first ones.
    pub shown_tokens: usize,
    /// Their text, trained text between `⟦` and `⟧`.
    pub text: String,
}

/// Looks at the template, the tokenizer and the sources of `config`, of which `encoder` is.
///
/// # Errors
/// Class `corpus`: what a run would refuse too.
pub fn probe(config: &Config, encoder: &Encoder) -> Result<Report> {
    if !config.template.accept_mismatch {
        encoder.require_base_template()?;
    }
    let tokenizer = encoder.tokenizer().ok();
    let mut special_tokens = Vec::new();
    for (name, text) in tokenizer.iter().flat_map(|tokenizer| tokenizer.special_tokens()) {
        special_tokens.push((name.clone(), text.clone()));
    }
    special_tokens.extend(encoder.end_of_turn().map(|end| ("end of turn".to_string(), end.text.clone())));
    let encoded = |(name, text): (String, String)| {
        let ids = encoder.tokenizer()?.encode(&text)?.ids;
        Ok(Special { name, text, ids })
    };
    let special_tokens = special_tokens.into_iter().map(encoded).collect::<Result<_>>()?;

    let (mut records, mut refused) = (Vec::new(), Vec::new());
    if encoder.template().is_some() {
        records.push(encoder.example()?);
    }
    for source in &config.data.sources {
        for record in corpus::first_records(encoder, source, RECORDS)? {
            match record {
                Ok(record) => records.push(record),
                Err(error) => refused.push(error.message().to_string()),
            }
        }
    }
    let shown = |record: &Record| {
        let limit = config.data.max_seq_len;
        let trained: Vec<bool> = record.tokens.trained().take(limit).collect();
        let mut shown = record.clone();
        shown.tokens.truncate(trained.len().min(SHOWN_TOKENS));
        let text = inspect::text(tokenizer, &shown, Marking::Brackets)?;
        Ok(Shown {
            id: record.id.to_string(),
            tokens: record.tokens.len(),
            overlong: (record.tokens.len() > limit).then_some(config.data.overlong),
            trained_tokens: record.trained_within(limit),
            trained_spans: spans(&trained),
            shown_tokens: shown.tokens.len(),
            text: text.split_once('\n').map_or(text.clone(), |(_, body)| body.into()),
        })
    };
    Ok(Report {
        source: Source::Measured,
        tokenizer_sha256: tokenizer.map(|tokenizer| tokenizer.sha256().into()),
        template: encoder.template().map(|template| template.info().clone()),
        special_tokens,
        max_seq_len_tokens: config.data.max_seq_len,
        records: records.iter().map(shown).collect::<Result<_>>()?,
        refused,
        warnings: encoder.warnings()?,
    })
}

/// Where `trained` is true.
fn spans(trained: &[bool]) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    for at in (0..trained.len()).filter(|at| trained[*at]) {
        match spans.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => spans.push(at..at + 1),
        }
    }
    spans
}

impl Report {
    /// # Errors
    /// `probe::template` for a special token that the tokenizer cuts into pieces.
    pub fn verdict(&self) -> Result<()> {
        let Some(Special { name, text, ids }) = self.special_tokens.iter().find(|special| special.ids.len() != 1)
        else {
            return Ok(());
        };
        let message = format!("{name} {text:?} becomes the ids {ids:?}");
        Err(Error::new("probe::template", message)
            .expected("one id")
            .help("the tokenizer is of another model, or lost its added tokens: take the one published with the base"))
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        match &self.template {
            None => writeln!(out, "template (measured)  none: data.template is not set")?,
            Some(template) => {
                let of = match (&template.base_sha256, template.differs_from_base()) {
                    (None, _) => "the base ships none",
                    (_, false) => "the base's own",
                    (_, true) => "not the one that the base ships",
                };
                writeln!(out, "template (measured)  {}, sha256 {}, {of}", template.origin, template.sha256)?;
            }
        }
        for Special { name, text, ids } in &self.special_tokens {
            let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
            writeln!(out, "  {name:<20} {text:<24} {}", ids.join(", "))?;
        }
        writeln!(out, "records, trained text between ⟦ and ⟧")?;
        for record in &self.records {
            let Shown { id, tokens, overlong, trained_tokens, trained_spans, shown_tokens, text } = record;
            let spans: Vec<String> = trained_spans.iter().map(|s| format!("{}..{}", s.start, s.end)).collect();
            write!(out, "\n{id}: {} tokens", group(*tokens))?;
            let within = match overlong {
                None => *tokens,
                Some(overlong) => {
                    let (limit, word) = (group(self.max_seq_len_tokens), serde_json::json!(overlong));
                    write!(out, ", over data.max_seq_len, {limit} (data.overlong = {word}); in the first {limit}")?;
                    self.max_seq_len_tokens
                }
            };
            writeln!(out, ", {} trained: {}\n{}", group(*trained_tokens), spans.join(", "), text.trim_end())?;
            if *shown_tokens < within {
                writeln!(out, "... and {} tokens more: tunehost corpus inspect", group(within - shown_tokens))?;
            }
        }
        self.refused.iter().try_for_each(|why| writeln!(out, "\nrefused, and not trained: {why}"))?;
        self.warnings.iter().try_for_each(|warning| write!(out, "\nwarning: {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_the_runs_of_trained_tokens() {
        assert_eq!(spans(&[false, true, true, false, true]), [1..3, 4..5]);
        assert!(spans(&[]).is_empty());
    }

    #[test]
    fn a_special_token_in_pieces_is_named() {
        let mut report = Report {
            source: Source::Measured,
            tokenizer_sha256: None,
            template: None,
            max_seq_len_tokens: 8,
            special_tokens: vec![Special { name: "eos_token".into(), text: "<eos>".into(), ids: vec![1] }],
            records: vec![],
            refused: vec![],
            warnings: vec![],
        };
        report.verdict().unwrap();
        report.special_tokens[0].ids = vec![60, 61, 62];
        let error = report.verdict().unwrap_err();
        assert_eq!(error.code(), "probe::template");
        assert!(error.message().contains("eos_token \"<eos>\" becomes the ids [60, 61, 62]"), "{error}");
    }
}
