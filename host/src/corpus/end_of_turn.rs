//! The token with which a template ends an assistant's turn.

use super::spans::{mark, message};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use minijinja::Value;

/// The token with which a template ends an assistant's turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndOfTurn {
    /// Its text in the rendering.
    pub text: String,
    /// Its id.
    pub id: u32,
}

impl EndOfTurn {
    /// What `template` puts behind an assistant's words; `None` where it puts nothing but white space.
    ///
    /// # Errors
    /// `corpus::split_end_of_turn` where the tokenizer cuts it into pieces.
    pub fn find(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let messages = [message("user", "Hello."), message("assistant", &mark(0))];
        let text = template.render(&messages, &Value::from(()), false)?;
        let Some((_, after)) = text.split_once(&mark(0)) else {
            let message = format!("{}: what the assistant says is not in the rendering", template.info().origin);
            return Err(Error::new("corpus::bad_template", message));
        };
        let Some(word) = after.split_whitespace().next() else { return Ok(None) };
        let tokens = tokenizer.encode(word)?;
        let first = tokens.ids[0];
        if tokens.ids.len() == 1 || tokenizer.is_added(first) {
            return Ok(Some(Self { text: word[tokens.offsets[0].clone()].to_string(), id: first }));
        }
        let pieces: Vec<_> = tokens.ids.iter().filter_map(|&id| tokenizer.token(id)).collect();
        let message = format!(
            "{} ends an assistant's turn with {word:?}, which the tokenizer cuts into {}: {pieces:?}",
            template.info().origin,
            pieces.len()
        );
        Err(Error::new("corpus::split_end_of_turn", message)
            .expected("one token")
            .help("the template and the tokenizer are of different models"))
    }
}
