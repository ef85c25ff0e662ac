//! Length bucketing with a global shuffle: micro-batches are made of records of like length, so little is padded, and
//! the micro-batches are then shuffled over the whole epoch, so an optimiser step still mixes lengths and roots.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler, SplitMix64};

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    bucket: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { bucket: 2 }
    }
}

struct BucketToPair {
    /// Micro-batches made from one length bucket.
    batches_per_bucket: usize,
}

impl Plugin for BucketToPair {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "bucket": {
      "type": "integer", "minimum": 1, "maximum": 4294967295, "default": 2,
      "description": "Micro-batches made from one bucket of records of like length; 1 pads least, more mixes more"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        if config.bucket == 0 {
            return Err("bucket must be at least 1".into());
        }
        Ok(Self { batches_per_bucket: config.bucket as usize })
    }
}

impl Sampler for BucketToPair {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let mut rng = SplitMix64::new(request.seed, request.epoch);
        let (mut records, dropped) = request.split_by_fit();
        request.sort_by_length(&mut records, &mut rng);

        let mut ends = Vec::with_capacity(records.len().div_ceil(request.rows_per_batch.max(1) as usize));
        for bucket in records.chunks_mut(self.records_per_bucket(&request)) {
            rng.shuffle(bucket);
            request.cut(bucket, &mut ends)?;
        }
        let (records, batch_ends) = rng.shuffle_groups(&records, &ends);
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

impl BucketToPair {
    fn records_per_bucket(&self, request: &PlanRequest) -> usize {
        self.batches_per_bucket.saturating_mul(request.rows_per_batch.max(1) as usize)
    }
}

tunehost_plugin_sdk::export_sampler!(BucketToPair);

#[cfg(test)]
mod tests;
