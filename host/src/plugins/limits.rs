//! What a plugin may use: the limits of its kind, and what the configuration or a flag says in their place.

use serde::{Deserialize, Serialize};

use super::Kind;
use crate::config::{LimitsConfig, PluginsConfig};

/// The limits that a plugin runs under, as provenance keeps them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// All linear memories of the plugin together, MiB.
    pub memory_mib: u64,
    /// What one call may hand over, MiB.
    pub answer_mib: u64,
    /// Log lines shown in a minute; the others are counted.
    pub log_lines_per_minute: u64,
    /// Time for starting: instantiation, `describe` and `configure` each, milliseconds.
    pub start_deadline_ms: u64,
    /// Time for each other call, milliseconds.
    pub call_deadline_ms: u64,
    /// Whether it may import the virtual WASI.
    pub wasi: bool,
}

impl Limits {
    /// The limits of a kind. A plan may take a while, once an epoch; a scheduler is called after every step; a filter may
    /// remember a whole corpus.
    pub fn of(kind: Kind) -> Self {
        let (memory_mib, answer_mib, call_deadline_ms) = match kind {
            Kind::Sampler => (1024, 256, 60_000),
            Kind::CheckpointScheduler => (256, 1, 2_000),
            Kind::CorpusFilter => (1024, 64, 60_000),
            Kind::Eligibility => (256, 1, 5_000),
            Kind::Exporter => (256, 64, 20_000),
        };
        Self {
            memory_mib,
            answer_mib,
            log_lines_per_minute: 60,
            start_deadline_ms: 20_000,
            call_deadline_ms,
            wasi: false,
        }
    }

    /// The limits of a kind as `[plugins.limits]` and `plugins.wasi` change them.
    pub fn configured(kind: Kind, plugins: &PluginsConfig) -> Self {
        let key = kind.config_key();
        let given = plugins.limits.get(key).copied().unwrap_or_default();
        Self { wasi: plugins.wasi.iter().any(|kind| kind == key), ..Self::of(kind).with(&given) }
    }

    /// These limits with the ones that are `given` in place of them.
    pub fn with(self, given: &LimitsConfig) -> Self {
        Self {
            memory_mib: given.memory_mib.unwrap_or(self.memory_mib),
            answer_mib: given.answer_mib.unwrap_or(self.answer_mib),
            log_lines_per_minute: given.log_lines_per_minute.unwrap_or(self.log_lines_per_minute),
            start_deadline_ms: given.start_deadline_ms.unwrap_or(self.start_deadline_ms),
            call_deadline_ms: given.call_deadline_ms.unwrap_or(self.call_deadline_ms),
            wasi: self.wasi,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        bytes(self.memory_mib)
    }

    pub(super) fn answer_bytes(&self) -> usize {
        bytes(self.answer_mib)
    }
}

fn bytes(mib: u64) -> usize {
    usize::try_from(mib).unwrap_or(usize::MAX).saturating_mul(1 << 20)
}
