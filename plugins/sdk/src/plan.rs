//! The steps that samplers have in common.

use crate::{Plan, PlanRequest, SplitMix64};

/// Up to this length a counting sort's counters stay small beside the records.
const COUNTED_LENGTH_MAX: u32 = 1 << 20;

impl PlanRequest {
    /// The records that fit a row, and those too long for one, each in their given order.
    pub fn split_by_fit(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut fitting, mut dropped) = (Vec::with_capacity(self.lengths.len()), Vec::new());
        for (record, &length) in (0..).zip(&self.lengths) {
            if length <= self.max_seq_len { &mut fitting } else { &mut dropped }.push(record);
        }
        (fitting, dropped)
    }

    /// Tokens of a record.
    pub fn length(&self, record: u32) -> u32 {
        self.lengths[record as usize]
    }

    /// Shortest first; records of equal length in random order, so that an epoch does not repeat the neighbours of the
    /// last one.
    pub fn sort_by_length(&self, records: &mut [u32], rng: &mut SplitMix64) {
        let longest = records.iter().map(|&record| self.length(record)).max().unwrap_or(0);
        if longest > COUNTED_LENGTH_MAX {
            rng.shuffle(records);
            records.sort_by_key(|&record| self.length(record));
            return;
        }
        // Where the next record of each length goes.
        let mut places = vec![0; longest as usize + 1];
        records.iter().for_each(|&record| places[self.length(record) as usize] += 1);
        let mut start = 0;
        for place in &mut places {
            (*place, start) = (start, start + *place);
        }
        rng.shuffle(records);
        let shuffled = records.to_vec();
        for record in shuffled {
            let place = &mut places[self.length(record) as usize];
            records[*place] = record;
            *place += 1;
        }
    }

    /// A record over the token budget by itself is an error: no plan could hold it.
    pub fn check_budget(&self, records: &[u32]) -> Result<(), String> {
        let Some(budget) = self.token_budget else { return Ok(()) };
        match records.iter().find(|&&record| self.length(record) > budget) {
            None => Ok(()),
            Some(&record) => {
                let length = self.length(record);
                Err(format!("record {record} has {length} tokens, more than the token budget of {budget}"))
            }
        }
    }

    /// Cut neighbouring rows of these `tokens` into micro-batches of at most `rows_per_batch` rows each, within the token
    /// budget, padding counted. `ends` says where the micro-batches of the rows before end; theirs are added.
    pub fn cut_rows(&self, tokens: impl IntoIterator<Item = u32>, ends: &mut Vec<u32>) -> Result<(), String> {
        let budget = self.token_budget.map_or(u64::MAX, u64::from);
        let rows_max = self.rows_per_batch.max(1);
        let mut start = ends.last().copied().unwrap_or(0);
        let (mut end, mut width) = (start, 0);
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
        Ok(())
    }

    /// [`PlanRequest::cut_rows`] for one record a row.
    pub fn cut(&self, records: &[u32], ends: &mut Vec<u32>) -> Result<(), String> {
        if self.token_budget.is_none() {
            // Lengths do not matter then, and a million of them in any order are slow to look up.
            let start = ends.last().copied().unwrap_or(0);
            let end = start + records.len() as u32;
            ends.extend((start..end).step_by(self.rows_per_batch.max(1) as usize).skip(1));
            ends.extend((start < end).then_some(end));
            return Ok(());
        }
        self.check_budget(records)?;
        self.cut_rows(records.iter().map(|&record| self.length(record)), ends)
    }
}

impl Plan {
    /// The plan of these records, one a row, in micro-batches that end at `batch_ends`.
    pub fn one_record_per_row(records: Vec<u32>, batch_ends: Vec<u32>, dropped: Vec<u32>) -> Self {
        let row_ends = (1..=records.len() as u32).collect();
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

    fn cut(request: &PlanRequest, records: &[u32]) -> Result<Vec<u32>, String> {
        let mut ends = Vec::new();
        request.cut(records, &mut ends).map(|()| ends)
    }

    #[test]
    fn cutting_keeps_to_the_rows_of_a_batch() {
        assert_eq!(cut(&request(&[1, 1, 1, 1, 1], 2, None), &[4, 3, 2, 1, 0]).unwrap(), [2, 4, 5]);
        assert!(cut(&request(&[], 2, None), &[]).unwrap().is_empty());
    }

    #[test]
    fn the_token_budget_counts_padding() {
        // 10 + 60 would be 70 real tokens, but 2 rows of 60 are 120.
        assert_eq!(cut(&request(&[10, 60, 10], 3, Some(100)), &[0, 1, 2]).unwrap(), [1, 2, 3]);
        assert_eq!(cut(&request(&[10, 50, 10], 3, Some(100)), &[0, 1, 2]).unwrap(), [2, 3]);
        let refusal = cut(&request(&[10, 60], 2, Some(50)), &[0, 1]).unwrap_err();
        assert!(refusal.contains("record 1 has 60 tokens"), "{refusal}");
    }

    #[test]
    fn a_micro_batch_ends_where_a_cut_does() {
        let request = request(&[1; 6], 2, None);
        let mut ends = Vec::new();
        request.cut(&[0, 1, 2], &mut ends).unwrap();
        request.cut(&[3, 4, 5], &mut ends).unwrap();
        assert_eq!(ends, [2, 3, 5, 6]);
    }

    #[test]
    fn both_sorts_are_the_stable_sort_of_a_shuffle() {
        let mut rng = SplitMix64::new(1, 0);
        for round in 0..300 {
            let longest = [1, 7, 300, COUNTED_LENGTH_MAX, u32::MAX][round % 5];
            let count = rng.below(200);
            let lengths: Vec<u32> = (0..count).map(|_| rng.below(u64::from(longest) + 1) as u32).collect();
            let mut request = request(&lengths, 2, None);
            request.max_seq_len = longest - longest / 4;
            let (mut sorted, dropped) = request.split_by_fit();
            assert_eq!(sorted.len() + dropped.len(), lengths.len());
            let mut expected = sorted.clone();
            request.sort_by_length(&mut sorted, &mut SplitMix64::new(7, 3));
            SplitMix64::new(7, 3).shuffle(&mut expected);
            expected.sort_by_key(|&record| lengths[record as usize]);
            assert_eq!(sorted, expected, "lengths up to {longest}");
        }
    }

    #[test]
    fn a_row_holds_one_record() {
        let plan = Plan::one_record_per_row(vec![2, 0, 1], vec![2, 3], vec![3]);
        assert_eq!(plan.row_ends, [1, 2, 3]);
    }
}
