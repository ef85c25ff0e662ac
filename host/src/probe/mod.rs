//! What could spoil a run without an error, looked at before it: which keys a query sees, what a template makes of a
//! conversation, whether every adapter learns, what padding costs, whether a step gives the same bytes again.
//!
//! A probe measures and reports; its verdict is an error of the class `probe` where something is wrong.

pub mod adapters;
pub mod determinism;
pub mod mask;
pub mod padding;
pub mod template;

/// What to do about numbers that are none.
const NOT_FINITE: &str =
    "the base or the adapter that the run starts from holds values that are not finite, or its files are damaged";
