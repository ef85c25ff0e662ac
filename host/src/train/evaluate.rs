//! Held-out loss per root, with the standard error of the paired change.

use super::batch::Batch;
use super::engine::Engine;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use serde::{Deserialize, Serialize};

/// Tokens evaluated at once; a record longer than this is a batch of its own.
const BATCH_TOKENS: usize = 4096;

/// Summed loss of one record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordLoss {
    /// Record id.
    pub id: String,
    /// Index into the corpus's roots.
    pub root: u32,
    /// Sum of the losses of its trained tokens, in nats.
    pub loss_sum: f64,
    /// Trained tokens.
    pub tokens: usize,
}

/// Losses of `records` in their order. A record's loss does not depend on the records evaluated beside it. `progress` is told
/// the records done; `stop` ends early with `None`.
///
/// # Errors
/// `model::not_finite`, naming the record.
pub fn evaluate(
    engine: &Engine,
    adapter: Option<&Adapter>,
    records: &[&Record],
    progress: &mut dyn FnMut(usize),
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<RecordLoss>>> {
    let mut out = Vec::with_capacity(records.len());
    let mut rest = records;
    while !rest.is_empty() {
        if stop() {
            return Ok(None);
        }
        let mut tokens = 0;
        let fits = rest.iter().take_while(|r| {
            tokens += r.tokens.len();
            tokens <= BATCH_TOKENS
        });
        let (now, later) = rest.split_at(fits.count().max(1));
        rest = later;
        let batch = Batch::of(now.iter().copied());
        let losses = engine.losses(adapter, &batch);
        let mut start = 0;
        for record in now {
            let span = start..start + record.tokens.len();
            start = span.end;
            if losses[span.clone()].iter().any(|l| !l.is_finite()) {
                let message = format!("the loss of record {} is not finite", record.id);
                return Err(Error::new("model::not_finite", message)
                    .expected("finite losses")
                    .help("the base or the adapter holds values that are not finite, or its files are damaged"));
            }
            out.push(RecordLoss {
                id: record.id.clone(),
                root: record.root,
                loss_sum: losses[span.clone()].iter().map(|l| f64::from(*l)).sum(),
                tokens: batch.targets[span].iter().filter(|t| **t != super::batch::IGNORED).count(),
            });
        }
        progress(out.len());
    }
    Ok(Some(out))
}

/// Change of one root's held-out loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RootChange {
    /// Root name.
    pub root: String,
    /// Records.
    pub records: usize,
    /// Trained tokens.
    pub tokens: usize,
    /// Mean loss per token before, in nats.
    pub before: f64,
    /// Mean loss per token after.
    pub after: f64,
    /// Standard error of `after - before`, records paired; none where there is one record only.
    pub standard_error: Option<f64>,
}

/// Compares two evaluations of the same records, root by root. The mean per token is a ratio of sums over records, so its
/// standard error is that of the ratio estimator (Cochran, Sampling Techniques, chapter 6).
pub fn compare(roots: &[String], before: &[RecordLoss], after: &[RecordLoss]) -> Vec<RootChange> {
    debug_assert!(before.iter().map(|r| &r.id).eq(after.iter().map(|r| &r.id)), "the same records");
    let change = |(index, root): (usize, &String)| {
        let pairs: Vec<_> = before.iter().zip(after).filter(|(b, _)| b.root as usize == index).collect();
        let tokens: usize = pairs.iter().map(|(b, _)| b.tokens).sum();
        if tokens == 0 {
            return None;
        }
        let per_token = |sum: f64| sum / tokens as f64;
        let sum = |f: &dyn Fn(&(&RecordLoss, &RecordLoss)) -> f64| pairs.iter().map(f).sum::<f64>();
        let difference = per_token(sum(&|(b, a)| a.loss_sum - b.loss_sum));
        let squares = sum(&|(b, a)| (a.loss_sum - b.loss_sum - difference * b.tokens as f64).powi(2));
        let n = pairs.len() as f64;
        let standard_error = (n > 1.0).then(|| per_token((n / (n - 1.0) * squares).sqrt()));
        Some(RootChange {
            root: root.clone(),
            records: pairs.len(),
            tokens,
            before: per_token(sum(&|(b, _)| b.loss_sum)),
            after: per_token(sum(&|(_, a)| a.loss_sum)),
            standard_error,
        })
    };
    roots.iter().enumerate().filter_map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(root: u32, loss_sum: f64, tokens: usize) -> RecordLoss {
        RecordLoss { id: String::new(), root, loss_sum, tokens }
    }

    #[test]
    fn means_are_per_token_and_the_error_is_paired() {
        let roots = ["a".to_string(), "b".into(), "empty".into()];
        let before = [loss(0, 10.0, 10), loss(0, 400.0, 100), loss(1, 3.0, 1)];
        let after = [loss(0, 5.0, 10), loss(0, 350.0, 100), loss(1, 2.0, 1)];
        let changes = compare(&roots, &before, &after);
        assert_eq!(changes.len(), 2);
        assert!((changes[0].before - 410.0 / 110.0).abs() < 1e-12);
        // Both records fall by 0.5 a token: no spread, although their levels differ.
        assert!((changes[0].after - changes[0].before + 0.5).abs() < 1e-12);
        assert!(changes[0].standard_error.unwrap() < 1e-12);
        // One record says nothing about the spread.
        assert_eq!(changes[1].standard_error, None);
    }
}
