//! Plugins of the kind `sampler`.

use super::plan::{Plan, PlanRequest};
use super::reference::{Identity, PluginRef};
use super::runtime::Plugin;
use super::since_v0_1_0::sampling;
use crate::error::{Error, Result};

/// A running sampler.
pub struct Sampler {
    plugin: Plugin<sampling::Guest>,
}

impl Sampler {
    /// Start a sampler with its settings, `[plugins.config.sampler]`.
    ///
    /// # Errors
    /// `plugin::config_refused`, `plugin::wrong_contract`, and those of a failed call.
    pub fn load(reference: &PluginRef, config: Option<&serde_json::Value>) -> Result<Self> {
        let plugin = Plugin::load(reference, config, |component, store, instance| {
            sampling::GuestIndices::new(component)?.load(store, instance)
        })?;
        Ok(Self { plugin })
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        self.plugin.identity()
    }

    /// Lay out one epoch. The plan that comes back keeps every rule of `wit/sampler.wit`.
    ///
    /// # Errors
    /// `plugin::refused` with the sampler's own reason, `plugin::invalid_plan`, `plugin::trapped`, `plugin::deadline`,
    /// `plugin::memory`, `plugin::answer_too_large`, `plugin::broken_answer`.
    pub fn plan(&mut self, request: &PlanRequest) -> Result<Plan> {
        if request.lengths.len() != request.roots.len() {
            let (lengths, roots) = (request.lengths.len(), request.roots.len());
            return Err(Error::new("run::bad_plan_request", format!("{lengths} lengths but {roots} roots")));
        }
        let columns = sampling::PlanRequest {
            lengths: request.lengths,
            roots: request.roots,
            epoch: request.epoch,
            seed: request.seed,
            max_seq_len: request.max_seq_len,
            rows_per_batch: request.rows_per_batch,
            accumulation: request.accumulation,
            token_budget: request.token_budget,
        };
        let answer = self.plugin.call("plan", |functions, store| functions.call_plan(store, columns))?;
        let sampling::EpochPlan { records, row_ends, batch_ends, dropped } = answer;
        let plan = Plan { records, row_ends, batch_ends, dropped };
        plan.check(request, self.plugin.identity())?;
        Ok(plan)
    }
}
