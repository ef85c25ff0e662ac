//! Stops a run that no longer learns: when the mean training loss of the last steps has long not fallen below the best it
//! was. Until then it saves by time. A step whose loss is no finite number is not counted.

use std::collections::VecDeque;

use serde::Deserialize;
use tunehost_plugin_sdk::{CheckpointScheduler, Decision, Memory, Plugin, StepInfo};

/// So many losses fit what may be remembered.
const WINDOW_MAX: usize = 8000;
/// First byte of what is remembered.
const VERSION: u8 = 1;

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Config {
    minutes: f64,
    window: usize,
    min_delta: f64,
    patience: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self { minutes: 15.0, window: 50, min_delta: 0.0, patience: 200 }
    }
}

struct Plateau {
    interval_ms: u64,
    window: usize,
    min_delta: f64,
    patience: u64,
    memory: Remembered,
}

#[derive(Clone, PartialEq, Debug)]
struct Remembered {
    /// Of the last `window` steps, oldest first.
    losses: VecDeque<f64>,
    /// The best mean; infinite until there is one.
    best: f64,
    /// Steps since the best mean.
    waited: u64,
}

impl Plugin for Plateau {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "minutes": { "type": "number", "exclusiveMinimum": 0, "default": 15, "description": "Minutes between two saves" },
    "window": {
      "type": "integer", "minimum": 1, "maximum": 8000, "default": 50,
      "description": "Steps whose mean training loss is looked at"
    },
    "min_delta": {
      "type": "number", "minimum": 0, "default": 0,
      "description": "How far the mean must fall below the best one to be better"
    },
    "patience": {
      "type": "integer", "minimum": 1, "default": 200,
      "description": "Steps without a better mean after which the run stops"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        let Config { minutes, window, min_delta, patience } = config;
        let interval_ms = minutes * 60_000.0;
        if !(interval_ms >= 1.0 && interval_ms.is_finite()) {
            return Err(format!("minutes must be a number above 0, not {minutes}"));
        }
        if !(1..=WINDOW_MAX).contains(&window) {
            return Err(format!("window must be from 1 to {WINDOW_MAX}, not {window}"));
        }
        if !(min_delta >= 0.0 && min_delta.is_finite()) {
            return Err(format!("min_delta must be a number from 0, not {min_delta}"));
        }
        if patience == 0 {
            return Err("patience must be at least 1".into());
        }
        let memory = Remembered { losses: VecDeque::with_capacity(window), best: f64::INFINITY, waited: 0 };
        Ok(Self { interval_ms: interval_ms as u64, window, min_delta, patience, memory })
    }
}

impl CheckpointScheduler for Plateau {
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> {
        if info.loss.is_finite() {
            self.learn(info.loss);
        }
        let Remembered { best, waited, .. } = self.memory;
        let stop = waited >= self.patience && info.step < info.total_steps;
        let save = !stop && info.since_last_save_ms >= self.interval_ms;
        let reason = match (stop, save) {
            (true, _) => format!("mean loss of {} steps not below {best:.4} for {waited} steps", self.window),
            (_, true) => format!("{} s since the last save", info.since_last_save_ms / 1000),
            _ => String::new(),
        };
        Ok(Decision { save, stop, reason })
    }
}

impl Plateau {
    fn learn(&mut self, loss: f64) {
        let Remembered { losses, best, waited } = &mut self.memory;
        if losses.len() == self.window {
            losses.pop_front();
        }
        losses.push_back(loss);
        if losses.len() < self.window {
            return;
        }
        // Summed anew, so that the mean depends on these losses alone.
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        if mean < *best - self.min_delta {
            (*best, *waited) = (mean, 0);
        } else {
            *waited += 1;
        }
    }
}

/// The version, then little endian `waited`, `best` and the losses.
impl Memory for Plateau {
    fn save(&mut self) -> Result<Vec<u8>, String> {
        let Remembered { losses, best, waited } = &self.memory;
        let mut state = vec![VERSION];
        state.extend(waited.to_le_bytes());
        state.extend(best.to_le_bytes());
        state.extend(losses.iter().flat_map(|loss| loss.to_le_bytes()));
        Ok(state)
    }

    fn restore(&mut self, state: Vec<u8>) -> Result<(), String> {
        let Some((&VERSION, numbers)) = state.split_first() else {
            return Err(format!("what was saved is not of version {VERSION} of this plugin's memory"));
        };
        let (numbers, rest) = numbers.as_chunks::<8>();
        match numbers {
            [waited, best, losses @ ..] if rest.is_empty() && losses.len() <= self.window => {
                let losses = losses.iter().map(|&loss| f64::from_le_bytes(loss)).collect();
                let (best, waited) = (f64::from_le_bytes(*best), u64::from_le_bytes(*waited));
                self.memory = Remembered { losses, best, waited };
                Ok(())
            }
            _ => Err(format!("{} bytes were saved, which are not of a window of {}", state.len(), self.window)),
        }
    }
}

tunehost_plugin_sdk::export_checkpoint_scheduler!(Plateau, with memory);

#[cfg(test)]
mod tests;
