//! Policy plugins: sandboxed WebAssembly components behind the contract in `wit/`.
//!
//! [`PluginRef::resolve`] finds and checks a plugin's bytes; [`Sampler`], [`CheckpointScheduler`], [`CorpusFilter`],
//! [`Eligibility`] and [`Exporter`] run it. Nothing a plugin does can reach past its answer: it has no imports but a log
//! (and a virtual WASI where that was allowed), its [`Limits`] bound memory and time, and each answer is checked before it
//! is used.

pub mod bench;
mod bundled;
mod cache;
pub mod chart;
pub mod check;
pub mod contract;
mod eligibility;
mod exporter;
mod filter;
mod imports;
mod kind;
mod limits;
mod listing;
mod log;
mod metadata;
pub mod mixture;
mod plan;
pub mod project;
mod reference;
mod runtime;
mod sampler;
mod scheduler;
mod schema;
mod show;
#[allow(missing_docs)] // generated from wit/
mod since_v0_1_0;
mod state;
mod trap;
mod versions;
mod wasi;

pub use eligibility::{Blocker, CaseFile, CorpusEntry, Eligibility, Grant, Ruling};
pub use exporter::{
    BaseTensor, ExportPlan, Exporter, PlannedTensor, QuantizedModule, Scheme, Source, TensorFile, Tuned,
};
pub use filter::{Candidate, CorpusFilter, Verdict};
pub use kind::Kind;
pub use limits::Limits;
pub use listing::{Listing, json, list, table};
pub use metadata::Metadata;
pub use plan::{Plan, PlanRequest};
pub use reference::{Identity, Origin, PluginRef};
pub use runtime::Description;
pub use sampler::Sampler;
pub use scheduler::{CheckpointScheduler, Decision, StepInfo};
pub use show::Sheet;

#[cfg(test)]
mod tests;
