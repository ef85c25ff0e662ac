//! An epoch's plan, and the check that a sampler kept to the rules of `wit/sampler.wit`.

use std::ops::Range;

use super::reference::Identity;
use crate::config::Config;
use crate::error::{Error, Result};

/// What a sampler is asked to lay out.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
    /// Tokens of each record `[records]`.
    pub lengths: &'a [u32],
    /// Root of each record `[records]`.
    pub roots: &'a [u32],
    /// Counted from 0.
    pub epoch: u32,
    /// The sampler's only source of randomness.
    pub seed: u64,
    /// Most tokens in a row.
    pub max_seq_len: u32,
    /// Most rows in a micro-batch.
    pub rows_per_batch: u32,
    /// Micro-batches per optimiser step.
    pub accumulation: u32,
    /// Most tokens in a micro-batch, padding counted.
    pub token_budget: Option<u32>,
}

impl<'a> PlanRequest<'a> {
    /// What a run of `config` asks for `epoch`, for records of these lengths and roots.
    pub fn configured(config: &Config, lengths: &'a [u32], roots: &'a [u32], epoch: u32) -> Self {
        Self {
            lengths,
            roots,
            epoch,
            seed: config.train.seed,
            max_seq_len: config.data.max_seq_len as u32,
            rows_per_batch: config.train.micro_batch,
            accumulation: config.train.accumulation,
            token_budget: None,
        }
    }
}

/// One epoch in flat columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Record indices in training order.
    pub records: Vec<u32>,
    /// Where each row ends in `records`.
    pub row_ends: Vec<u32>,
    /// Where each micro-batch ends in `row_ends`.
    pub batch_ends: Vec<u32>,
    /// Records left out of this epoch.
    pub dropped: Vec<u32>,
}

impl Plan {
    /// The micro-batches in order; each is its rows, each row its records.
    pub fn batches(&self) -> impl ExactSizeIterator<Item = impl ExactSizeIterator<Item = &[u32]> + Clone> {
        ranges(&self.batch_ends).map(|rows| rows.map(|row| &self.records[range(&self.row_ends, row)]))
    }

    /// Check the plan against what was asked, so that everything after it may index without looking.
    ///
    /// # Errors
    /// `plugin::invalid_plan` names the plugin, the first record, row or micro-batch that breaks a rule, and the rule.
    pub(super) fn check(&self, request: &PlanRequest, identity: &Identity) -> Result<()> {
        let invalid = |what: String, expected: String| {
            Error::new("plugin::invalid_plan", format!("{identity}: plan: {what}"))
                .expected(expected)
                .help("this is a bug in the plugin: use another sampler, or tell its author")
        };
        check_ends("row-ends", &self.row_ends, "records", self.records.len(), &invalid)?;
        check_ends("batch-ends", &self.batch_ends, "row-ends", self.row_ends.len(), &invalid)?;
        self.check_coverage(request, &invalid)?;
        self.check_sizes(request, &invalid)
    }

    fn check_coverage(&self, request: &PlanRequest, invalid: &impl Fn(String, String) -> Error) -> Result<()> {
        let count = request.lengths.len();
        let mut seen = vec![false; count];
        for (column, records) in [("records", &self.records), ("dropped", &self.dropped)] {
            for (at, &record) in records.iter().enumerate() {
                match seen.get_mut(record as usize) {
                    Some(seen) if !*seen => *seen = true,
                    Some(_) => {
                        let what = format!("{column}[{at}] is record {record}, which was there before");
                        return Err(invalid(what, "each record once".into()));
                    }
                    None => {
                        let what = format!("{column}[{at}] is record {record}, which does not exist");
                        return Err(invalid(what, format!("a record below {count}")));
                    }
                }
            }
        }
        if let Some(record) = seen.iter().position(|seen| !seen) {
            let missing = seen.iter().filter(|seen| !**seen).count();
            let what = format!("record {record} is missing ({missing} of {count} records are)");
            return Err(invalid(what, "each record planned once or declared dropped".into()));
        }
        Ok(())
    }

    fn check_sizes(&self, request: &PlanRequest, invalid: &impl Fn(String, String) -> Error) -> Result<()> {
        let row_tokens =
            |row: &[u32]| row.iter().map(|&record| u64::from(request.lengths[record as usize])).sum::<u64>();
        for (batch, rows) in self.batches().enumerate() {
            let (count, mut widest) = (rows.len(), 0);
            for row in rows.clone() {
                let tokens = row_tokens(row);
                if tokens > u64::from(request.max_seq_len) {
                    let what = format!("the row of record {} in micro-batch {batch} has {tokens} tokens", row[0]);
                    return Err(invalid(what, format!("at most {} tokens (max_seq_len)", request.max_seq_len)));
                }
                widest = widest.max(tokens);
            }
            let from = || rows.clone().next().map_or(0, |row| row[0]);
            if count > request.rows_per_batch as usize {
                let what = format!("micro-batch {batch}, from record {}, has {count} rows", from());
                return Err(invalid(what, format!("at most {} rows", request.rows_per_batch)));
            }
            let padded = widest * count as u64;
            if let Some(budget) = request.token_budget.filter(|&budget| padded > u64::from(budget)) {
                let what = format!("micro-batch {batch}, from record {}, has {padded} tokens with padding", from());
                return Err(invalid(what, format!("at most {budget} (the token budget)")));
            }
        }
        Ok(())
    }
}

/// Ends must rise from above 0 to the length of the column they point into.
fn check_ends(
    name: &str,
    ends: &[u32],
    into: &str,
    length: usize,
    invalid: &impl Fn(String, String) -> Error,
) -> Result<()> {
    let mut before = 0;
    for (at, &end) in ends.iter().enumerate() {
        if end <= before {
            return Err(invalid(format!("{name}[{at}] is {end}"), format!("more than the {before} before it")));
        }
        before = end;
    }
    if before as usize != length {
        return Err(invalid(format!("{name} ends at {before}"), format!("{length}, the length of {into}")));
    }
    Ok(())
}

/// Where element `at` of a column of ends begins and ends.
fn range(ends: &[u32], at: usize) -> Range<usize> {
    let start = if at == 0 { 0 } else { ends[at - 1] as usize };
    start..ends[at] as usize
}

fn ranges(ends: &[u32]) -> impl ExactSizeIterator<Item = Range<usize>> {
    (0..ends.len()).map(|at| range(ends, at))
}
