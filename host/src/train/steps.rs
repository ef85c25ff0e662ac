//! Optimiser steps out of a sampler's plan: which records, in which rows, in which micro-batches.

use crate::corpus::Record;
use crate::plugins::Plan;

/// A row: records laid end to end. A row of one record unless the sampler packs.
pub type Row = Vec<u32>;

/// The rows of one micro-batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatch {
    /// Indices into the training records, row by row.
    pub rows: Vec<Row>,
}

/// One optimiser step: an accumulation window of micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Epoch, from 0.
    pub epoch: u32,
    /// Its micro-batches; the last window of an epoch may have fewer.
    pub batches: Vec<MicroBatch>,
}

impl MicroBatch {
    /// Real tokens, and the tokens of the rectangle that holds the rows. The engine computes the real ones only; their ratio
    /// is what a padding engine would waste.
    pub fn tokens(&self, records: &[Record]) -> (usize, usize) {
        let widths = self.rows.iter().map(|row| row.iter().map(|i| records[*i as usize].tokens.len()).sum::<usize>());
        let (sum, widest) = widths.fold((0, 0), |(sum, widest), w| (sum + w, widest.max(w)));
        (sum, widest * self.rows.len())
    }
}

/// The steps of one epoch: `accumulation` micro-batches each.
///
/// The plan was validated by the plugin host, so its offsets are in range.
pub fn epoch_steps(epoch: u32, plan: &Plan, accumulation: u32) -> Vec<Step> {
    let mut row_start = 0;
    let mut batch_start = 0;
    let mut batches = Vec::with_capacity(plan.batch_ends.len());
    for batch_end in &plan.batch_ends {
        let mut rows = Vec::new();
        for row_end in &plan.row_ends[batch_start..*batch_end as usize] {
            rows.push(plan.records[row_start..*row_end as usize].to_vec());
            row_start = *row_end as usize;
        }
        batch_start = *batch_end as usize;
        batches.push(MicroBatch { rows });
    }
    batches.chunks(accumulation as usize).map(|window| Step { epoch, batches: window.to_vec() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Tokens;

    #[test]
    fn the_last_window_may_be_partial() {
        let plan = Plan {
            records: vec![4, 3, 2, 1, 0],
            row_ends: vec![1, 3, 4, 5],
            batch_ends: vec![2, 3, 4],
            dropped: vec![],
        };
        let steps = epoch_steps(1, &plan, 2);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[0].batches[0].rows, [vec![4], vec![3, 2]]);
        assert_eq!(steps[0].batches[1].rows, [vec![1]]);
        assert_eq!(steps[1], Step { epoch: 1, batches: vec![MicroBatch { rows: vec![vec![0]] }] });
    }

    #[test]
    fn padding_is_counted_against_the_rectangle() {
        let record = |n: usize| Record { id: "".into(), root: 0, tokens: Tokens::new(&vec![0; n], &vec![0; n]) };
        let records = [record(10), record(4), record(3)];
        let batch = MicroBatch { rows: vec![vec![0], vec![1, 2]] };
        assert_eq!(batch.tokens(&records), (17, 20));
    }
}
