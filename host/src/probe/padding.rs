//! What the sampler's micro-batches would waste in an engine that pads: this one computes no padding.

use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::lora::group;
use crate::plan::Source;
use crate::train::steps::Step;
use serde::Serialize;
use std::fmt::{self, Display, Formatter};

/// Micro-batches of a whole run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By planning every epoch over the encoded corpus.
    pub source: Source,
    /// The sampler.
    pub sampler: String,
    /// Optimiser steps.
    pub optimiser_steps: usize,
    /// Micro-batches in all of them.
    pub micro_batches: usize,
    /// Those whose rows are all of one length.
    pub pad_free_micro_batches: usize,
    /// Tokens of the records.
    pub tokens: usize,
    /// Tokens of the rectangles around each micro-batch's rows.
    pub padded_tokens: usize,
    /// Padding as a share of the rectangles.
    pub padding_share: f64,
    /// Width of the widest row of a micro-batch.
    pub width_tokens: Quantiles,
    /// The length limit.
    pub max_seq_len_tokens: usize,
    /// Micro-batches that are as wide as it.
    pub full_micro_batches: usize,
}

/// A distribution; each value is one that occurs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Quantiles {
    /// Half are no larger.
    pub p50: usize,
    /// Nine tenths are no larger.
    pub p90: usize,
    /// All but a hundredth are no larger.
    pub p99: usize,
    /// The largest.
    pub max: usize,
}

impl Quantiles {
    /// Of `values`, of which there is one at least.
    fn of(mut values: Vec<usize>) -> Self {
        values.sort_unstable();
        let at = |share: f64| values[((values.len() as f64 * share).ceil() as usize).clamp(1, values.len()) - 1];
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// Counts what `steps` over `records` come to.
pub fn probe(sampler: &str, steps: &[Step], records: &[Record], max_seq_len_tokens: usize) -> Report {
    let batches = || steps.iter().flat_map(|step| &step.batches);
    let sizes: Vec<(usize, usize)> = batches().map(|batch| batch.tokens(records)).collect();
    let widths: Vec<usize> = batches().zip(&sizes).map(|(batch, (_, padded))| padded / batch.rows.len()).collect();
    let (tokens, padded) = sizes.iter().fold((0, 0), |(tokens, padded), (t, p)| (tokens + t, padded + p));
    Report {
        source: Source::Measured,
        sampler: sampler.into(),
        optimiser_steps: steps.len(),
        micro_batches: sizes.len(),
        pad_free_micro_batches: sizes.iter().filter(|(tokens, padded)| tokens == padded).count(),
        tokens,
        padded_tokens: padded,
        padding_share: 1.0 - tokens as f64 / padded as f64,
        full_micro_batches: widths.iter().filter(|width| **width == max_seq_len_tokens).count(),
        width_tokens: Quantiles::of(widths),
        max_seq_len_tokens,
    }
}

impl Report {
    /// # Errors
    /// `probe::padding` where more than `most` of the rectangles is padding.
    pub fn verdict(&self, most: Option<f64>) -> Result<()> {
        let Some(most) = most.filter(|most| self.padding_share > *most) else { return Ok(()) };
        let message = format!(
            "{:.2}% of the tokens of the rectangles around the micro-batches of {} are padding",
            100.0 * self.padding_share,
            self.sampler
        );
        Err(Error::new("probe::padding", message)
            .expected(format!("{:.2}% at most", 100.0 * most))
            .help("--plugins sampler=bucket-to-pair puts records of like lengths together, sampler=packed fills rows"))
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let (share, free) = (self.padding_share, self.pad_free_micro_batches as f64 / self.micro_batches as f64);
        writeln!(out, "padding (measured), sampler {}", self.sampler)?;
        writeln!(
            out,
            "  {} micro-batches in {} steps, {:.1}% of them without padding",
            group(self.micro_batches),
            group(self.optimiser_steps),
            100.0 * free
        )?;
        writeln!(
            out,
            "  {} tokens in rectangles of {}: {:.2}% padding, which this engine does not compute",
            group(self.tokens),
            group(self.padded_tokens),
            100.0 * share
        )?;
        let Quantiles { p50, p90, p99, max } = self.width_tokens;
        write!(
            out,
            "  width of a micro-batch: p50 {}, p90 {}, p99 {}, max {} tokens; {} are as wide as data.max_seq_len, {}",
            group(p50),
            group(p90),
            group(p99),
            group(max),
            group(self.full_micro_batches),
            group(self.max_seq_len_tokens)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Tokens;
    use crate::train::steps::MicroBatch;

    #[test]
    fn padding_is_counted_by_hand() {
        let record = |n: usize| Record { id: "".into(), root: 0, tokens: Tokens::new(&vec![0; n], &vec![0; n]) };
        let records: Vec<Record> = [10, 6, 7, 5, 5].map(record).into();
        let batch = |rows: &[&[u32]]| MicroBatch { rows: rows.iter().map(|row| row.to_vec()).collect() };
        let steps = [
            Step { epoch: 0, batches: vec![batch(&[&[0], &[1]]), batch(&[&[2]])] },
            Step { epoch: 0, batches: vec![batch(&[&[3], &[4]])] },
        ];
        let report = probe("x", &steps, &records, 10);
        // rectangles of 2 x 10, 1 x 7 and 2 x 5
        assert_eq!((report.tokens, report.padded_tokens), (33, 37));
        assert_eq!((report.micro_batches, report.pad_free_micro_batches, report.full_micro_batches), (3, 2, 1));
        assert_eq!(report.width_tokens, Quantiles { p50: 7, p90: 10, p99: 10, max: 10 });
        report.verdict(None).unwrap();
        report.verdict(Some(0.11)).unwrap();
        assert_eq!(report.verdict(Some(0.1)).unwrap_err().code(), "probe::padding");
    }
}
