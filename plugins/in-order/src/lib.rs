//! The corpus's own order, the same in every epoch: for curricula, and for comparing runs record by record.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler};

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct InOrder;

impl Plugin for InOrder {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {},
  "x-same-order": true
}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Sampler for InOrder {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let (records, dropped) = request.split_by_fit();
        let mut batch_ends = Vec::new();
        request.cut(&records, &mut batch_ends)?;
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

tunehost_plugin_sdk::export_sampler!(InOrder);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_keep_their_order() {
        let request = PlanRequest {
            lengths: vec![5, 1, 90, 3, 2],
            roots: vec![0; 5],
            epoch: 3,
            seed: 9,
            max_seq_len: 50,
            rows_per_batch: 3,
            accumulation: 1,
            token_budget: None,
        };
        let plan = InOrder.plan(request).unwrap();
        assert_eq!(plan.records, [0, 1, 3, 4]);
        assert_eq!(plan.batch_ends, [3, 4]);
        assert_eq!(plan.dropped, [2]);
    }
}
