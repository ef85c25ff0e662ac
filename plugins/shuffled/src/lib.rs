//! The plain baseline: every order of the records equally likely, cut into micro-batches as it comes.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler, SplitMix64};

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct Shuffled;

impl Plugin for Shuffled {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Sampler for Shuffled {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let (mut records, dropped) = request.split_by_fit();
        SplitMix64::new(request.seed, request.epoch).shuffle(&mut records);
        let mut batch_ends = Vec::new();
        request.cut(&records, &mut batch_ends)?;
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

tunehost_plugin_sdk::export_sampler!(Shuffled);

#[cfg(test)]
mod tests {
    use super::*;

    fn request(epoch: u32, seed: u64) -> PlanRequest {
        PlanRequest {
            lengths: (1..=100).collect(),
            roots: vec![0; 100],
            epoch,
            seed,
            max_seq_len: 99,
            rows_per_batch: 4,
            accumulation: 1,
            token_budget: None,
        }
    }

    #[test]
    fn every_record_that_fits_is_planned_and_the_other_dropped() {
        let plan = Shuffled.plan(request(0, 1)).unwrap();
        let mut records = plan.records.clone();
        assert_ne!(records, (0..99).collect::<Vec<u32>>());
        records.sort_unstable();
        assert_eq!(records, (0..99).collect::<Vec<u32>>());
        assert_eq!(plan.dropped, [99]);
        assert_eq!(plan.batch_ends.len(), 25);
    }

    #[test]
    fn the_order_is_that_of_seed_and_epoch() {
        let order = |epoch, seed| Shuffled.plan(request(epoch, seed)).unwrap().records;
        assert_eq!(order(0, 1), order(0, 1));
        assert_ne!(order(0, 1), order(1, 1));
        assert_ne!(order(0, 1), order(0, 2));
    }
}
