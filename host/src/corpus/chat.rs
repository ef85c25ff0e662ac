//! A conversation as text, and which of the text is trained.

use super::blocks;
use super::choice;
use super::end_of_turn::EndOfTurn;
use super::options::EncodeOptions;
use super::reader::Chat;
use super::spans::{self, Renderer, Span};
use super::template::ChatTemplate;
use super::thoughts::{Delimiters, EmptyThought};
use super::tokenizer::Tokenizer;
use super::unshown::Shown;
use crate::config::TrainOn;
use crate::error::Result;
use minijinja::Value;
use std::ops::Range;

/// A template, and what is known of it before it renders a record.
pub struct ChatRenderer {
    template: ChatTemplate,
    end_of_turn: Option<EndOfTurn>,
    /// What goes in front of trained turns.
    empty_thought: Option<EmptyThought>,
    /// What stands around thoughts, where these are not trained.
    thoughts: Option<Delimiters>,
    shown: Shown,
    options: EncodeOptions,
}

/// Which prompt a conversation gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// The template's generation prompt, as servers render it.
    Generation,
    /// What stands in front of an assistant's words in training, without what only the generation prompt has.
    Training,
}

/// A conversation's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// As the model reads it.
    pub text: String,
    /// The trained bytes of it: ascending, apart, none empty.
    pub trained: Vec<Range<usize>>,
}

impl ChatRenderer {
    /// Looks at what `template` does with a conversation of two messages, and at what the options ask of it.
    ///
    /// # Errors
    /// `corpus::bad_template`, `corpus::split_end_of_turn`, `corpus::no_empty_thought`, `corpus::no_thoughts`,
    /// `corpus::untrained_end_of_turn`, `corpus::bad_generation_block`.
    pub fn new(template: ChatTemplate, tokenizer: &Tokenizer, options: EncodeOptions) -> Result<Self> {
        let end_of_turn = EndOfTurn::find(&template, tokenizer)?;
        let empty_thought = if options.empty_thought { Some(EmptyThought::find(&template, tokenizer)?) } else { None };
        let thoughts = if options.train_reasoning { None } else { Some(Delimiters::find(&template)?) };
        if options.generation_blocks {
            blocks::check(&template, end_of_turn.as_ref(), tokenizer)?;
        }
        let shown = Shown::find(&template)?;
        Ok(Self { template, end_of_turn, empty_thought, thoughts, shown, options })
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The token that ends an assistant's turn, where the template has one.
    pub fn end_of_turn(&self) -> Option<&EndOfTurn> {
        self.end_of_turn.as_ref()
    }

    /// Whether the conversation has a thought that the template does not print.
    pub fn leaves_out_thoughts(&self, chat: &Chat) -> bool {
        self.shown.leaves_out(chat)
    }

    /// The text of a conversation whose next turn is the assistant's, up to what it says.
    ///
    /// # Errors
    /// `corpus::template_failed`; `corpus::undecidable_spans` where the template renders no turn of the assistant here.
    pub fn prompt(&self, chat: &Chat, form: PromptForm) -> Result<String> {
        let (renderer, messages) = (Renderer::new(&self.template, &chat.tools), spans::values(&chat.messages));
        let header = match form {
            PromptForm::Generation => return renderer.prompt(&messages),
            PromptForm::Training => renderer.header(&messages)?,
        };
        let header = header.ok_or_else(|| spans::undecidable("the template renders no assistant turn here"))?;
        Ok(match &self.empty_thought {
            Some(empty) => header + empty.after(&renderer, &messages)?,
            None => header,
        })
    }

    /// The conversation, trained as the configuration and its messages say.
    ///
    /// # Errors
    /// `corpus::template_failed`, `corpus::bad_choice`, `corpus::undecidable_spans`.
    pub fn render(&self, chat: &Chat) -> Result<Rendered> {
        let (chat, chosen) = choice::choose(chat, self.options.train_on)?;
        self.render_chosen(&chat, &chosen)
    }

    /// The conversation; what `chosen` says of each message is trained.
    ///
    /// # Errors
    /// `corpus::template_failed`, `corpus::undecidable_spans`.
    pub fn render_chosen(&self, chat: &Chat, chosen: &[bool]) -> Result<Rendered> {
        let (messages, tools) = (spans::values(&chat.messages), Value::from_serialize(&chat.tools));
        let mut text = self.template.render(&messages, &tools, false)?;
        let all = self.options.train_on == TrainOn::All;
        let plain = self.empty_thought.is_none() && self.thoughts.is_none();
        if all && plain && chat.trained_from == 0 && chosen.iter().all(|&chosen| chosen) {
            let whole = 0..text.len();
            return Ok(Rendered { text, trained: subtract(vec![whole], &[]) });
        }
        let mut said = spans::of_assistant(&self.template, self.end_of_turn.as_ref(), chat, &text)?;
        if self.options.generation_blocks && self.template.info().has_generation_blocks {
            let blocks = self.template.generation_blocks(&messages, &tools, &text)?;
            said = blocks::honoured(blocks, &said, self.end_of_turn.as_ref(), &text)?;
        }
        // nothing is put into what is given: none of its messages is chosen
        let given = if all { spans::given(&self.template, chat, &text)? } else { 0 };
        let mut holes = Vec::new();
        if let Some(empty) = &self.empty_thought {
            let renderer = Renderer::new(&self.template, &chat.tools);
            holes = empty.insert(&renderer, &messages, chosen, &mut text, &mut said)?;
        }
        let (trained, untrained): (Vec<Span>, Vec<Span>) = said.into_iter().partition(|span| chosen[span.message]);
        let bytes = |spans: &[Span]| spans.iter().map(|span| span.bytes.clone()).collect::<Vec<_>>();
        if let Some(thoughts) = &self.thoughts {
            holes.extend(thoughts.within(&text, &trained)?);
        }
        holes.extend(bytes(&untrained));
        holes.sort_unstable_by_key(|hole| hole.start);
        let whole = given..text.len();
        let trained = if all { vec![whole] } else { bytes(&trained) };
        Ok(Rendered { trained: subtract(trained, &holes), text })
    }
}

/// `ranges` without `holes`; both ascend.
fn subtract(ranges: Vec<Range<usize>>, holes: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut left = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut start = range.start;
        for hole in holes.iter().filter(|hole| hole.start < range.end && hole.end > range.start) {
            left.push(start..hole.start.max(start));
            start = hole.end.max(start);
        }
        left.push(start..range.end.max(start));
    }
    left.retain(|range| !range.is_empty());
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_cut_out_of_what_is_trained() {
        assert_eq!(subtract(vec![0..10, 12..20], &[]), [0..10, 12..20]);
        assert_eq!(subtract(vec![0..10, 12..20], &[0..2, 4..5, 9..13, 18..30]), [2..4, 5..9, 13..18]);
        assert!(subtract(vec![3..4, 5..5], &[2..5, 5..6]).is_empty());
    }
}
