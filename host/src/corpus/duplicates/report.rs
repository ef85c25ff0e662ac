//! What was found, and what is left out of it.

use super::{Entry, Leaks, NEAR, Pair, duplicates, leaks};
use crate::config::{Dedup, Leakage};
use serde::Serialize;
use std::collections::HashSet;
use std::fmt;

/// Pairs of each kind that are printed.
const PRINTED_MAX: usize = 3;

/// Records that say the same; a part of `corpus-report.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DuplicateReport {
    /// Similarity from which records count as near duplicates: the Jaccard index of their runs of five words, estimated.
    pub near: f64,
    /// One entry for each root.
    pub roots: Vec<RootDuplicates>,
    /// Records like an earlier one on their side of the held-out split, in the order of the corpus.
    pub duplicates: Vec<Likeness>,
    /// Training records like a held-out one, with the one most like each.
    pub leaks: Vec<Likeness>,
}

/// One root's account.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RootDuplicates {
    /// The root.
    pub root: String,
    /// Records that were compared: those that the filter and the length limit left.
    pub records: u64,
    /// Of them, with the content of an earlier one.
    pub exact: u64,
    /// Of them, like an earlier one.
    pub near: u64,
    /// Of them, held out.
    pub held_out: u64,
    /// Held-out records that a training record is like, of any root.
    pub leaked: u64,
    /// Records left out as duplicates, or since a held-out one is like them.
    pub left_out: u64,
}

/// A record and one that it is like.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Likeness {
    /// Its id.
    pub id: String,
    /// The other's.
    pub like: String,
    /// How alike they are, to two decimals.
    pub similarity: f64,
    /// Whether their content is equal.
    pub exact: bool,
    /// Whether the first is left out for it.
    pub left_out: bool,
}

/// The records of a corpus and which of them are left out.
pub struct Duplicates {
    entries: Vec<Entry>,
    left_out: HashSet<usize>,
    report: DuplicateReport,
}

impl Duplicates {
    /// Finds what is left out of `entries`, all records in their order, before caps and weights.
    pub fn find(entries: Vec<Entry>, roots: &[String], dedup: Dedup, leakage: Leakage) -> Self {
        let of_root = |root: &String| RootDuplicates { root: root.clone(), ..RootDuplicates::default() };
        let report = DuplicateReport { near: NEAR, roots: roots.iter().map(of_root).collect(), ..Default::default() };
        let mut found = Self { entries, left_out: HashSet::new(), report };
        for entry in &found.entries {
            let root = &mut found.report.roots[entry.root as usize];
            root.records += 1;
            root.held_out += u64::from(entry.held_out);
        }
        for pair in duplicates(&found.entries) {
            let left_out = dedup == Dedup::Near || dedup == Dedup::Exact && pair.exact;
            let root = &mut found.report.roots[found.entries[pair.record].root as usize];
            *(if pair.exact { &mut root.exact } else { &mut root.near }) += 1;
            if left_out {
                found.left_out.insert(pair.record);
            }
            found.report.duplicates.push(found.likeness(&pair, left_out));
        }
        if leakage == Leakage::Drop {
            let leaked = leaks(&found.entries, |i| !found.left_out.contains(&i));
            found.note_leaks(&leaked, true);
            found.left_out.extend(leaked.pairs.iter().map(|pair| pair.record));
        }
        for i in &found.left_out {
            found.report.roots[found.entries[*i].root as usize].left_out += 1;
        }
        found
    }

    /// How many entries there are.
    pub fn compared(&self) -> usize {
        self.entries.len()
    }

    /// The entries that are left out.
    pub fn left_out(&self) -> &HashSet<usize> {
        &self.left_out
    }

    /// The account, once it is known which entries caps and weights leave to be `used`: what is still alike across the split
    /// is told of these.
    pub fn finish(mut self, used: &[bool]) -> DuplicateReport {
        let leaked = leaks(&self.entries, |i| used[i]);
        self.note_leaks(&leaked, false);
        self.report
    }

    fn note_leaks(&mut self, leaks: &Leaks, left_out: bool) {
        if !left_out {
            leaks.held_out.iter().for_each(|&i| self.report.roots[self.entries[i].root as usize].leaked += 1);
        }
        let leaked = leaks.pairs.iter().map(|pair| self.likeness(pair, left_out)).collect::<Vec<_>>();
        self.report.leaks.extend(leaked);
    }

    fn likeness(&self, pair: &Pair, left_out: bool) -> Likeness {
        let id = |i: usize| self.entries[i].id.to_string();
        let similarity = (pair.similarity * 100.0).round() / 100.0;
        Likeness { id: id(pair.record), like: id(pair.like), similarity, exact: pair.exact, left_out }
    }
}

impl DuplicateReport {
    /// Held-out records that a trained one is like.
    pub fn leaked(&self) -> u64 {
        self.roots.iter().map(|root| root.leaked).sum()
    }
}

/// A table of the roots and the first pairs; nothing where no two records are alike.
impl fmt::Display for DuplicateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.duplicates.is_empty() && self.leaks.is_empty() {
            return Ok(());
        }
        let columns = ("records", "exact copies", "near copies", "left out", "held out", "like a trained one");
        let (records, exact, near, left_out, held_out, leaked) = columns;
        writeln!(
            f,
            "{:<20} {records:>9} {exact:>13} {near:>12} {left_out:>9} {held_out:>9} {leaked:>19}",
            "duplicates"
        )?;
        for r in &self.roots {
            let RootDuplicates { root, records, exact, near, held_out, leaked, left_out } = r;
            writeln!(f, "{root:<20} {records:>9} {exact:>13} {near:>12} {left_out:>9} {held_out:>9} {leaked:>19}")?;
        }
        let near = self.duplicates.iter().filter(|pair| !pair.exact).take(PRINTED_MAX);
        for pair in near.chain(self.leaks.iter().take(PRINTED_MAX)) {
            let held_out = if self.leaks.contains(pair) { "held out " } else { "" };
            writeln!(f, "  {:.2}  {} is like {held_out}{}", pair.similarity, pair.id, pair.like)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sketch;
    use super::*;
    use crate::corpus::reader::Content;

    fn words(range: std::ops::Range<u32>) -> String {
        range.map(|i| format!("word{i} ")).collect()
    }

    /// Of root 0; the id's first letter says on which side.
    fn entry(id: &str, text: &str) -> Entry {
        let sketch = Sketch::of(&Content::Text(text.into()));
        Entry { id: id.into(), root: 0, held_out: id.starts_with('h'), sketch }
    }

    /// `t1` and `t3` say the same, `t4` nearly so; `h1` is like `t5`.
    fn entries() -> Vec<Entry> {
        let (one, five) = (words(0..100), words(500..600));
        vec![
            entry("t1", &one),
            entry("t2", &words(200..300)),
            entry("h1", &five),
            entry("t3", &one),
            entry("t4", &format!("{one} and more")),
            entry("t5", &words(502..600)),
            entry("h2", &words(700..800)),
            entry("h3", &words(700..800)),
        ]
    }

    fn found(dedup: Dedup, leakage: Leakage) -> (Vec<String>, DuplicateReport) {
        let entries = entries();
        let found = Duplicates::find(entries.clone(), &["root".into()], dedup, leakage);
        let mut left_out: Vec<String> = found.left_out().iter().map(|&i| entries[i].id.to_string()).collect();
        left_out.sort();
        let used: Vec<bool> = (0..entries.len()).map(|i| !found.left_out().contains(&i)).collect();
        let report = found.finish(&used);
        (left_out, report)
    }

    #[test]
    fn what_is_left_out_is_what_was_asked_for_and_all_is_told() {
        for (dedup, leakage, expected, leaked) in [
            (Dedup::Off, Leakage::Report, &[][..], 1),
            (Dedup::Exact, Leakage::Report, &["h3", "t3"], 1),
            (Dedup::Near, Leakage::Report, &["h3", "t3", "t4"], 1),
            (Dedup::Near, Leakage::Drop, &["h3", "t3", "t4", "t5"], 0),
        ] {
            let (left_out, report) = found(dedup, leakage);
            assert_eq!(left_out, expected);
            let pairs =
                |of: &[Likeness]| of.iter().map(|pair| format!("{} {}", pair.id, pair.like)).collect::<Vec<_>>();
            assert_eq!(pairs(&report.duplicates), ["t3 t1", "t4 t1", "h3 h2"]);
            assert_eq!(pairs(&report.leaks), ["t5 h1"]);
            assert_eq!(report.leaks[0].left_out, leakage == Leakage::Drop);
            let root = &report.roots[0];
            assert_eq!((root.records, root.exact, root.near, root.held_out), (8, 2, 1, 3));
            assert_eq!((root.left_out as usize, report.leaked()), (expected.len(), leaked));
        }
    }

    #[test]
    fn what_is_alike_is_printed_and_nothing_where_nothing_is() {
        let (_, report) = found(Dedup::Near, Leakage::Report);
        let table = report.to_string();
        for part in
            ["root                         8             2            1", "t4 is like t1", "t5 is like held out h1"]
        {
            assert!(table.contains(part), "{part}: {table}");
        }
        let none = Duplicates::find(entries()[..2].to_vec(), &["root".into()], Dedup::Off, Leakage::Report);
        assert_eq!(none.finish(&[true, true]).to_string(), "");
    }

    /// The buckets find what comparing all with all finds, and so whatever the number of threads is.
    #[test]
    fn no_pair_that_is_clearly_alike_is_missed() {
        let texts = (0..300)
            .map(|i| if i % 3 == 0 { words(i * 50..i * 50 + 90) } else { words(i / 3 * 150 + 1..i / 3 * 150 + 90) });
        let entries: Vec<Entry> = texts.enumerate().map(|(i, text)| entry(&format!("t{i}"), &text)).collect();
        let found = duplicates(&entries);
        assert!(found.iter().all(|pair| pair.like / 3 == pair.record / 3), "{found:?}");
        assert_eq!(found.len(), 200);
    }
}
