//! Held-out loss per root: its noise floor, the standard error of a paired change, and the best of several.

use super::batch::Batch;
use super::engine::Engine;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::adapter::Adapter;
use crate::model::rng::SplitMix64;
use crate::run::metrics::{HeldOutMetrics, RootMetrics, nan_from_null};
use serde::{Deserialize, Serialize};

/// Most tokens that are evaluated at once, beyond one record.
pub const MOST_TOKENS: usize = 4096;
/// Fewer make each of the base's matrices be read for little.
const LEAST_TOKENS: usize = 1024;

/// Tokens that are evaluated at once in a run whose largest micro-batch has `largest_tokens`: an evaluation, which keeps nothing for
/// a backward pass, then takes less memory than a step.
pub fn tokens_at_once(largest_tokens: usize) -> usize {
    largest_tokens.clamp(LEAST_TOKENS, MOST_TOKENS)
}

/// `records` in their order, as many together as have `most_tokens` at most; a longer one is alone.
pub fn batches<'a, 'r>(records: &'a [&'r Record], most_tokens: usize) -> impl Iterator<Item = &'a [&'r Record]> {
    let mut rest = records;
    std::iter::from_fn(move || {
        let mut tokens = 0;
        let fits = rest.iter().take_while(|record| {
            tokens += record.tokens.len();
            tokens <= most_tokens
        });
        let count = fits.count().max(1).min(rest.len());
        let (now, later) = rest.split_at(count);
        rest = later;
        (count > 0).then_some(now)
    })
}

/// Summed loss of one record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordLoss {
    /// Record id.
    pub id: String,
    /// Index into the corpus's roots.
    pub root: u32,
    /// Sum of the losses of its trained tokens, in nats.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss_sum: f64,
    /// Trained tokens.
    pub tokens: usize,
}

/// Losses of `records` in their order, also those that are no number ([`finite`]), `most_tokens` at once ([`batches`]). A record's
/// loss does not depend on the records evaluated beside it. `progress` is told the records done; `stop` ends early with `None`.
pub fn evaluate(
    engine: &Engine,
    adapter: Option<&Adapter>,
    records: &[&Record],
    most_tokens: usize,
    progress: &mut dyn FnMut(usize),
    stop: &dyn Fn() -> bool,
) -> Option<Vec<RecordLoss>> {
    let mut out = Vec::with_capacity(records.len());
    for now in batches(records, most_tokens) {
        if stop() {
            return None;
        }
        let batch = Batch::of(now.iter().copied());
        let losses = engine.losses(adapter, &batch);
        let mut start = 0;
        for record in now {
            let span = start..start + record.tokens.len();
            start = span.end;
            out.push(RecordLoss {
                id: record.id.to_string(),
                root: record.root,
                loss_sum: losses[span.clone()].iter().map(|l| f64::from(*l)).sum(),
                tokens: batch.targets[span].iter().filter(|t| **t != super::batch::IGNORED).count(),
            });
        }
        progress(out.len());
    }
    Some(out)
}

/// # Errors
/// `model::not_finite`, naming the first record whose loss is no finite number and how many there are.
pub fn finite(losses: &[RecordLoss]) -> Result<()> {
    let mut broken = losses.iter().filter(|loss| !loss.loss_sum.is_finite());
    let Some(first) = broken.next() else { return Ok(()) };
    let more = match broken.count() {
        0 => String::new(),
        more => format!(", nor is that of {more} others"),
    };
    Err(Error::new("model::not_finite", format!("the loss of record {} is not finite{more}", first.id))
        .expected("finite losses")
        .help("the base or the adapter holds values that are not finite, or its files are damaged"))
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

/// Mean loss per trained token after `step` steps, of all records and by root, each with the standard error over `resamples`
/// bootstrap resamples of its records. They are drawn from `seed` and the root's name alone, so the same records are drawn at
/// every step.
pub fn summary(step: u64, roots: &[String], losses: &[RecordLoss], resamples: u32, seed: u64) -> HeldOutMetrics {
    let all: Vec<&RecordLoss> = losses.iter().collect();
    let of_root = |(index, root): (usize, &String)| {
        let losses: Vec<&RecordLoss> = losses.iter().filter(|l| l.root as usize == index).collect();
        let trained_tokens = losses.iter().map(|l| l.tokens).sum::<usize>() as u64;
        (trained_tokens > 0).then(|| RootMetrics {
            root: root.clone(),
            records: losses.len() as u64,
            trained_tokens,
            loss: mean_loss(losses.iter().copied()),
            standard_error: bootstrap_error(
                &losses,
                resamples,
                &mut SplitMix64::new(seed, &format!("bootstrap of {root}")),
            ),
        })
    };
    HeldOutMetrics {
        step,
        loss: mean_loss(losses),
        standard_error: bootstrap_error(&all, resamples, &mut SplitMix64::new(seed, "bootstrap of all roots")),
        roots: roots.iter().enumerate().filter_map(of_root).collect(),
    }
}

fn mean_loss<'a>(losses: impl IntoIterator<Item = &'a RecordLoss>) -> f64 {
    let (sum, tokens) = losses.into_iter().fold((0.0, 0), |(sum, n), l| (sum + l.loss_sum, n + l.tokens));
    sum / tokens as f64
}

/// Standard deviation of the mean loss over resamples of the records, drawn with replacement (Efron, Bootstrap Methods, 1979).
fn bootstrap_error(losses: &[&RecordLoss], resamples: u32, rng: &mut SplitMix64) -> Option<f64> {
    let n = losses.len();
    if n < 2 || resamples < 2 {
        return None;
    }
    let mut draw = || losses[(rng.next_f64() * n as f64) as usize];
    let means: Vec<f64> = (0..resamples).map(|_| mean_loss((0..n).map(|_| draw()).collect::<Vec<_>>())).collect();
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    let squares: f64 = means.iter().map(|m| (m - mean).powi(2)).sum();
    Some((squares / (means.len() - 1) as f64).sqrt())
}

/// The best of a run's evaluations, and how many came after it. The one before training is none of them: it has no checkpoint.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Best {
    found: Option<(u64, f64)>,
    since: u32,
}

impl Best {
    /// Takes in the next evaluation; whether its loss is the lowest so far.
    pub fn take(&mut self, evaluation: &HeldOutMetrics) -> bool {
        if evaluation.step == 0 {
            return false;
        }
        let better = evaluation.loss.is_finite() && self.found.is_none_or(|(_, lowest)| evaluation.loss < lowest);
        if better {
            self.found = Some((evaluation.step, evaluation.loss));
        }
        self.since = if better { 0 } else { self.since + 1 };
        better
    }

    /// Step and loss of the best.
    pub fn found(&self) -> Option<(u64, f64)> {
        self.found
    }

    /// Evaluations since.
    pub fn since(&self) -> u32 {
        self.since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_noise_floor_is_that_of_the_mean_and_the_same_at_every_step() {
        let roots = ["a".to_string(), "b".into(), "one".into()];
        // 400 records of one token whose losses are 1 and 3: a standard deviation of 1, of the mean 1 / 20.
        let spread = |by: f64| -> Vec<RecordLoss> {
            let of = |i: u32| loss(u32::from(i >= 400), by + f64::from(1 + 2 * (i % 2)), 1);
            (0..800).map(of).chain([loss(2, 5.0, 2)]).collect()
        };
        let first = summary(3, &roots, &spread(0.0), 1000, 7);
        assert_eq!(first, summary(3, &roots, &spread(0.0), 1000, 7), "evaluating twice gives the same number");
        let error = |i: usize| first.roots[i].standard_error.unwrap();
        assert!((error(0) - 0.05).abs() < 0.005 && (error(1) - 0.05).abs() < 0.005, "{first:?}");
        assert!(error(0) != error(1), "each root is drawn for itself");
        assert!((first.standard_error.unwrap() - 0.05 / 2_f64.sqrt()).abs() < 0.004, "{first:?}");
        assert_eq!((first.roots[2].standard_error, first.roots[2].loss), (None, 2.5));
        assert!((first.loss - (1600.0 + 5.0) / 802.0).abs() < 1e-12);
        // The same records are drawn later, so that a shift of all losses changes no error.
        let later = summary(9, &roots, &spread(1.0), 1000, 7);
        assert!((later.roots[0].standard_error.unwrap() - error(0)).abs() < 1e-12);
        assert!((later.roots[0].loss - first.roots[0].loss - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_best_is_the_first_of_the_lowest_and_what_came_since_is_counted() {
        let mut best = Best::default();
        let at = |step, loss| HeldOutMetrics { step, loss, standard_error: None, roots: vec![] };
        let taken = [(0, 0.5), (2, 3.0), (4, 2.0), (6, 2.0), (8, 2.5)].map(|(step, loss)| best.take(&at(step, loss)));
        assert_eq!(taken, [false, true, true, false, false]);
        assert_eq!((best.found(), best.since()), (Some((4, 2.0)), 2));
        assert!(best.take(&at(10, 1.0)));
        assert_eq!(best.since(), 0);
    }

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
