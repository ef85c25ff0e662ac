//! Saves by time, so that what a crash can cost does not depend on how long a step takes.

use serde::Deserialize;
use tunehost_plugin_sdk::{CheckpointScheduler, Decision, Plugin, StepInfo};

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    minutes: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self { minutes: 15.0 }
    }
}

struct WallClock {
    interval_ms: u64,
}

impl Plugin for WallClock {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "minutes": { "type": "number", "exclusiveMinimum": 0, "default": 15, "description": "Minutes between two saves" }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        let interval_ms = config.minutes * 60_000.0;
        if !(interval_ms >= 1.0 && interval_ms.is_finite()) {
            return Err(format!("minutes must be a number above 0, not {}", config.minutes));
        }
        Ok(Self { interval_ms: interval_ms as u64 })
    }
}

impl CheckpointScheduler for WallClock {
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> {
        let save = info.since_last_save_ms >= self.interval_ms;
        let reason =
            if save { format!("{} s since the last save", info.since_last_save_ms / 1000) } else { String::new() };
        Ok(Decision { save, stop: false, reason })
    }
}

tunehost_plugin_sdk::export_checkpoint_scheduler!(WallClock);

#[cfg(test)]
mod tests {
    use super::*;

    fn saves(minutes: f64, since_last_save_ms: u64) -> bool {
        let info = StepInfo {
            step: 100,
            total_steps: 100,
            wall_clock_ms: 1_700_000_000_000,
            since_last_save_ms,
            last_save_cost_ms: 0,
            loss: 1.0,
        };
        WallClock::new(Config { minutes }).unwrap().after_step(info).unwrap().save
    }

    #[test]
    fn only_the_time_since_the_last_save_counts() {
        assert!(!saves(15.0, 899_999));
        assert!(saves(15.0, 900_000));
        assert!(saves(0.5, 30_000));
    }

    #[test]
    fn an_interval_that_is_no_time_is_refused() {
        for minutes in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(WallClock::new(Config { minutes }).is_err(), "{minutes}");
        }
    }
}
