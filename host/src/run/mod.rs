//! The run folder: what a run writes down, so that it can be trusted, resumed and compared.
//!
//! Nothing here deletes or overwrites what it did not write itself, and only [`retention`] removes what it did. A file that matters is written beside its place,
//! synced and renamed ([`atomic`]); the logs that grow line by line ([`metrics`]) are cut back to the checkpoint when a
//! run is resumed.

pub mod atomic;
pub mod card;
pub mod changes;
pub mod checkpoint;
pub mod clock;
pub mod diff;
pub mod folder;
pub mod lease;
mod lines;
mod lock;
pub mod machine;
pub mod manifest;
pub mod metrics;
pub mod provenance;
pub mod retention;
pub mod signal;
pub mod verify;
mod written;
