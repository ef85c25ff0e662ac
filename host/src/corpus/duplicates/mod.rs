//! Records that say the same: among those trained, among those held out, and across the two.

mod buckets;
mod report;
mod sketch;

pub use report::{DuplicateReport, Duplicates, Likeness, RootDuplicates};
pub use sketch::Sketch;

use buckets::Buckets;
use rayon::prelude::*;
use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Records at least this alike are near duplicates.
pub const NEAR: f64 = 0.8;

/// A record as it is compared.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its id.
    pub id: Arc<str>,
    /// Index into the corpus' roots.
    pub root: u32,
    /// The side of the split it is on.
    pub held_out: bool,
    /// What it says.
    pub sketch: Sketch,
}

/// One record that is like another; both are indices into the entries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// The record.
    pub record: usize,
    /// The one that it is like.
    pub like: usize,
    /// How alike they are, [`NEAR`] to 1.
    pub similarity: f64,
    /// Whether their content is equal.
    pub exact: bool,
}

impl Pair {
    fn new(entries: &[Entry], record: usize, like: usize) -> Self {
        let (a, b) = (&entries[record].sketch, &entries[like].sketch);
        Self { record, like, similarity: a.similarity(b), exact: a.exact == b.exact }
    }
}

/// Each record that is like an earlier one on its side of the split, with that one: the first with the same content, or else
/// the one most like it. A record that is like an earlier one is not compared with later ones, so that leaving out all that are
/// found leaves one of each kind.
pub fn duplicates(entries: &[Entry]) -> Vec<Pair> {
    let mut found: Vec<Pair> = [false, true].iter().flat_map(|&held_out| of_side(entries, held_out)).collect();
    found.sort_by_key(|pair| pair.record);
    found
}

fn of_side(entries: &[Entry], held_out: bool) -> Vec<Pair> {
    let mut firsts = HashMap::new();
    let mut found = Vec::new();
    let mut distinct = Vec::new();
    for (i, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.held_out == held_out) {
        match firsts.entry(entry.sketch.exact) {
            Slot::Occupied(first) => found.push(Pair::new(entries, i, *first.get() as usize)),
            Slot::Vacant(first) => {
                first.insert(i as u32);
                distinct.push(i as u32);
            }
        }
    }
    drop(firsts);
    let buckets = Buckets::shared(entries, &distinct);
    let mut compared_with = vec![false; entries.len()];
    for i in distinct.into_iter().map(|i| i as usize) {
        let earlier = buckets.like(&entries[i].sketch).into_iter().filter(|&j| j < i && compared_with[j]);
        let pairs = earlier.map(|j| Pair::new(entries, i, j)).filter(|pair| pair.similarity >= NEAR);
        match pairs.reduce(|best, pair| if pair.similarity > best.similarity { pair } else { best }) {
            Some(pair) => found.push(pair),
            None => compared_with[i] = true,
        }
    }
    found
}

/// What is alike across the split.
#[derive(Debug, Default)]
pub struct Leaks {
    /// Each training record that is like a held-out one, with the one most like it.
    pub pairs: Vec<Pair>,
    /// Every held-out record that a training record is like.
    pub held_out: HashSet<usize>,
}

/// What is alike across the split among the entries `used`. Pairs are not kept: many copies on both sides have too many.
pub fn leaks(entries: &[Entry], used: impl Fn(usize) -> bool + Sync) -> Leaks {
    let held_out = (0..entries.len()).filter(|&i| entries[i].held_out && used(i)).map(|i| i as u32);
    let buckets = Buckets::new(entries, &held_out.collect::<Vec<_>>());
    let of_record = |mut leaks: Leaks, i: usize| {
        let pairs = buckets.like(&entries[i].sketch).into_iter().map(|j| Pair::new(entries, i, j));
        let alike = pairs.filter(|pair| pair.similarity >= NEAR).inspect(|pair| {
            leaks.held_out.insert(pair.like);
        });
        let most = alike.reduce(|best, pair| if pair.similarity > best.similarity { pair } else { best });
        leaks.pairs.extend(most);
        leaks
    };
    let trained = (0..entries.len()).into_par_iter().filter(|&i| !entries[i].held_out && used(i));
    trained.fold(Leaks::default, of_record).reduce(Leaks::default, |mut before, mut after| {
        before.pairs.append(&mut after.pairs);
        before.held_out.extend(after.held_out);
        before
    })
}

#[cfg(test)]
mod tests {
    use crate::config::{DataConfig, Dedup, Leakage, SplitBy};
    use crate::corpus::tests::{config, file, load_tiny};
    use crate::corpus::{Corpus, fixtures};

    /// Two sources of small talk that share a half, one of them under other ids; split so that copies are on both sides.
    fn load_overlapping(dedup: Dedup, leakage: Leakage) -> Corpus {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(fixtures::path("corpus/smalltalk.jsonl")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let renamed: Vec<String> =
            lines[100..300].iter().map(|line| line.replace("\"id\": \"", "\"id\": \"b ")).collect();
        let one = file(folder.path(), "one.jsonl", &lines[..200]);
        let two = file(folder.path(), "two.jsonl", &renamed.iter().map(String::as_str).collect::<Vec<_>>());
        let sources = config(&[(&one, "one"), (&two, "two")]);
        let split_by = SplitBy::Record;
        load_tiny(&DataConfig { held_out: 0.3, split_by, dedup, leakage, ..sources }).unwrap()
    }

    fn distinct(records: &[crate::corpus::Record]) -> usize {
        records.iter().map(|record| record.tokens.ids()).collect::<std::collections::HashSet<_>>().len()
    }

    #[test]
    fn copies_across_sources_are_counted_and_left_out_where_that_is_asked_for() {
        let off = load_overlapping(Dedup::Off, Leakage::Report);
        assert_eq!(off.train.len() + off.held_out.len(), 400);
        let copies = (off.train.len() - distinct(&off.train)) + (off.held_out.len() - distinct(&off.held_out));
        let roots = &off.duplicates.roots;
        assert_eq!((roots[0].exact + roots[1].exact) as usize, copies);
        assert!(roots[1].exact > 50 && roots.iter().all(|root| root.left_out == 0), "{roots:?}");
        let copied =
            off.copied(&off.held_out.iter().collect::<Vec<_>>()).iter().filter(|copied| **copied).count() as u64;
        assert!(copied > 20 && off.duplicates.leaked() >= copied, "{copied}: {}", off.duplicates);
        assert!(off.warnings.iter().any(|warning| warning.contains("data.leakage")), "{:?}", off.warnings);

        let exact = load_overlapping(Dedup::Exact, Leakage::Report);
        assert_eq!(exact.train.len() + exact.held_out.len(), 400 - copies);
        assert_eq!(distinct(&exact.train), exact.train.len());
        assert!(off.held_out.iter().filter(|record| exact.held_out.contains(record)).count() == exact.held_out.len());

        let near = load_overlapping(Dedup::Near, Leakage::Drop);
        let left_out: u64 = near.duplicates.roots.iter().map(|root| root.left_out).sum();
        assert_eq!(near.train.len() + near.held_out.len(), 400 - left_out as usize);
        assert!(near.train.len() < exact.train.len() && near.duplicates.leaked() == 0);
        assert!(!near.copied(&near.held_out.iter().collect::<Vec<_>>()).contains(&true));
        assert_eq!(load_overlapping(Dedup::Near, Leakage::Drop).duplicates, near.duplicates, "the same in every run");
    }
}
