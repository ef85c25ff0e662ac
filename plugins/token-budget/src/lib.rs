//! Micro-batches of as many records as fill a number of tokens: short records come many at once, long ones alone, and
//! each micro-batch costs about the same.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler, SplitMix64};

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    tokens: u32,
}

struct TokenBudget {
    tokens: u32,
}

impl Plugin for TokenBudget {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "required": ["tokens"],
  "properties": {
    "tokens": {
      "type": "integer", "minimum": 1, "maximum": 4294967295, "examples": [16384],
      "description": "Most tokens in a micro-batch, padding counted; train.micro_batch stays the most rows"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        if config.tokens == 0 {
            return Err("tokens must be at least 1".into());
        }
        Ok(Self { tokens: config.tokens })
    }
}

impl Sampler for TokenBudget {
    fn plan(&mut self, mut request: PlanRequest) -> Result<Plan, String> {
        request.token_budget = Some(request.token_budget.map_or(self.tokens, |budget| budget.min(self.tokens)));
        let mut rng = SplitMix64::new(request.seed, request.epoch);
        let (mut records, dropped) = request.split_by_fit();
        request.sort_by_length(&mut records, &mut rng);
        let mut ends = Vec::new();
        request.cut(&records, &mut ends)?;
        let (records, batch_ends) = rng.shuffle_groups(&records, &ends);
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

tunehost_plugin_sdk::export_sampler!(TokenBudget);

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
            rows_per_batch: 64,
            accumulation: 1,
            token_budget,
        }
    }

    /// Rows and widest row of each micro-batch.
    fn shapes(plan: &Plan, lengths: &[u32]) -> Vec<(u32, u32)> {
        let starts = std::iter::once(&0).chain(&plan.batch_ends);
        let batches = starts.zip(&plan.batch_ends).map(|(&start, &end)| &plan.records[start as usize..end as usize]);
        batches.map(|rows| (rows.len() as u32, rows.iter().map(|&r| lengths[r as usize]).max().unwrap())).collect()
    }

    #[test]
    fn short_records_come_many_at_once_and_long_ones_alone() {
        let lengths: Vec<u32> = (0..1000u32).map(|i| i.wrapping_mul(2_654_435_761) % 1000 + 1).collect();
        let plan = TokenBudget { tokens: 1500 }.plan(request(lengths.clone(), None)).unwrap();
        let shapes = shapes(&plan, &lengths);
        assert!(shapes.iter().all(|(rows, width)| rows * width <= 1500), "{shapes:?}");
        assert!(shapes.iter().all(|(rows, width)| *width <= 750 || *rows == 1));
        assert!(shapes.iter().any(|(rows, _)| *rows > 10));
    }

    #[test]
    fn the_smaller_budget_counts() {
        let plan = TokenBudget { tokens: 100 }.plan(request(vec![10; 20], Some(50))).unwrap();
        assert_eq!(plan.batch_ends, [5, 10, 15, 20]);
        let plan = TokenBudget { tokens: 50 }.plan(request(vec![10; 20], Some(100))).unwrap();
        assert_eq!(plan.batch_ends, [5, 10, 15, 20]);
    }

    #[test]
    fn a_record_over_the_budget_is_named() {
        let refusal = TokenBudget { tokens: 100 }.plan(request(vec![10, 101], None)).unwrap_err();
        assert!(refusal.contains("record 1 has 101 tokens"), "{refusal}");
        assert!(TokenBudget::new(Config { tokens: 0 }).is_err());
    }
}
