//! A record as a person reads it: its text, and which of it is trained.

use super::encode::Record;
use super::tokenizer::Tokenizer;
use crate::error::Result;
use std::fmt::Write;

/// How a terminal tells trained text from the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marking {
    /// Trained text is bold and green, the rest is faint.
    Colour,
    /// Trained text stands between `⟦` and `⟧`.
    Brackets,
}

/// The record for a terminal: a line with its id and its numbers, then its text. Control characters are spelled out, so
/// that a record cannot steer the terminal.
/// Without a tokenizer tokens are shown as their ids.
pub fn text(tokenizer: Option<&Tokenizer>, record: &Record, marking: Marking) -> Result<String> {
    let mut text = format!("{}\n", headline(record));
    let (ids, trained): (_, Vec<bool>) = (record.tokens.ids(), record.tokens.trained().collect());
    let mut start = 0;
    while start < ids.len() {
        let end = (start..ids.len()).find(|&t| trained[t] != trained[start]).unwrap_or(ids.len());
        let run = printable(&piece(tokenizer, &ids[start..end])?);
        let (open, close) = match (marking, trained[start]) {
            (Marking::Colour, true) => ("\x1b[1;32m", "\x1b[0m"),
            (Marking::Colour, false) => ("\x1b[2m", "\x1b[0m"),
            (Marking::Brackets, true) => ("⟦", "⟧"),
            (Marking::Brackets, false) => ("", ""),
        };
        let _ = write!(text, "{open}{run}{close}");
        start = end;
    }
    text.push('\n');
    Ok(text)
}

/// The records as one HTML page without scripts: each token an element that names its id.
pub fn html(tokenizer: Option<&Tokenizer>, records: &[Record]) -> Result<String> {
    let mut page = String::from(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>tunehost corpus inspect</title>\n<style>\n\
         pre { white-space: pre-wrap; font: 14px/1.6 monospace; color: #666 }\n\
         b { font-weight: normal; color: #000; background: #b7ecc0 }\n\
         b, i { font-style: normal; outline: 1px solid #0001 }\n</style>\n\
         <p>Tokens on green are trained, the others are not.</p>\n",
    );
    for record in records {
        let _ = write!(page, "<h3>{}</h3>\n<pre>", escaped(&headline(record)));
        for (id, trained) in record.tokens.ids().into_iter().zip(record.tokens.trained()) {
            let decoded = piece(tokenizer, &[id])?;
            // a part of a character is shown as the vocabulary spells it
            let spelled = tokenizer.filter(|_| decoded.contains('\u{FFFD}')).and_then(|tokenizer| tokenizer.token(id));
            let token = escaped(&printable(&spelled.unwrap_or(decoded)));
            let tag = if trained { 'b' } else { 'i' };
            let _ = write!(page, "<{tag} title=\"{id}\">{token}</{tag}>");
        }
        page.push_str("</pre>\n");
    }
    Ok(page)
}

fn headline(record: &Record) -> String {
    format!("{}: {} tokens, {} trained", printable(&record.id), record.tokens.len(), record.trained_tokens())
}

fn piece(tokenizer: Option<&Tokenizer>, ids: &[u32]) -> Result<String> {
    match tokenizer {
        Some(tokenizer) => tokenizer.decode(ids, false),
        None => Ok(ids.iter().map(|id| format!("{id} ")).collect()),
    }
}

fn printable(text: &str) -> String {
    let spell = |c: char| match c {
        '\n' | '\t' => c.to_string(),
        c if c.is_control() => c.escape_unicode().to_string(),
        c => c.to_string(),
    };
    text.chars().map(spell).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::{NOT_TRAINED, Tokens, fixtures};
    use super::*;

    fn record() -> (Tokenizer, Record) {
        let tokenizer = Tokenizer::open(&fixtures::path("tiny-base")).unwrap().unwrap();
        let ids = tokenizer.encode("<|turn>model\nOh <b>\u{1b}[2J\u{10FFFF}<turn|>\n").unwrap().ids;
        let mut labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let said = ids.len() - 1;
        labels[..3].fill(NOT_TRAINED);
        labels[said] = NOT_TRAINED;
        (tokenizer, Record { id: "a".into(), root: 0, tokens: Tokens::new(&ids, &labels) })
    }

    #[test]
    fn trained_text_is_marked_and_cannot_steer_the_terminal() {
        let (tokenizer, record) = record();
        let shown = text(Some(&tokenizer), &record, Marking::Brackets).unwrap();
        let counts = format!("a: {} tokens, {} trained\n", record.tokens.len(), record.trained_tokens());
        assert_eq!(shown, counts + "<|turn>model\n⟦Oh <b>\\u{1b}[2J\u{10FFFF}<turn|>⟧\n\n");
        let coloured = text(Some(&tokenizer), &record, Marking::Colour).unwrap();
        assert!(coloured.contains("\x1b[2m<|turn>model\n\x1b[0m\x1b[1;32mOh <b>\\u{1b}[2J"), "{coloured:?}");
        let ids = Record { tokens: Tokens::new(&[7, 8], &[NOT_TRAINED, 8]), ..record };
        assert!(text(None, &ids, Marking::Brackets).unwrap().ends_with("\n7 ⟦8 ⟧\n"));
    }

    #[test]
    fn a_page_has_an_element_for_each_token_and_no_markup_of_the_record() {
        let (tokenizer, record) = record();
        let page = html(Some(&tokenizer), std::slice::from_ref(&record)).unwrap();
        assert_eq!(page.matches(" title=\"").count(), record.tokens.len());
        assert_eq!(page.matches("<b title=\"").count(), record.trained_tokens());
        assert!(page.contains(">&lt;turn|&gt;</b>") && !page.contains("<b>"), "{page}");
        assert!(!page.contains('\u{FFFD}'), "bytes of a character are spelled");
    }
}
