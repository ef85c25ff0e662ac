//! The plugins of a run, found, checked and started.

use crate::config::PluginsConfig;
use crate::error::Result;
use crate::plugins::{CheckpointScheduler, CorpusFilter, Eligibility, Exporter, Identity, Kind, PluginRef, Sampler};

/// One plugin of each kind, loaded and configured.
pub struct Policies {
    /// Plans the epochs.
    pub sampler: Sampler,
    /// Decides when to save.
    pub scheduler: CheckpointScheduler,
    /// Decides which records are trained.
    pub filter: CorpusFilter,
    /// Decides whether they may be.
    pub eligibility: Eligibility,
    /// Lays out the exported adapter.
    pub exporter: Exporter,
}

impl Policies {
    /// Resolves and starts the plugin of each kind that `plugins` names.
    ///
    /// # Errors
    /// Class `plugin`.
    pub fn load(plugins: &PluginsConfig) -> Result<Self> {
        let find = |kind: Kind| -> Result<(PluginRef, Option<&serde_json::Value>)> {
            Ok((PluginRef::configured(kind, plugins)?, plugins.config.get(kind.config_key())))
        };
        let (sampler, settings) = find(Kind::Sampler)?;
        let sampler = Sampler::load(&sampler, settings)?;
        let (scheduler, settings) = find(Kind::CheckpointScheduler)?;
        let scheduler = CheckpointScheduler::load(&scheduler, settings)?;
        let (filter, settings) = find(Kind::CorpusFilter)?;
        let filter = CorpusFilter::load(&filter, settings)?;
        let (eligibility, settings) = find(Kind::Eligibility)?;
        let eligibility = Eligibility::load(&eligibility, settings)?;
        let (exporter, settings) = find(Kind::Exporter)?;
        let exporter = Exporter::load(&exporter, settings)?;
        Ok(Self { sampler, scheduler, filter, eligibility, exporter })
    }

    /// Which plugins they are.
    pub fn identities(&self) -> [&Identity; 5] {
        let Self { sampler, scheduler, filter, eligibility, exporter } = self;
        [sampler.identity(), scheduler.identity(), filter.identity(), eligibility.identity(), exporter.identity()]
    }
}
