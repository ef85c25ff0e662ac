//! Saves by step count.

use serde::Deserialize;
use tunehost_plugin_sdk::{CheckpointScheduler, Decision, Plugin, StepInfo};

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    n: u64,
}

struct EveryNSteps {
    n: u64,
}

impl Plugin for EveryNSteps {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "required": ["n"],
  "properties": {
    "n": { "type": "integer", "minimum": 1, "description": "Optimiser steps between two saves" }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        if config.n == 0 {
            return Err("n must be at least 1".into());
        }
        Ok(Self { n: config.n })
    }
}

impl CheckpointScheduler for EveryNSteps {
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> {
        let save = info.step.is_multiple_of(self.n);
        let reason = if save { format!("step {} is a multiple of {}", info.step, self.n) } else { String::new() };
        Ok(Decision { save, stop: false, reason })
    }
}

tunehost_plugin_sdk::export_checkpoint_scheduler!(EveryNSteps);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nth_step_is_saved() {
        let mut scheduler = EveryNSteps::new(Config { n: 3 }).unwrap();
        let mut saved = Vec::new();
        for step in 1..=10 {
            let info = StepInfo {
                step,
                total_steps: 10,
                wall_clock_ms: 0,
                since_last_save_ms: 0,
                last_save_cost_ms: 0,
                loss: f64::NAN,
            };
            let decision = scheduler.after_step(info).unwrap();
            assert!(!decision.stop);
            if decision.save {
                saved.push(step);
            }
        }
        assert_eq!(saved, [3, 6, 9]);
    }

    #[test]
    fn zero_steps_are_refused() {
        assert!(EveryNSteps::new(Config { n: 0 }).is_err());
    }
}
