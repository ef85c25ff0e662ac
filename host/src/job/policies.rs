//! The plugins of a run, found, checked and started.

use super::scheduling::Scheduling;
use crate::config::PluginsConfig;
use crate::error::Result;
use crate::plugins::{CorpusFilter, Eligibility, Exporter, Identity, Kind, PluginRef, Sampler};
use crate::run::clock::Until;

/// One plugin of each kind, loaded and configured.
pub struct Policies {
    /// Plans the epochs.
    pub sampler: Sampler,
    /// Decides when to save, and when to end.
    pub scheduling: Scheduling,
    /// Decides which records are trained.
    pub filter: CorpusFilter,
    /// Decides whether they may be.
    pub eligibility: Eligibility,
    /// Lays out the exported adapter.
    pub exporter: Exporter,
}

impl Policies {
    /// Resolves and starts the plugin of each kind that `plugins` names, for a process that is to end before `until`.
    ///
    /// # Errors
    /// Class `plugin`.
    pub fn load(plugins: &PluginsConfig, until: Option<&Until>) -> Result<Self> {
        let find = |kind: Kind| -> Result<(PluginRef, Option<&serde_json::Value>)> {
            Ok((PluginRef::configured(kind, plugins)?, plugins.config.get(kind.config_key())))
        };
        let (sampler, settings) = find(Kind::Sampler)?;
        let sampler = Sampler::load(&sampler, settings)?;
        let (scheduler, settings) = find(Kind::CheckpointScheduler)?;
        let scheduling = Scheduling::load(&scheduler, settings, until)?;
        let (filter, settings) = find(Kind::CorpusFilter)?;
        let filter = CorpusFilter::load(&filter, settings)?;
        let (eligibility, settings) = find(Kind::Eligibility)?;
        let eligibility = Eligibility::load(&eligibility, settings)?;
        let (exporter, settings) = find(Kind::Exporter)?;
        let exporter = Exporter::load(&exporter, settings)?;
        Ok(Self { sampler, scheduling, filter, eligibility, exporter })
    }

    /// Which plugins they are.
    pub fn identities(&self) -> [&Identity; 5] {
        let Self { sampler, scheduling, filter, eligibility, exporter } = self;
        [sampler.identity(), scheduling.run.identity(), filter.identity(), eligibility.identity(), exporter.identity()]
    }
}
