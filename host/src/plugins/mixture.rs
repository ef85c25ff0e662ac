//! What a plan costs in padding, and how well it mixes.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Value, json};

use super::{Plan, PlanRequest};

/// The figures of one epoch's plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Micro-batches in the epoch.
    pub micro_batches: usize,
    /// Accumulation windows: optimiser steps of the epoch.
    pub windows: usize,
    /// Records left out.
    pub dropped: usize,
    /// Tokens of the records.
    pub tokens: u64,
    /// Tokens of the rectangles around each micro-batch's rows.
    pub padded_tokens: u64,
    /// Micro-batches whose rows are all of one length.
    pub pad_free: usize,
    /// Mean number of roots in an accumulation window.
    pub roots_per_window: f64,
}

impl Mixture {
    /// Measure a plan that answered `request`.
    pub fn of(plan: &Plan, request: &PlanRequest) -> Self {
        let (mut tokens, mut padded_tokens, mut pad_free) = (0, 0, 0);
        let mut roots_of_batches = Vec::with_capacity(plan.batch_ends.len());
        for rows in plan.batches() {
            let (mut sum, mut widest, mut roots) = (0, 0, BTreeSet::new());
            for row in rows.clone() {
                let width: u64 = row.iter().map(|&record| u64::from(request.lengths[record as usize])).sum();
                sum += width;
                widest = widest.max(width);
                roots.extend(row.iter().map(|&record| request.roots[record as usize]));
            }
            let rectangle = widest * rows.len() as u64;
            tokens += sum;
            padded_tokens += rectangle;
            pad_free += usize::from(sum == rectangle);
            roots_of_batches.push(roots);
        }
        let windows = roots_of_batches.chunks(request.accumulation.max(1) as usize);
        let count = windows.len();
        let roots: usize = windows.map(|window| window.iter().flatten().collect::<BTreeSet<_>>().len()).sum();
        Self {
            micro_batches: plan.batch_ends.len(),
            windows: count,
            dropped: plan.dropped.len(),
            tokens,
            padded_tokens,
            pad_free,
            roots_per_window: roots as f64 / count.max(1) as f64,
        }
    }

    /// Padding as a share of the rectangles' tokens.
    pub fn padding_waste(&self) -> f64 {
        1.0 - self.tokens as f64 / self.padded_tokens.max(1) as f64
    }

    /// Share of micro-batches without padding.
    pub fn pad_free_share(&self) -> f64 {
        self.pad_free as f64 / self.micro_batches.max(1) as f64
    }

    /// As a JSON object.
    pub fn json(&self) -> Value {
        json!({
            "micro_batches": self.micro_batches,
            "windows": self.windows,
            "dropped": self.dropped,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "padding_waste": self.padding_waste(),
            "pad_free_share": self.pad_free_share(),
            "roots_per_window": self.roots_per_window,
        })
    }
}

/// Named plans as aligned columns with a heading.
pub fn table(rows: &[(String, Mixture)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(7);
    let mut text = format!(
        "{:width$}  {:>13}  {:>7}  {:>7}  {:>13}  {:>8}  {:>16}\n",
        "SAMPLER", "MICRO-BATCHES", "WINDOWS", "DROPPED", "PADDING WASTE", "PAD-FREE", "ROOTS PER WINDOW"
    );
    for (name, m) in rows {
        writeln!(
            text,
            "{name:width$}  {:>13}  {:>7}  {:>7}  {:>12.2}%  {:>7.1}%  {:>16.2}",
            m.micro_batches,
            m.windows,
            m.dropped,
            m.padding_waste() * 100.0,
            m.pad_free_share() * 100.0,
            m.roots_per_window
        )
        .expect("writing to a String");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_and_roots_are_counted_by_hand() {
        let plan = Plan {
            records: vec![0, 1, 2, 3, 4, 5],
            row_ends: vec![1, 2, 4, 5, 6],
            batch_ends: vec![2, 3, 5],
            dropped: vec![6],
        };
        let request = PlanRequest {
            lengths: &[10, 6, 3, 4, 5, 5, 99],
            roots: &[0, 1, 0, 0, 2, 2, 1],
            epoch: 0,
            seed: 0,
            max_seq_len: 20,
            rows_per_batch: 2,
            accumulation: 2,
            token_budget: None,
        };
        let mixture = Mixture::of(&plan, &request);
        // Rows of 10 and 6; a packed row of 7; rows of 5 and 5.
        assert_eq!((mixture.tokens, mixture.padded_tokens), (33, 37));
        assert_eq!((mixture.pad_free, mixture.micro_batches, mixture.windows, mixture.dropped), (2, 3, 2, 1));
        assert_eq!(mixture.roots_per_window, 1.5);
    }
}
