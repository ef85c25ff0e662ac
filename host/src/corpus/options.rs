//! What decides, beside tokenizer and template, which tokens and labels a record becomes.

use super::moment::Moment;
use crate::config::{DataConfig, TemplateConfig, TrainOn};
use serde::Serialize;

/// Everything in a configuration that changes a record's tokens or labels at full length. The encoder takes nothing else of
/// a configuration, so that whoever keeps encodings keeps them by this, the tokenizer and the template.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct EncodeOptions {
    /// What of a conversation is trained.
    pub train_on: TrainOn,
    /// What a template is told when it asks for the date.
    pub now: Moment,
}

impl EncodeOptions {
    /// As a configuration has them.
    pub fn of(data: &DataConfig, template: &TemplateConfig) -> Self {
        Self { train_on: data.train_on, now: template.now }
    }
}
