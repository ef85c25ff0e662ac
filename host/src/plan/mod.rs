//! What a run will take, from headers, configuration and lengths alone: no weight is read, nothing is computed on a device.
//!
//! Every section says where its numbers come from ([`Source`]), and every number's name ends in its unit.

pub mod blocks;
pub mod memory;
pub mod report;
pub mod steps;
mod text;
pub mod work;

use serde::Serialize;

/// Where the numbers of a section come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Read off files, plugins or the system.
    Measured,
    /// Follows from shapes and lengths by arithmetic.
    Computed,
    /// Stated, not known.
    Assumed,
}

impl Source {
    /// As texts call it.
    pub fn name(self) -> &'static str {
        ["measured", "computed", "assumed"][self as usize]
    }
}

#[cfg(test)]
mod tests;
