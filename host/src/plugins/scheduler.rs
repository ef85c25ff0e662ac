//! Plugins of the kind `checkpoint-scheduler`.

use super::reference::{Identity, PluginRef};
use super::runtime::Plugin;
use super::since_v0_1_0::{VERSION, memory, scheduling};
use crate::error::{Error, Result};

/// Most that a plugin may remember, bytes.
pub const MEMORY_BYTES_MAX: usize = 65_536;

/// What a scheduler is told after each optimiser step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepInfo {
    /// Steps done, counted from 1.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Milliseconds since 1970-01-01 UTC.
    pub wall_clock_ms: u64,
    /// Milliseconds since the last save, or since training started or was resumed.
    pub since_last_save_ms: u64,
    /// How long the last save took, milliseconds; 0 where nothing is saved since then.
    pub last_save_cost_ms: u64,
    /// Training loss of the step.
    pub loss: f64,
}

/// A scheduler's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Save now.
    pub save: bool,
    /// End the run after this step; it is saved in any case.
    pub stop: bool,
    /// Why, for the log; empty where neither.
    pub reason: String,
}

/// A running checkpoint scheduler.
pub struct CheckpointScheduler {
    plugin: Plugin<Functions>,
}

struct Functions {
    scheduling: scheduling::Guest,
    /// Where the plugin remembers anything.
    memory: Option<memory::Guest>,
}

impl CheckpointScheduler {
    /// Start a scheduler with its settings, `[plugins.config.checkpoint_scheduler]`.
    ///
    /// # Errors
    /// `plugin::config_refused`, `plugin::wrong_contract`, and those of a failed call.
    pub fn load(reference: &PluginRef, config: Option<&serde_json::Value>) -> Result<Self> {
        let plugin = Plugin::load(reference, config, |component, store, instance| {
            let scheduling = scheduling::GuestIndices::new(component)?.load(&mut *store, instance)?;
            let remembers =
                component.component().get_export_index(None, format!("tunehost:plugin/memory@{VERSION}")).is_some();
            let memory = match remembers {
                true => Some(memory::GuestIndices::new(component)?.load(store, instance)?),
                false => None,
            };
            Ok(Functions { scheduling, memory })
        })?;
        Ok(Self { plugin })
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        self.plugin.identity()
    }

    /// Ask after one step.
    ///
    /// # Errors
    /// `plugin::refused`, `plugin::trapped`, `plugin::deadline`, `plugin::memory`, `plugin::answer_too_large`,
    /// `plugin::broken_answer`.
    pub fn after_step(&mut self, info: &StepInfo) -> Result<Decision> {
        let info = scheduling::StepInfo {
            step: info.step,
            total_steps: info.total_steps,
            wall_clock_ms: info.wall_clock_ms,
            since_last_save_ms: info.since_last_save_ms,
            last_save_cost_ms: info.last_save_cost_ms,
            loss: info.loss,
        };
        let answer =
            self.plugin.call("after-step", |functions, store| functions.scheduling.call_after_step(store, info))?;
        Ok(Decision { save: answer.save, stop: answer.stop, reason: super::runtime::shown(&answer.reason) })
    }

    /// Everything the plugin remembers, for a checkpoint; `None` where it has no memory.
    ///
    /// # Errors
    /// `plugin::memory_too_large`, `plugin::refused`, and those of a failed call.
    pub fn save(&mut self) -> Result<Option<Vec<u8>>> {
        let memory = self.plugin.call("save", |functions, store| match &functions.memory {
            Some(memory) => Ok(memory.call_save(store)?.map(Some)),
            None => Ok(Ok(None)),
        })?;
        match &memory {
            Some(bytes) if bytes.len() > MEMORY_BYTES_MAX => {
                let identity = self.plugin.identity();
                Err(Error::new("plugin::memory_too_large", format!("{identity}: save gave {} bytes", bytes.len()))
                    .expected(format!("at most {MEMORY_BYTES_MAX} bytes"))
                    .help("this is a bug in the plugin: use another, or tell its author"))
            }
            _ => Ok(memory),
        }
    }

    /// Whether the plugin remembers anything.
    ///
    /// # Errors
    /// Those of starting it anew after a call that failed.
    pub fn remembers(&mut self) -> Result<bool> {
        self.plugin.call("save", |functions, _| Ok(Ok(functions.memory.is_some())))
    }

    /// Take up what [`CheckpointScheduler::save`] of the same component gave; `None` where that had no memory.
    ///
    /// # Errors
    /// `plugin::refused`, and those of a failed call.
    pub fn restore(&mut self, memory: Option<&[u8]>) -> Result<()> {
        let Some(bytes) = memory else { return Ok(()) };
        self.plugin.call("restore", |functions, store| match &functions.memory {
            Some(memory) => memory.call_restore(store, bytes),
            None => Ok(Err("it has no memory, but the checkpoint holds one".into())),
        })
    }
}
