//! Which held-out records a training record has the very same tokens as.

use super::encode::Record;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The held-out records, found by what their tokens hash to.
pub struct Copies<'a> {
    held_out: &'a [Record],
    by_hash: Vec<(u64, u32)>,
    found: HashSet<Arc<str>>,
}

impl<'a> Copies<'a> {
    /// Of these, none found yet; `hashes` has [`hash`] of each.
    pub fn of(held_out: &'a [Record], hashes: impl Iterator<Item = u64>) -> Self {
        let mut by_hash: Vec<_> = hashes.zip(0..).collect();
        by_hash.sort_unstable();
        Self { held_out, by_hash, found: HashSet::new() }
    }

    /// Notes those that are like `trained`.
    pub fn note(&mut self, trained: &Record) {
        let hash = hash(trained);
        let first = self.by_hash.partition_point(|&(of, _)| of < hash);
        for (_, i) in self.by_hash[first..].iter().take_while(|&&(of, _)| of == hash) {
            let record = &self.held_out[*i as usize];
            if record.tokens.id_bytes() == trained.tokens.id_bytes() {
                self.found.insert(record.id.clone());
            }
        }
    }

    /// The ids of those found.
    pub fn finish(self) -> HashSet<Arc<str>> {
        self.found
    }
}

/// A number of the record's tokens.
pub fn hash(record: &Record) -> u64 {
    let mut hasher = DefaultHasher::new();
    record.tokens.id_bytes().hash(&mut hasher);
    hasher.finish()
}
