//! The committed components under the real runtime.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::error::Error;

mod cache;
mod conformance;
mod contract;
mod exporters;
mod filters;
mod hostile;
mod log;
mod projects;
mod references;
mod rulings;
mod samplers;
mod schedulers;
mod wasi;

fn bundled(kind: Kind, name: &str) -> PluginRef {
    PluginRef::resolve(kind, name, &[]).unwrap()
}

fn sampler(name: &str, config: Option<Value>) -> Sampler {
    Sampler::load(&bundled(Kind::Sampler, name), config.as_ref()).unwrap()
}

/// `count` lengths between 1 and `longest`, short ones more often, the same at every run.
fn lengths(count: u32, longest: u32) -> Vec<u32> {
    (0..count)
        .map(|i| {
            let uniform = f64::from(i.wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 24);
            (uniform.powi(3) * f64::from(longest)) as u32 + 1
        })
        .map(|length| length.min(longest))
        .collect()
}

fn request(lengths: &[u32]) -> PlanRequest<'_> {
    PlanRequest {
        lengths,
        // Any column of the right length will do where roots are not looked at.
        roots: lengths,
        epoch: 0,
        seed: 42,
        max_seq_len: 4096,
        rows_per_batch: 2,
        accumulation: 4,
        token_budget: None,
    }
}

/// Padding as a share of all tokens.
fn padding(plan: &Plan, lengths: &[u32]) -> f64 {
    let (mut real, mut padded) = (0u64, 0u64);
    for rows in plan.batches() {
        let tokens: Vec<u64> =
            rows.map(|row| row.iter().map(|&record| u64::from(lengths[record as usize])).sum()).collect();
        real += tokens.iter().sum::<u64>();
        padded += tokens.iter().max().unwrap() * tokens.len() as u64;
    }
    1.0 - real as f64 / padded as f64
}

/// The error's code must be `code`, and its text must hold each of `parts`.
#[track_caller]
fn assert_error(error: &Error, code: &str, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.code(), code, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}
