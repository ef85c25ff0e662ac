//! What decides when a run is saved and when its process ends: the run's checkpoint scheduler, and `window` for a process that
//! is to end before a time (`--until`).
//!
//! Such a time is an order to one process. It stands in `timing.jsonl`, as all clocks do, and not in the configuration: the next
//! process is told another one, or none.

use crate::error::Result;
use crate::plugins::{CheckpointScheduler, Decision, Identity, Kind, PluginRef, StepInfo};
use crate::run::clock::Until;
use crate::run::metrics::UntilTiming;
use serde_json::{Map, Value};

/// The plugin that ends a process before a time.
const WINDOW: &str = "window";

/// The schedulers of a process.
pub struct Scheduling {
    /// The run's own, which alone says when to save and what a checkpoint remembers.
    pub run: CheckpointScheduler,
    /// Ends this process, where the run's own scheduler is another plugin.
    window: Option<CheckpointScheduler>,
    /// When this process is to end, UTC, and what ends it.
    until: Option<(String, Identity)>,
}

impl Scheduling {
    /// Starts the run's scheduler with its settings. Where that is `window`, `until` takes the place of the time in them.
    ///
    /// # Errors
    /// Those of [`CheckpointScheduler::load`].
    pub fn load(run: &PluginRef, settings: Option<&Value>, until: Option<&Until>) -> Result<Self> {
        let Some(Until { utc, .. }) = until else {
            return Ok(Self { run: CheckpointScheduler::load(run, settings)?, window: None, until: None });
        };
        let bundled = PluginRef::resolve(Kind::CheckpointScheduler, WINDOW, &[])?;
        let until = Some((utc.clone(), bundled.identity().clone()));
        let mut own = settings.and_then(Value::as_object).cloned().unwrap_or_default();
        if run.identity().sha256 == bundled.identity().sha256 {
            own.insert("until".into(), utc.as_str().into());
            return Ok(Self { run: CheckpointScheduler::load(run, Some(&own.into()))?, window: None, until });
        }
        let window = Map::from_iter([("until".to_string(), utc.as_str().into())]);
        let window = CheckpointScheduler::load(&bundled, Some(&window.into()))?;
        Ok(Self { run: CheckpointScheduler::load(run, settings)?, window: Some(window), until })
    }

    /// Asks after one step.
    ///
    /// # Errors
    /// Those of [`CheckpointScheduler::after_step`].
    pub fn after_step(&mut self, info: &StepInfo) -> Result<Decision> {
        let decision = self.run.after_step(info)?;
        match self.window.as_mut().map(|window| window.after_step(info)).transpose()? {
            Some(window) if window.stop && !decision.stop => Ok(Decision { save: decision.save, ..window }),
            _ => Ok(decision),
        }
    }

    /// The line of `timing.jsonl` on a process that goes on after `step`, where it is to end before a time.
    pub fn until(&self, step: u64) -> Option<UntilTiming> {
        let (until, Identity { name, version, sha256, .. }) = self.until.as_ref()?;
        let plugin = format!("{name} {version} {sha256}");
        Some(UntilTiming { step, until: until.clone(), plugin })
    }
}
