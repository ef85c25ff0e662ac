//! What times were measured on, as the reports of `profile` and `bench` begin.

use crate::config::Config;
use crate::device;
use crate::error::Result;
use crate::plan::Source;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

/// A device and the kernels that a run resolves to there.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// Of times.
    pub source: Source,
    /// Of operations and bytes: the kernels tell them from shapes.
    pub work_source: Source,
    /// Where it ran.
    pub device: String,
    /// Threads of the CPU that computed.
    pub threads: usize,
    /// What every kernel resolves to there.
    pub resolved: BTreeMap<&'static str, String>,
    /// Hash of that, as a run's provenance has it.
    pub kernels_sha256: String,
}

impl Setting {
    /// That of a run of `config` in this process.
    ///
    /// # Errors
    /// `device::unavailable`, `device::unsupported`.
    pub fn of(config: &Config) -> Result<Self> {
        let resolved = BTreeMap::from(device::kernels(&config.model.device, config.dtypes())?);
        Ok(Self {
            source: Source::Measured,
            work_source: Source::Computed,
            device: config.model.device.clone(),
            threads: rayon::current_num_threads(),
            kernels_sha256: device::kernels_sha256(resolved.iter().map(|(kernel, by)| (*kernel, &by[..]))),
            resolved,
        })
    }
}

/// `cpu, 2 threads, kernels sha256 0123...`
impl Display for Setting {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        write!(out, "{}, {} threads, kernels sha256 {}", self.device, self.threads, self.kernels_sha256)
    }
}
