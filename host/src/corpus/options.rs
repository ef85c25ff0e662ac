//! What decides, beside tokenizer and template, which tokens and labels a record becomes.

use super::moment::Moment;
use crate::config::{DataConfig, TemplateConfig, TrainOn};
use serde::Serialize;

/// Everything in a configuration that changes a record's tokens or labels at full length. The encoder takes nothing else of
/// a configuration, so that whoever keeps encodings keeps them by this, the tokenizer and the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EncodeOptions {
    /// What of a conversation is trained.
    pub train_on: TrainOn,
    /// What a template is told when it asks for the date.
    pub now: Moment,
    /// Whether what the assistant thinks is trained with what it says.
    pub train_reasoning: bool,
    /// Whether `{% generation %}` blocks of a template say what the assistant says.
    pub generation_blocks: bool,
    /// Whether trained turns begin with the empty thought of the generation prompt.
    pub empty_thought: bool,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            train_on: TrainOn::default(),
            now: Moment::default(),
            train_reasoning: true,
            generation_blocks: true,
            empty_thought: false,
        }
    }
}

impl EncodeOptions {
    /// As a configuration has them.
    pub fn of(data: &DataConfig, template: &TemplateConfig) -> Self {
        let DataConfig { train_on, train_reasoning, .. } = *data;
        let TemplateConfig { accept_mismatch: _, now, generation_blocks, empty_thought } = *template;
        Self { train_on, now, train_reasoning, generation_blocks, empty_thought }
    }
}
