//! Write a tunehost plugin in Rust.
//!
//! A plugin is a type that implements [`Plugin`] and the trait of its kind, and one line that exports it:
//!
//! ```ignore
//! #[derive(serde::Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Config { n: u64 }
//! struct EveryN(u64);
//!
//! impl Plugin for EveryN {
//!     type Config = Config;
//!     const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "required": ["n"],
//!         "properties": {"n": {"type": "integer", "minimum": 1, "description": "Steps between two saves"}}}"#;
//!     fn new(config: Config) -> Result<Self, String> {
//!         if config.n == 0 { Err("n must be at least 1".into()) } else { Ok(Self(config.n)) }
//!     }
//! }
//! impl CheckpointScheduler for EveryN {
//!     fn after_step(&mut self, info: StepInfo) -> Result<Decision, String> { /* ... */ }
//! }
//! tunehost_plugin_sdk::export_checkpoint_scheduler!(EveryN);
//! ```
//!
//! One that remembers anything from call to call implements [`Memory`] too and is exported with
//! `export_checkpoint_scheduler!(EveryN, with memory)`, so that a resumed run finds what it remembered.
//!
//! Name, version and description are those of the plugin's `Cargo.toml`.

mod bindings;
mod checkpoint;
mod export;
mod plan;
mod rng;

pub use bindings::{
    Action, CaseFile, Chunk, Decision, Dtype, ExportPlan, GgufEntry, GgufValue, Plan, PlanRequest, QuantizedModule,
    Ruling, Scheme, Source, StepInfo, Tuned, Verdicts,
};
pub use checkpoint::Part;
pub use export::{CheckpointScheduler, CorpusFilter, Eligibility, Exporter, Memory, Plugin, Sampler};
pub use rng::SplitMix64;

#[doc(hidden)]
pub mod macro_support {
    pub use crate::bindings::{checkpoint_scheduler, common, corpus_filter, eligibility, exporter, memory, sampler};
    pub use crate::export::{configure, with_plugin};
}

/// Write one line to tunehost's log, or to standard error in a native test, where there is no tunehost.
pub mod log {
    use crate::bindings::common::tunehost::plugin::host::{self, Level};

    /// Details for the plugin's author.
    pub fn debug(message: &str) {
        write(Level::Debug, message);
    }

    /// What the user may want to know.
    pub fn info(message: &str) {
        write(Level::Info, message);
    }

    /// What the user should look at.
    pub fn warn(message: &str) {
        write(Level::Warn, message);
    }

    fn write(level: Level, message: &str) {
        if cfg!(target_arch = "wasm32") {
            host::log(level, message);
        } else {
            eprintln!("{level:?}: {message}");
        }
    }
}
