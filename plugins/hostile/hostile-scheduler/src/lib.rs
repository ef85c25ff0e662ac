//! A checkpoint scheduler that misbehaves as its setting `act` says. Otherwise it saves at every third step that it is
//! asked about, and remembers how many those were.

use std::hint::black_box;

use serde::Deserialize;
use tunehost_plugin_sdk::{CheckpointScheduler, Decision, Memory, Plugin, StepInfo};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    act: Act,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Act {
    // In `after-step`.
    Loop,
    LongReasonToSave,
    LongReasonToStop,
    PanicAtNan,
    // In `save` and `restore`.
    SaveTooMuch,
    PanicInSave,
    RefuseRestore,
    PanicInRestore,
    Forget,
}

struct Hostile {
    act: Act,
    steps_seen: u8,
}

impl Plugin for Hostile {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "required": ["act"], "properties": {"act": {"type": "string"}}}"#;

    fn new(Config { act }: Config) -> Result<Self, String> {
        Ok(Self { act, steps_seen: 0 })
    }
}

impl CheckpointScheduler for Hostile {
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> {
        let long_reason = || "x".repeat(1 << 20);
        self.steps_seen = self.steps_seen.wrapping_add(1);
        match self.act {
            Act::Loop => loop {
                black_box(&mut self.steps_seen);
            },
            Act::LongReasonToSave => Ok(Decision { save: true, stop: false, reason: long_reason() }),
            Act::LongReasonToStop => Ok(Decision { save: false, stop: true, reason: long_reason() }),
            Act::PanicAtNan if info.loss.is_nan() => panic!("the loss of step {} is no number", info.step),
            _ => {
                let save = self.steps_seen.is_multiple_of(3);
                Ok(Decision { save, stop: false, reason: if save { "every third".into() } else { String::new() } })
            }
        }
    }
}

impl Memory for Hostile {
    fn save(&mut self) -> Result<Vec<u8>, String> {
        match self.act {
            Act::SaveTooMuch => Ok(vec![0; 65_537]),
            Act::PanicInSave => panic!("nothing comes to mind"),
            Act::Forget => Ok(Vec::new()),
            _ => Ok(vec![self.steps_seen]),
        }
    }

    fn restore(&mut self, state: Vec<u8>) -> Result<(), String> {
        match (self.act, &state[..]) {
            (Act::RefuseRestore, _) => Err("I have never seen this before".into()),
            (Act::PanicInRestore, _) => panic!("these {} bytes hurt", state.len()),
            (Act::Forget, _) => Ok(()),
            (_, &[steps_seen]) => {
                self.steps_seen = steps_seen;
                Ok(())
            }
            _ => Err(format!("{} bytes where 1 was saved", state.len())),
        }
    }
}

tunehost_plugin_sdk::export_checkpoint_scheduler!(Hostile, with memory);
