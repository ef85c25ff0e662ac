//! Checks that stop a run whose plan or whose numbers cannot be trusted, instead of letting it finish.
//!
//! A gate is a function that looks at one thing: `Ok` says what it saw, an error what is wrong. What is done about it is
//! the configuration's choice ([`settle`]), and either way stands in provenance.

mod plan;
mod resources;
mod steps;

pub use plan::{nothing_trained, single_root, tokens_per_step};
pub use resources::{Bytes, MERGED, free_disk, free_memory, kernels_as_asked, least_disk, planned_memory, quantised};
pub use steps::{Movement, StepGates, finite, loss_spike, movement, moving_gradient};

use crate::config::Action;
use crate::error::{Error, Result};
use crate::run::provenance::{GateRecord, Verdict};
use std::collections::BTreeMap;

/// What the gates of a run said, by name.
pub type Records = BTreeMap<String, GateRecord>;

/// Lets the gate `name` look, unless it is off, writes down what it said and, where it found something, does what `action`
/// says: an error that ends the run, or a warning, which is returned.
///
/// # Errors
/// What the gate found, where it stops.
pub fn settle(
    records: &mut Records,
    name: &str,
    action: Action,
    look: impl FnOnce() -> Result<String>,
) -> Result<Option<String>> {
    let mut write = |verdict, found: &str| {
        records.insert(name.into(), GateRecord { action, verdict, found: found.into() });
    };
    if action == Action::Off {
        write(Verdict::Off, "it did not look");
        return Ok(None);
    }
    match look() {
        Ok(seen) => {
            write(Verdict::Passed, &seen);
            Ok(None)
        }
        Err(error) if action == Action::Warn => {
            write(Verdict::Warned, error.message());
            Ok(Some(format!("gate {name}: {}", error.message())))
        }
        Err(error) => {
            write(Verdict::Stopped, error.message());
            Err(let_through(error, name))
        }
    }
}

/// Says which key lets a run through.
fn let_through(error: Error, name: &str) -> Error {
    error.help(format!("to go on with a warning: --set gates.{name}=warn"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_stops_warns_or_does_not_look() {
        let found = || Err(Error::new("gate::zero_gradient", "nothing moves"));
        let mut records = Records::new();
        let error = settle(&mut records, "zero_gradient", Action::Stop, found).unwrap_err();
        assert!(error.to_string().contains("--set gates.zero_gradient=warn"), "{error}");
        let record = |records: &Records| (records["zero_gradient"].verdict, records["zero_gradient"].found.clone());
        assert_eq!(record(&records), (Verdict::Stopped, "nothing moves".into()));
        let warning = settle(&mut records, "zero_gradient", Action::Warn, found).unwrap();
        assert_eq!(warning.as_deref(), Some("gate zero_gradient: nothing moves"));
        assert_eq!(record(&records).0, Verdict::Warned);
        let look = || panic!("it is off");
        assert_eq!(settle(&mut records, "zero_gradient", Action::Off, look).unwrap(), None);
        assert_eq!(record(&records).0, Verdict::Off);
        settle(&mut records, "zero_gradient", Action::Stop, || Ok("norms from 1".into())).unwrap();
        assert_eq!(record(&records), (Verdict::Passed, "norms from 1".into()));
    }
}
