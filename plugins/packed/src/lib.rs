//! Packing: several records share a row, so that rows are nearly full and hardly anything is padded. Records of a row do
//! not see each other.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler, SplitMix64};

mod first_fit;

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct Packed;

impl Plugin for Packed {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Sampler for Packed {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let mut rng = SplitMix64::new(request.seed, request.epoch);
        let (mut records, dropped) = request.split_by_fit();
        request.check_budget(&records)?;
        let capacity = request.max_seq_len.min(request.token_budget.unwrap_or(u32::MAX));
        request.sort_by_length(&mut records, &mut rng);
        records.reverse();

        let lengths: Vec<u32> = records.iter().map(|&record| request.length(record)).collect();
        let rows = first_fit::pack(&lengths, capacity);
        let packed: Vec<u32> = rows.items.iter().map(|&item| records[item as usize]).collect();
        let (records, row_ends) = rng.shuffle_groups(&packed, &rows.ends);
        let row_tokens = std::iter::once(&0).chain(&row_ends).zip(&row_ends).map(|(&start, &end)| {
            records[start as usize..end as usize].iter().map(|&record| request.length(record)).sum::<u32>()
        });
        let mut batch_ends = Vec::new();
        request.cut_rows(row_tokens, &mut batch_ends)?;
        Ok(Plan { records, row_ends, batch_ends, dropped })
    }
}

tunehost_plugin_sdk::export_sampler!(Packed);

#[cfg(test)]
mod tests {
    use super::*;

    fn request(lengths: Vec<u32>, token_budget: Option<u32>) -> PlanRequest {
        PlanRequest {
            roots: vec![0; lengths.len()],
            lengths,
            epoch: 0,
            seed: 7,
            max_seq_len: 1000,
            rows_per_batch: 2,
            accumulation: 1,
            token_budget,
        }
    }

    fn row_tokens(plan: &Plan, lengths: &[u32]) -> Vec<u32> {
        let starts = std::iter::once(&0).chain(&plan.row_ends);
        let rows = starts.zip(&plan.row_ends).map(|(&start, &end)| &plan.records[start as usize..end as usize]);
        rows.map(|row| row.iter().map(|&record| lengths[record as usize]).sum()).collect()
    }

    #[test]
    fn rows_are_nearly_full_and_hold_each_record_once() {
        let lengths: Vec<u32> = (0..2000u32).map(|i| i.wrapping_mul(2_654_435_761) % 900 + 1).collect();
        let plan = Packed.plan(request(lengths.clone(), None)).unwrap();
        let mut records = plan.records.clone();
        records.sort_unstable();
        assert_eq!(records, (0..2000).collect::<Vec<u32>>());
        let rows = row_tokens(&plan, &lengths);
        assert!(rows.iter().all(|&tokens| tokens <= 1000));
        let least = lengths.iter().sum::<u32>().div_ceil(1000) as usize;
        assert!(rows.len() <= least + least / 50, "{} rows where {least} might do", rows.len());
        assert!(rows.len() < 2000);
    }

    #[test]
    fn a_token_budget_below_max_seq_len_bounds_the_rows() {
        let lengths = vec![300, 200, 250, 100, 50, 400];
        let plan = Packed.plan(request(lengths.clone(), Some(450))).unwrap();
        assert!(row_tokens(&plan, &lengths).iter().all(|&tokens| tokens <= 450));
        let refusal = Packed.plan(request(vec![10, 500], Some(450))).unwrap_err();
        assert!(refusal.contains("record 1 has 500 tokens"), "{refusal}");
    }

    #[test]
    fn rows_are_shuffled_by_epoch_and_long_records_dropped() {
        let lengths: Vec<u32> = (1..=500).chain([1001]).collect();
        let of_epoch = |epoch| Packed.plan(PlanRequest { epoch, ..request(lengths.clone(), None) }).unwrap();
        assert_eq!(of_epoch(0).records, of_epoch(0).records);
        assert_ne!(of_epoch(0).records, of_epoch(1).records);
        assert_eq!(of_epoch(0).dropped, [500]);
    }

    #[test]
    fn an_empty_corpus_gives_an_empty_plan() {
        assert!(Packed.plan(request(Vec::new(), None)).unwrap().row_ends.is_empty());
    }
}
