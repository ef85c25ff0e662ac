//! `tunehost smoke`: steps of a run's own shapes, each shape in a process of its own, so that running out of memory is a result.
//!
//! What was measured is kept in a file ([`path_of`], its schema in `smoke.md`) that `plan` and `run` read, as long as what it
//! depends on is what it was ([`Fingerprint`]).

pub mod child;
mod file;
mod fingerprint;
pub mod fit;
mod measure;
mod shapes;
mod text;

pub use file::{Found, Outcome, Prediction, ShapeResult, Smoke, path_of};
pub use fingerprint::Fingerprint;
pub use measure::{Options, measure};
pub use shapes::{Asked, asked};

#[cfg(test)]
mod tests;
