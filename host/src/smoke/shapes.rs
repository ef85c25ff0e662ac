//! Which shapes are worth a process of their own.

use crate::plan::memory::Shape;
use serde::{Deserialize, Serialize};

/// A shape and what it stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// `p50`, `p90`, `max` of the planned micro-batches, and `worst`: what the configuration allows. More than one where they
    /// are the same; `between` where they are two widths far apart, since two say nothing of how well a curve fits.
    pub names: Vec<String>,
    /// Rows of full width.
    #[serde(flatten)]
    pub shape: Shape,
}

/// The shapes of a plan whose micro-batches have `batch_tokens`, by their size. Rows are as many as the configuration has, and as wide
/// as their micro-batch has tokens for: this engine computes no padding.
pub fn asked(batch_tokens: &[usize], micro_batch: usize, max_seq_len: usize) -> Vec<Asked> {
    let mut sorted = batch_tokens.to_vec();
    sorted.sort_unstable();
    // the nearest rank
    let quantile = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
    // A row of one token predicts nothing.
    let width = |tokens: usize| tokens.div_ceil(micro_batch).clamp(2, max_seq_len.max(2));
    let named =
        |name: &str, seq_len_tokens| Asked { names: vec![name.into()], shape: Shape { micro_batch, seq_len_tokens } };
    let mut found: Vec<Asked> = Vec::new();
    for (name, seq_len_tokens) in [
        ("p50", width(quantile(50))),
        ("p90", width(quantile(90))),
        ("max", width(quantile(100))),
        ("worst", max_seq_len.max(2)),
    ] {
        match found.last_mut().filter(|last| last.shape.seq_len_tokens == seq_len_tokens) {
            Some(same) => same.names.push(name.into()),
            None => found.push(named(name, seq_len_tokens)),
        }
    }
    if let [narrow, wide] = &found[..] {
        let (narrow, wide) = (narrow.shape.seq_len_tokens, wide.shape.seq_len_tokens);
        if wide >= 4 * narrow {
            found.insert(1, named("between", (narrow * wide).isqrt()));
        }
    }
    found
}
