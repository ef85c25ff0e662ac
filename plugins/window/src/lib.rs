//! For a machine that is yours until a given time: saves by time as usual, and ends the run while one more step, and the
//! save after it, would no longer be sure to fit. Steps go on while a save is written, and one save waits for the one before.

use serde::Deserialize;
use tunehost_plugin_sdk::{CheckpointScheduler, Decision, Memory, Plugin, StepInfo};

mod rfc3339;

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    until: String,
    #[serde(default = "minutes")]
    minutes: f64,
    #[serde(default = "margin_seconds")]
    margin_seconds: u32,
}

fn minutes() -> f64 {
    15.0
}

fn margin_seconds() -> u32 {
    60
}

struct Window {
    until: String,
    until_ms: u64,
    interval_ms: u64,
    margin_ms: u64,
    /// When the step before ended.
    ready_ms: Option<u64>,
    slowest_step_ms: u64,
}

impl Plugin for Window {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "required": ["until"],
  "properties": {
    "until": {
      "type": "string", "examples": ["2099-12-31T06:00:00Z"],
      "description": "When the run must have ended, date and time as in RFC 3339"
    },
    "minutes": { "type": "number", "exclusiveMinimum": 0, "default": 15, "description": "Minutes between two saves" },
    "margin_seconds": {
      "type": "integer", "minimum": 0, "maximum": 4294967295, "default": 60,
      "description": "Kept free beside the slowest step so far and the save after it"
    }
  }
}"#;

    fn new(config: Config) -> Result<Self, String> {
        let Config { until, minutes, margin_seconds } = config;
        let until_ms = rfc3339::milliseconds(&until)
            .ok_or_else(|| format!("until must be a date and time such as 2099-12-31T06:00:00Z, not {until:?}"))?;
        let interval_ms = minutes * 60_000.0;
        if !(interval_ms >= 1.0 && interval_ms.is_finite()) {
            return Err(format!("minutes must be a number above 0, not {minutes}"));
        }
        let margin_ms = u64::from(margin_seconds) * 1000;
        Ok(Self { until, until_ms, interval_ms: interval_ms as u64, margin_ms, ready_ms: None, slowest_step_ms: 0 })
    }
}

impl CheckpointScheduler for Window {
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> {
        let now_ms = info.wall_clock_ms;
        // No step takes longer than the time since the last save or the start: all that is known of the first one, and what
        // keeps the hours between two windows from counting as a step.
        let since_ready_ms = self.ready_ms.map_or(u64::MAX, |ready_ms| now_ms.saturating_sub(ready_ms));
        let step_ms = since_ready_ms.min(info.since_last_save_ms);
        self.slowest_step_ms = self.slowest_step_ms.max(step_ms);

        let due = info.since_last_save_ms >= self.interval_ms;
        // What is left to write of the save before, or of one that is begun now: the next save waits for it.
        let since_save_ms = if due { 0 } else { info.since_last_save_ms };
        let writing_ms = info.last_save_cost_ms.saturating_sub(since_save_ms);
        let next_ms = self.slowest_step_ms.max(writing_ms);
        let needed_ms = next_ms.saturating_add(info.last_save_cost_ms).saturating_add(self.margin_ms);
        let left_ms = self.until_ms.saturating_sub(now_ms);
        let stop = info.step < info.total_steps && left_ms < needed_ms;
        let save = !stop && due;
        self.ready_ms = Some(now_ms);
        let reason = match (stop, save) {
            (true, _) => format!(
                "{} s left until {}, {} s needed for a step, its save and the margin",
                left_ms / 1000,
                self.until,
                needed_ms / 1000
            ),
            (_, true) => format!("{} s since the last save", info.since_last_save_ms / 1000),
            _ => String::new(),
        };
        Ok(Decision { save, stop, reason })
    }
}

/// When the last step ended (nothing before the first) and how long the slowest took, little endian.
impl Memory for Window {
    fn save(&mut self) -> Result<Vec<u8>, String> {
        let times = [self.ready_ms.unwrap_or(u64::MAX), self.slowest_step_ms];
        Ok(times.map(u64::to_le_bytes).concat())
    }

    fn restore(&mut self, state: Vec<u8>) -> Result<(), String> {
        let (times, rest) = state.as_chunks::<8>();
        let &[ready_ms, slowest_ms] = times else { return Err(format!("16 bytes expected, not {}", state.len())) };
        if !rest.is_empty() {
            return Err(format!("16 bytes expected, not {}", state.len()));
        }
        let ready_ms = u64::from_le_bytes(ready_ms);
        self.ready_ms = (ready_ms != u64::MAX).then_some(ready_ms);
        self.slowest_step_ms = u64::from_le_bytes(slowest_ms);
        Ok(())
    }
}

tunehost_plugin_sdk::export_checkpoint_scheduler!(Window, with memory);

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-01-01T00:00:00Z.
    const CLOSES_MS: u64 = 1_767_225_600_000;

    fn window(margin_seconds: u32) -> Window {
        let config = Config { until: "2026-01-01T00:00:00Z".into(), minutes: 15.0, margin_seconds };
        Window::new(config).unwrap()
    }

    /// `left_ms` before the window closes.
    fn info(step: u64, left_ms: u64, last_save_cost_ms: u64) -> StepInfo {
        StepInfo {
            step,
            total_steps: 100,
            wall_clock_ms: CLOSES_MS - left_ms,
            since_last_save_ms: 10_000,
            last_save_cost_ms,
            loss: 1.0,
        }
    }

    fn stops(window: &mut Window, info: StepInfo) -> bool {
        window.after_step(info).unwrap().stop
    }

    #[test]
    fn one_more_step_its_save_and_the_margin_must_fit() {
        // Steps of 10 s, a save of 20 s that was written 10 s ago, 5 s of margin: 35 s.
        let mut ready = window(5);
        assert!(!stops(&mut ready, info(1, 55_000, 20_000)));
        assert!(!stops(&mut ready, info(2, 45_000, 20_000)));
        assert!(!stops(&mut ready, info(3, 35_000, 20_000)));
        assert!(stops(&mut ready, info(4, 34_999, 20_000)));
        assert!(!stops(&mut window(5), info(4, 34_999, 0)), "a quick save leaves time for a step");
    }

    #[test]
    fn the_slowest_step_counts_and_a_save_takes_nothing_of_a_step() {
        let mut slow = window(0);
        assert!(!stops(&mut slow, info(1, 100_000, 0)));
        assert!(!stops(&mut slow, StepInfo { since_last_save_ms: 50_000, ..info(2, 60_000, 0) }));
        assert!(!stops(&mut slow, info(3, 50_000, 0)));
        assert!(stops(&mut slow, info(4, 39_000, 0)), "the second step took 40 s");

        // A save of 60 s is written while two steps of 40 s run.
        let mut saving = window(0);
        saving.ready_ms = Some(CLOSES_MS - 540_000);
        let due = StepInfo { since_last_save_ms: 900_000, ..info(50, 500_000, 60_000) };
        assert!(saving.after_step(due).unwrap().save);
        assert!(!stops(&mut saving, StepInfo { since_last_save_ms: 40_000, ..info(51, 460_000, 60_000) }));
        assert_eq!(saving.slowest_step_ms, 40_000);
    }

    #[test]
    fn a_save_waits_for_the_one_that_is_written() {
        // Steps of 10 s and saves of 60 s: one that is due now is written for 60 s, and so is the last one after it.
        let ready = |left_ms: u64| Window { ready_ms: Some(CLOSES_MS - left_ms - 10_000), ..window(0) };
        let due = |left_ms| StepInfo { since_last_save_ms: 900_000, ..info(9, left_ms, 60_000) };
        assert!(!stops(&mut ready(120_000), due(120_000)));
        assert!(stops(&mut ready(119_999), due(119_999)));
        // Begun 45 s ago: 15 s are left of it.
        let begun = |left_ms| StepInfo { since_last_save_ms: 45_000, ..info(9, left_ms, 60_000) };
        assert!(!stops(&mut ready(75_000), begun(75_000)));
        assert!(stops(&mut ready(74_999), begun(74_999)));
        // Long written: the step alone counts.
        let written = |left_ms| StepInfo { since_last_save_ms: 300_000, ..info(9, left_ms, 60_000) };
        assert!(!stops(&mut ready(70_000), written(70_000)));
        assert!(stops(&mut ready(69_999), written(69_999)));
    }

    #[test]
    fn a_run_that_is_resumed_knows_the_slowest_step_and_does_not_count_the_night() {
        let mut evening = window(0);
        assert!(!stops(&mut evening, info(1, 100_000_000, 0)));
        assert!(!stops(&mut evening, StepInfo { since_last_save_ms: 50_000, ..info(2, 99_960_000, 0) }));
        let mut morning = window(0);
        morning.restore(evening.save().unwrap()).unwrap();
        assert!(!stops(&mut morning, info(3, 60_000, 0)), "the step took 10 s, not a day");
        assert!(stops(&mut morning, info(4, 39_000, 0)), "the second step took 40 s");
        assert!(window(0).restore(vec![0; 17]).unwrap_err().contains("not 17"));
    }

    #[test]
    fn a_closed_window_stops_at_once_and_the_last_step_needs_no_stop() {
        assert!(stops(&mut window(0), StepInfo { wall_clock_ms: CLOSES_MS + 1, ..info(1, 0, 0) }));
        let last = window(0).after_step(StepInfo { wall_clock_ms: CLOSES_MS + 1, ..info(100, 0, 0) }).unwrap();
        assert!(!last.stop && last.reason.is_empty());
    }

    #[test]
    fn until_must_be_a_time() {
        let config = Config { until: "tomorrow".into(), minutes: 15.0, margin_seconds: 0 };
        assert!(Window::new(config).err().unwrap().contains("\"tomorrow\""));
    }
}
