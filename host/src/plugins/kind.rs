//! The kinds of policy a component can hold.

use std::fmt;

use crate::error::{Error, Result};

/// What a plugin decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Which records share a micro-batch, and the order.
    Sampler,
    /// When a run is saved, and whether it stops.
    CheckpointScheduler,
    /// Which records a run trains on, and as what.
    CorpusFilter,
    /// Whether a run may train on corpora that something stands against.
    Eligibility,
    /// What is written when a tuned model leaves tunehost.
    Exporter,
}

impl Kind {
    /// Every kind there is.
    pub const ALL: [Kind; 5] =
        [Kind::Sampler, Kind::CheckpointScheduler, Kind::CorpusFilter, Kind::Eligibility, Kind::Exporter];

    /// The name of the kind's world in `wit/`, used on the command line: `checkpoint-scheduler`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Sampler => "sampler",
            Kind::CheckpointScheduler => "checkpoint-scheduler",
            Kind::CorpusFilter => "corpus-filter",
            Kind::Eligibility => "eligibility",
            Kind::Exporter => "exporter",
        }
    }

    /// The key of the kind in the configuration: `checkpoint_scheduler`.
    pub fn config_key(self) -> &'static str {
        match self {
            Kind::Sampler => "sampler",
            Kind::CheckpointScheduler => "checkpoint_scheduler",
            Kind::CorpusFilter => "corpus_filter",
            Kind::Eligibility => "eligibility",
            Kind::Exporter => "exporter",
        }
    }

    /// The interface in `wit/` that only a component of this kind exports.
    pub(super) fn interface(self) -> &'static str {
        match self {
            Kind::Sampler => "sampling",
            Kind::CheckpointScheduler => "scheduling",
            Kind::CorpusFilter => "filtering",
            Kind::Eligibility => "ruling",
            Kind::Exporter => "exporting",
        }
    }

    /// The kind of this name in either spelling, [`Kind::name`] or [`Kind::config_key`].
    ///
    /// # Errors
    /// `usage::unknown_plugin_kind`.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name || kind.config_key() == name).ok_or_else(|| {
            Error::new("usage::unknown_plugin_kind", format!("there is no plugin kind {name:?}"))
                .expected(Self::ALL.map(Kind::name).join(" or "))
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
