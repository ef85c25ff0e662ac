//! tunehost: LoRA tuning of Gemma-family mixture-of-experts models, with policy in sandboxed WebAssembly components.
//!
//! Data flows one way: config, corpus, sampler's plan, batches, engine, optimiser, scheduler, checkpoint, export.

pub mod bench;
pub mod cli;
pub mod config;
pub mod corpus;
pub mod device;
#[cfg(test)]
mod documented;
pub mod eligibility;
pub mod error;
pub mod export;
pub mod generate;
pub mod hash;
mod job;
mod mapped;
pub mod model;
pub mod plan;
pub mod plugins;
pub mod probe;
pub mod profile;
pub mod report;
pub mod run;
pub mod smoke;
pub mod train;
mod user;
