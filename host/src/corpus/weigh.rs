//! How many of a source's records are used, and how often: decided by each record's hash, never by its place.

use super::FileInfo;
use super::encode::Record;
use super::reader::{Compression, Shape};
use crate::config::SourceConfig;
use crate::error::{Error, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// A record on its way into the corpus.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    /// What the split goes by.
    pub key: u64,
    /// Which of the records that were read it is, or is a part of.
    pub origin: u32,
    /// At full length.
    pub record: Record,
}

/// What a source came to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SourceReport {
    /// Its path as the configuration has it.
    pub path: PathBuf,
    /// The root its records count to.
    pub root: String,
    /// Its files.
    pub files: usize,
    /// How they hold their records, such as `jsonl of messages` or `json (gzip) of text`.
    pub formats: Vec<String>,
    /// Records in them.
    pub records_read: u64,
    /// Records that the filter and `data.dedup` left, before the length limit and without copies.
    pub records: u64,
    /// Of them, left out by the source's cap.
    pub capped: u64,
    /// Of them, left out by a weight.
    pub thinned: u64,
    /// Copies that a weight adds.
    pub copies: u64,
}

impl fmt::Display for SourceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = if self.files == 1 { String::new() } else { format!(", {} files", self.files) };
        let (path, formats) = (self.path.display(), self.formats.join(", "));
        write!(f, "{}: {path}{files}: {formats}, {} records", self.root, self.records_read)?;
        for (count, what) in
            [(self.capped, "left out by the cap"), (self.thinned, "left out by the weight"), (self.copies, "copies")]
        {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

fn formats(files: &[FileInfo]) -> Vec<String> {
    let mut formats = Vec::new();
    for file in files {
        let shapes = file.shapes.iter().map(Shape::to_string).collect::<Vec<_>>().join(", ");
        let format = match file.compression {
            Compression::None => format!("{} of {shapes}", file.format),
            compression => format!("{} ({compression}) of {shapes}", file.format),
        };
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    formats
}

/// Applies the source's cap to all its records and its weight to those that are trained. Copies are named `id#2`, `id#3` and so
/// on.
///
/// # Errors
/// `corpus::nothing_to_train` where a weight leaves none of the records.
pub fn weigh(
    source: &SourceConfig,
    files: &[FileInfo],
    train: &mut Vec<Kept>,
    held_out: &mut Vec<Kept>,
) -> Result<SourceReport> {
    let records = train.len() + held_out.len();
    if let Some(cap) = source.cap.filter(|&cap| cap < records) {
        let mut ranks: Vec<_> = train.iter().chain(held_out.iter()).map(rank).collect();
        ranks.sort_unstable();
        // equal records may stand on the border: ids tell them apart
        let last = ranks.swap_remove(cap - 1);
        for part in [&mut *train, &mut *held_out] {
            part.retain(|kept| rank(kept) <= last);
        }
    }
    let used = train.len();
    let mut thinned = 0;
    if source.weight != 1.0 {
        let mut weighed = Vec::new();
        for kept in train.drain(..) {
            let times = times(kept.key, source.weight);
            thinned += usize::from(times == 0);
            let id = |k| if k == 1 { kept.record.id.clone() } else { format!("{}#{k}", kept.record.id).into() };
            weighed.extend((1..=times).map(|k| Kept { record: Record { id: id(k), ..kept.record.clone() }, ..kept }));
        }
        *train = weighed;
    }
    if train.is_empty() && used > 0 {
        let message = format!("{}: weight {} leaves none of {used} records", source.path.display(), source.weight);
        return Err(Error::new("corpus::nothing_to_train", message).expected("a weight that leaves a record or more"));
    }
    let report = SourceReport {
        path: source.path.clone(),
        root: source.root.clone(),
        files: files.len(),
        formats: formats(files),
        records_read: files.iter().map(|file| file.records).sum(),
        records: records as u64,
        capped: (records - used - held_out.len()) as u64,
        thinned: thinned as u64,
        copies: (train.len() + thinned - used) as u64,
    };
    Ok(report)
}

/// A number from a record's key that has nothing to do with the side of the split the key decides.
fn mix(what: &str, key: u64) -> u64 {
    let digest = Sha256::new().chain_update(what).chain_update(key.to_le_bytes()).finalize();
    digest.iter().take(8).fold(0, |hash, &byte| hash << 8 | u64::from(byte))
}

fn rank(kept: &Kept) -> (u64, Arc<str>) {
    (mix("cap", kept.key), kept.record.id.clone())
}

/// How often a record of this key is trained: `weight`, rounded down or up so that the mean over records is met.
fn times(key: u64, weight: f64) -> usize {
    let up = (mix("weight", key) as f64) < weight.fract() * 2f64.powi(64);
    weight as usize + usize::from(up)
}

#[cfg(test)]
mod tests {
    use super::super::tokens::Tokens;
    use super::*;

    fn keyed(ids: std::ops::Range<u32>) -> Vec<Kept> {
        let record = |id| Record { id: format!("r{id}").into(), root: 0, tokens: Tokens::new(&[id], &[id as i32]) };
        ids.map(|id| Kept { key: mix("test", id.into()), origin: id, record: record(id) }).collect()
    }

    fn weighed(weight: f64, cap: Option<usize>, mut train: Vec<Kept>) -> (Vec<String>, Vec<String>, SourceReport) {
        let source = SourceConfig { weight, cap, ..SourceConfig::new("a", "a") };
        let mut held_out = keyed(5000..5100);
        let report = weigh(&source, &[], &mut train, &mut held_out).unwrap();
        let ids = |part: Vec<Kept>| part.into_iter().map(|kept| kept.record.id.to_string()).collect();
        (ids(train), ids(held_out), report)
    }

    #[test]
    fn weights_repeat_and_thin_training_records_alone() {
        let (train, held_out, report) = weighed(2.0, None, keyed(0..2));
        assert_eq!(train, ["r0", "r0#2", "r1", "r1#2"]);
        assert_eq!((held_out.len(), report.records, report.copies, report.thinned), (100, 102, 2, 0));
        let (train, held_out, report) = weighed(0.25, None, keyed(0..2000));
        // five standard deviations of a binomial count
        assert!((train.len() as i64 - 500).abs() < 97, "{}", train.len());
        assert_eq!((held_out.len(), report.thinned as usize, report.copies), (100, 2000 - train.len(), 0));
        let (train, _, report) = weighed(1.5, None, keyed(0..2000));
        assert_eq!(train.len() as u64, 2000 + report.copies);
        assert!((report.copies as i64 - 1000).abs() < 112, "{}", report.copies);
    }

    #[test]
    fn what_a_weight_and_a_cap_choose_does_not_depend_on_the_order() {
        let sorted = |cap, weight, train: Vec<Kept>| {
            let (mut train, held_out, report) = weighed(weight, cap, train);
            train.sort();
            (train, held_out, report)
        };
        let backwards: Vec<Kept> = keyed(0..900).into_iter().rev().collect();
        for (cap, weight) in [(None, 0.3), (Some(100), 1.0), (Some(100), 2.5)] {
            let chosen = sorted(cap, weight, keyed(0..900));
            assert_eq!(chosen, sorted(cap, weight, backwards.clone()));
            if let Some(cap) = cap {
                assert_eq!(chosen.2.capped as usize, 1000 - cap);
                assert_eq!(chosen.0.len() + chosen.1.len() - chosen.2.copies as usize, cap);
            }
        }
    }

    #[test]
    fn a_cap_tells_equal_records_apart() {
        let mut equal = keyed(0..10);
        equal.iter_mut().for_each(|kept| kept.key = 7);
        let source = SourceConfig { cap: Some(3), ..SourceConfig::new("a", "a") };
        weigh(&source, &[], &mut equal, &mut Vec::new()).unwrap();
        assert_eq!(equal.len(), 3);
    }

    #[test]
    fn a_weight_that_leaves_nothing_is_an_error() {
        let source = SourceConfig { weight: 1e-9, ..SourceConfig::new("a", "a") };
        let error = weigh(&source, &[], &mut keyed(0..3), &mut Vec::new()).unwrap_err();
        assert_eq!(error.code(), "corpus::nothing_to_train");
    }
}
