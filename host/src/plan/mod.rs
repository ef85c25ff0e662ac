//! What a run will take, from headers, configuration and lengths alone: no weight is read, nothing is computed on a device.
//!
//! Every section says where its numbers come from ([`Source`]), and every number's name ends in its unit.

pub mod blocks;
pub mod memory;
pub mod phases;
pub mod report;
pub mod steps;
mod text;
pub mod work;

use serde::{Deserialize, Serialize};
use std::fmt::{self, Display, Formatter};

/// Where the numbers of a section come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Read off files, plugins or the system.
    Measured,
    /// Follows from shapes and lengths by arithmetic.
    Computed,
    /// The same, from a sample of the lengths.
    Estimated,
    /// Stated, not known.
    Assumed,
}

impl Source {
    /// As texts call it.
    pub fn name(self) -> &'static str {
        ["measured", "computed", "estimated", "assumed"][self as usize]
    }
}

/// What was measured more than once: how often, and where the values lie. The unit stands in the name of what has this type.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Measurements.
    pub n: usize,
    /// The middle one, of an even number the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// Of `values`; nothing where there is none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (n, min, max) = (sorted.len(), *sorted.first()?, *sorted.last()?);
        Some(Self { n, median: (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0, min, max })
    }
}

/// `0.1230 (0.1200 to 0.1400, n = 8)`.
impl Display for Spread {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let [median, min, max] = [self.median, self.min, self.max].map(digits);
        write!(out, "{median} ({min} to {max}, n = {})", self.n)
    }
}

/// Four digits of a number, as many decimals as that takes.
fn digits(value: f64) -> String {
    let before = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    format!("{value:.*}", (3 - before).clamp(0, 9) as usize)
}

#[cfg(test)]
mod tests;
