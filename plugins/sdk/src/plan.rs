//! The steps that samplers have in common.

use crate::{Plan, PlanRequest, SplitMix64};

impl PlanRequest {
    /// The records that fit a row, and those too long for one, each in their given order.
    pub fn split_by_fit(&self) -> (Vec<u32>, Vec<u32>) {
        (0..self.lengths.len() as u32).partition(|&record| self.length(record) <= self.max_seq_len)
    }

    /// Tokens of a record.
    pub fn length(&self, record: u32) -> u32 {
        self.lengths[record as usize]
    }

    /// Shortest first; records of equal length in random order, so that an epoch does not repeat the neighbours of the
    /// last one.
    pub fn sort_by_length(&self, records: &mut [u32], rng: &mut SplitMix64) {
        rng.shuffle(records);
        // A stable sort, spelt as one of integers because that is several times faster: the length above, the place in
        // the shuffled order below.
        let key = |(place, &record)| u64::from(self.length(record)) << 32 | place as u64;
        let mut keys: Vec<u64> = records.iter().enumerate().map(key).collect();
        keys.sort_unstable();
        let shuffled = records.to_vec();
        for (record, key) in records.iter_mut().zip(keys) {
            *record = shuffled[key as u32 as usize];
        }
    }

    /// A record over the token budget by itself is an error: no plan could hold it.
    pub fn check_budget(&self, records: &[u32]) -> Result<(), String> {
        let budget = self.token_budget.unwrap_or(u32::MAX);
        match records.iter().find(|&&record| self.length(record) > budget) {
            None => Ok(()),
            Some(&record) => {
                let length = self.length(record);
                Err(format!("record {record} has {length} tokens, more than the token budget of {budget}"))
            }
        }
    }

    /// Where micro-batches of neighbouring rows end, for rows of these `tokens`: at most `rows_per_batch` rows each, and
    /// within the token budget, padding counted.
    pub fn batch_ends(&self, tokens: impl IntoIterator<Item = u32>) -> Result<Vec<u32>, String> {
        let budget = self.token_budget.map_or(u64::MAX, u64::from);
        let rows_max = self.rows_per_batch.max(1);
        let (mut ends, mut start, mut end, mut width) = (Vec::new(), 0, 0, 0);
        for tokens in tokens {
            if u64::from(tokens) > budget {
                return Err(format!("row {end} has {tokens} tokens, more than the token budget of {budget}"));
            }
            let wider = width.max(tokens);
            let rows = end - start + 1;
            if rows > rows_max || u64::from(rows) * u64::from(wider) > budget {
                ends.push(end);
                (start, width) = (end, tokens);
            } else {
                width = wider;
            }
            end += 1;
        }
        if start < end {
            ends.push(end);
        }
        Ok(ends)
    }

    /// Cut `records` into micro-batches of neighbours, one record a row, and add them to `batches`; the limits are those
    /// of [`PlanRequest::batch_ends`].
    pub fn cut<'r>(&self, records: &'r [u32], batches: &mut Vec<&'r [u32]>) -> Result<(), String> {
        self.check_budget(records)?;
        let mut start = 0;
        for end in self.batch_ends(records.iter().map(|&record| self.length(record)))? {
            batches.push(&records[start..end as usize]);
            start = end as usize;
        }
        Ok(())
    }
}

impl Plan {
    /// The plan of these micro-batches with one record per row.
    pub fn one_record_per_row(batches: &[&[u32]], dropped: Vec<u32>) -> Self {
        let records = batches.concat();
        let row_ends = (1..=records.len() as u32).collect();
        let batch_ends = batches
            .iter()
            .scan(0, |end, batch| {
                *end += batch.len() as u32;
                Some(*end)
            })
            .collect();
        Self { records, row_ends, batch_ends, dropped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(lengths: &[u32], rows_per_batch: u32, token_budget: Option<u32>) -> PlanRequest {
        PlanRequest {
            lengths: lengths.to_vec(),
            roots: vec![0; lengths.len()],
            epoch: 0,
            seed: 0,
            max_seq_len: 100,
            rows_per_batch,
            accumulation: 1,
            token_budget,
        }
    }

    fn cut<'r>(request: &PlanRequest, records: &'r [u32]) -> Result<Vec<&'r [u32]>, String> {
        let mut batches = Vec::new();
        request.cut(records, &mut batches).map(|()| batches)
    }

    #[test]
    fn cutting_keeps_to_the_rows_of_a_batch() {
        assert_eq!(cut(&request(&[1, 1, 1, 1, 1], 2, None), &[4, 3, 2, 1, 0]).unwrap(), [&[4, 3][..], &[2, 1], &[0]]);
        assert!(cut(&request(&[], 2, None), &[]).unwrap().is_empty());
    }

    #[test]
    fn the_token_budget_counts_padding() {
        // 10 + 60 would be 70 real tokens, but 2 rows of 60 are 120.
        assert_eq!(cut(&request(&[10, 60, 10], 3, Some(100)), &[0, 1, 2]).unwrap(), [&[0][..], &[1], &[2]]);
        assert_eq!(cut(&request(&[10, 50, 10], 3, Some(100)), &[0, 1, 2]).unwrap(), [&[0, 1][..], &[2]]);
        let refusal = cut(&request(&[10, 60], 2, Some(50)), &[0, 1]).unwrap_err();
        assert!(refusal.contains("record 1 has 60 tokens"), "{refusal}");
    }

    #[test]
    fn a_plan_counts_rows_and_batches() {
        let plan = Plan::one_record_per_row(&[&[2, 0], &[1]], vec![3]);
        assert_eq!(plan.records, [2, 0, 1]);
        assert_eq!(plan.row_ends, [1, 2, 3]);
        assert_eq!(plan.batch_ends, [2, 3]);
        assert_eq!(plan.dropped, [3]);
    }
}
