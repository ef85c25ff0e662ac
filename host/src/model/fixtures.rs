//! Paths and headers that several tests share.

use super::config::TextConfig;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file or folder of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// Configuration and tensor headers of the published 26B-A4B checkpoint.
pub fn large_model_headers() -> (TextConfig, BTreeMap<String, (Vec<usize>, String)>) {
    let read = |name: &str| std::fs::read(fixture(name)).unwrap();
    let config = serde_json::from_slice(&read("gemma4-26b-a4b-config.json")).unwrap();
    let tensors: Vec<(String, Vec<usize>)> = serde_json::from_slice(&read("gemma4-26b-a4b-tensors.json")).unwrap();
    let found = tensors.into_iter().map(|(name, shape)| (name, (shape, "shard".to_string()))).collect();
    (TextConfig::parse(&config).unwrap(), found)
}
