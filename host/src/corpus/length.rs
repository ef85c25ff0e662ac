//! The length limit, and the account of every token it costs.

use super::encode::Record;
use crate::config::Overlong;
use crate::error::{Error, Result};
use serde::Serialize;
use std::fmt;

/// How many ids of records with nothing left to train the report lists per root.
const IDS_LISTED: usize = 20;

/// What the length limit did, written as `truncation-report.json` and printed as a table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TruncationReport {
    /// The limit in tokens.
    pub max_seq_len: usize,
    /// What happened to longer records.
    pub overlong: Overlong,
    /// One entry for each root.
    pub roots: Vec<RootReport>,
    /// Records that were refused, with the reason; they are in no other number.
    pub refused: Vec<Refusal>,
}

/// One root's account, of what a run trains from: caps and weights are applied before, and copies count. `tokens` = kept + cut +
/// dropped + untrained, `trained_tokens` = kept + lost.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RootReport {
    /// The root.
    pub root: String,
    /// Records.
    pub records: u64,
    /// Their tokens before the limit.
    pub tokens: u64,
    /// The trained ones among them.
    pub trained_tokens: u64,
    /// Median length in tokens, before the limit as all of these (nearest rank).
    pub p50: usize,
    /// Length that 90% of the records do not exceed.
    pub p90: usize,
    /// Length that 99% of the records do not exceed.
    pub p99: usize,
    /// Longest record.
    pub max: usize,
    /// Records kept, whole or cut.
    pub records_kept: u64,
    /// Tokens in them.
    pub tokens_kept: u64,
    /// Records kept that were cut.
    pub records_cut: u64,
    /// Tokens cut off them.
    pub tokens_cut: u64,
    /// Records left out because they are too long.
    pub records_dropped: u64,
    /// Tokens in them.
    pub tokens_dropped: u64,
    /// Records left out because no trained token is left in them, or none ever was.
    pub records_untrained: u64,
    /// Tokens in them, at full length.
    pub tokens_untrained: u64,
    /// The first ids of those.
    pub untrained_ids: Vec<String>,
    /// Conversations that were split at their turns, before the source's cap and weight.
    pub conversations_split: u64,
    /// Records that they became; all other numbers are of these.
    pub parts: u64,
    /// Trained tokens lost by cutting and dropping.
    pub trained_tokens_lost: u64,
    /// `trained_tokens_lost / trained_tokens`.
    pub trained_share_lost: f64,
}

/// A record that was not encoded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Refusal {
    /// Its id.
    pub id: String,
    /// Its root.
    pub root: String,
    /// File, line and reason.
    pub reason: String,
}

/// Applies the limit to record after record and keeps the account.
pub struct LengthLimit {
    report: TruncationReport,
    lengths: Vec<Vec<u32>>,
}

impl LengthLimit {
    /// A limit of `max_seq_len` tokens for records of `roots`.
    pub fn new(max_seq_len: usize, overlong: Overlong, roots: &[String]) -> Self {
        let lengths = vec![Vec::new(); roots.len()];
        let roots = roots.iter().map(|root| RootReport { root: root.clone(), ..Default::default() }).collect();
        Self { report: TruncationReport { max_seq_len, overlong, roots, refused: Vec::new() }, lengths }
    }

    /// The record within the limit; `None` where it is left out.
    ///
    /// # Errors
    /// `corpus::overlong` under [`Overlong::Error`].
    pub fn apply(&mut self, mut record: Record) -> Result<Option<Record>> {
        let limit = self.report.max_seq_len;
        let length = record.tokens.len();
        if length > limit && self.report.overlong == Overlong::Error {
            let message = format!("record {:?} has {length} tokens, data.max_seq_len is {limit}", record.id);
            return Err(Error::new("corpus::overlong", message)
                .help("set data.overlong to \"truncate\", \"split-turns\" or \"drop\" to go on without the rest"));
        }
        if !self.count(&record) {
            return Ok(None);
        }
        record.tokens.truncate(limit);
        Ok(Some(record))
    }

    /// Whether the limit leaves something of the record to train.
    pub fn leaves(&self, record: &Record) -> bool {
        let limit = self.report.max_seq_len;
        let dropped = record.tokens.len() > limit && self.report.overlong == Overlong::Drop;
        !dropped && record.trained_within(limit) > 0
    }

    /// Notes what the limit makes of the record, and says whether it leaves something to train.
    pub fn count(&mut self, record: &Record) -> bool {
        let limit = self.report.max_seq_len;
        let (length, trained) = (record.tokens.len(), record.trained_tokens());
        self.lengths[record.root as usize].push(length as u32);
        let root = &mut self.report.roots[record.root as usize];
        root.records += 1;
        root.tokens += length as u64;
        root.trained_tokens += trained as u64;
        if length > limit && self.report.overlong == Overlong::Drop {
            root.records_dropped += 1;
            root.tokens_dropped += length as u64;
            root.trained_tokens_lost += trained as u64;
            return false;
        }
        let left = record.trained_within(limit);
        root.trained_tokens_lost += (trained - left) as u64;
        if left == 0 {
            root.records_untrained += 1;
            root.tokens_untrained += length as u64;
            if root.untrained_ids.len() < IDS_LISTED {
                root.untrained_ids.push(record.id.to_string());
            }
            return false;
        }
        root.records_kept += 1;
        root.tokens_kept += length.min(limit) as u64;
        if length > limit {
            root.records_cut += 1;
            root.tokens_cut += (length - limit) as u64;
        }
        true
    }

    /// Notes that a conversation was split into `parts` records.
    pub fn split(&mut self, root: u32, parts: usize) {
        let root = &mut self.report.roots[root as usize];
        root.conversations_split += 1;
        root.parts += parts as u64;
    }

    /// Notes a record that could not be encoded.
    pub fn refuse(&mut self, id: String, root: u32, reason: String) {
        let root = self.report.roots[root as usize].root.clone();
        self.report.refused.push(Refusal { id, root, reason });
    }

    /// The account of all records so far.
    pub fn finish(self) -> TruncationReport {
        let mut report = self.report;
        for (root, mut lengths) in report.roots.iter_mut().zip(self.lengths) {
            lengths.sort_unstable();
            let rank = |percent: usize| match lengths.len() {
                0 => 0,
                n => lengths[(n * percent).div_ceil(100).max(1) - 1] as usize,
            };
            (root.p50, root.p90, root.p99, root.max) = (rank(50), rank(90), rank(99), rank(100));
            root.trained_share_lost = root.trained_tokens_lost as f64 / (root.trained_tokens.max(1)) as f64;
        }
        report
    }
}

impl TruncationReport {
    /// The lengths of the records as a table, a line for each root.
    pub fn lengths(&self) -> String {
        let mut table =
            format!("{:<16}{:>9}{:>13}{:>8}{:>8}{:>8}{:>8}\n", "root", "records", "tokens", "p50", "p90", "p99", "max");
        for root in &self.roots {
            table += &format!(
                "{:<16}{:>9}{:>13}{:>8}{:>8}{:>8}{:>8}\n",
                root.root, root.records, root.tokens, root.p50, root.p90, root.p99, root.max
            );
        }
        table
    }
}

impl fmt::Display for TruncationReport {
    /// A table, a line for each root.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16}{:>8}{:>11}{:>7}{:>7}{:>7}{:>7}{:>7}{:>12}{:>9}{:>14}{:>11}",
            "root",
            "records",
            "tokens",
            "p50",
            "p90",
            "p99",
            "max",
            "cut",
            "tokens cut",
            "dropped",
            "trained lost",
            "untrained"
        )?;
        for root in &self.roots {
            let lost = format!("{:.2}%", 100.0 * root.trained_share_lost);
            writeln!(
                f,
                "{:<16}{:>8}{:>11}{:>7}{:>7}{:>7}{:>7}{:>7}{:>12}{:>9}{lost:>14}{:>11}",
                root.root,
                root.records,
                root.tokens,
                root.p50,
                root.p90,
                root.p99,
                root.max,
                root.records_cut,
                root.tokens_cut,
                root.records_dropped,
                root.records_untrained,
            )?;
        }
        for root in self.roots.iter().filter(|root| root.conversations_split > 0) {
            let RootReport { root, conversations_split, parts, .. } = root;
            writeln!(f, "{root}: {conversations_split} conversations split at their turns into {parts} records")?;
        }
        if !self.refused.is_empty() {
            writeln!(f, "{} records refused; truncation-report.json names them", self.refused.len())?;
        }
        Ok(())
    }
}

/// What several limits would cost, a line for each limit and root; `reports` has one report a limit.
pub fn table_of_limits(reports: &[TruncationReport]) -> String {
    let mut table = format!(
        "{:>9}  {:<16}{:>9}{:>12}{:>9}{:>14}{:>14}\n",
        "limit", "root", "affected", "tokens lost", "share", "trained lost", "nothing left"
    );
    for report in reports {
        for root in &report.roots {
            let lost = root.tokens - root.tokens_kept;
            table += &format!(
                "{:>9}  {:<16}{:>9}{lost:>12}{:>8.2}%{:>13.2}%{:>14}\n",
                report.max_seq_len,
                root.root,
                root.records_cut + root.records_dropped + root.records_untrained,
                100.0 * lost as f64 / root.tokens.max(1) as f64,
                100.0 * root.trained_share_lost,
                root.records_untrained,
            );
        }
        for root in report.roots.iter().filter(|root| root.conversations_split > 0) {
            let RootReport { root, records, conversations_split, .. } = root;
            let limit = report.max_seq_len;
            table += &format!(
                "{limit:>9}  {root}: of {records} records, {conversations_split} conversations split at their turns among them\n"
            );
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::encode::NOT_TRAINED;
    use super::super::tokens::Tokens;
    use super::*;

    /// A record of `length` tokens of which those from `trained` on are trained.
    fn record(id: &str, length: usize, trained: usize) -> Record {
        let ids: Vec<u32> = (0..length as u32).collect();
        let label = |&t: &u32| if (t as usize) < trained { NOT_TRAINED } else { t as i32 };
        let labels: Vec<i32> = ids.iter().map(label).collect();
        Record { id: id.into(), root: 0, tokens: Tokens::new(&ids, &labels) }
    }

    fn apply(limit: usize, overlong: Overlong, records: Vec<Record>) -> (Vec<Record>, TruncationReport) {
        let mut limit = LengthLimit::new(limit, overlong, &["talk".into()]);
        let kept = records.into_iter().filter_map(|record| limit.apply(record).unwrap()).collect();
        (kept, limit.finish())
    }

    fn balanced(root: &RootReport) {
        assert_eq!(root.tokens, root.tokens_kept + root.tokens_cut + root.tokens_dropped + root.tokens_untrained);
        assert_eq!(root.records, root.records_kept + root.records_dropped + root.records_untrained);
    }

    #[test]
    fn row_5_a_record_whose_trained_tokens_are_cut_away_is_counted_and_not_trained_on() {
        let records = vec![record("long prompt", 220, 200), record("whole", 40, 30), record("cut", 100, 50)];
        let (kept, report) = apply(64, Overlong::Truncate, records);
        assert_eq!(kept.iter().map(|r| (&*r.id, r.tokens.len())).collect::<Vec<_>>(), [("whole", 40), ("cut", 64)]);
        let root = &report.roots[0];
        balanced(root);
        assert_eq!((root.records, root.records_cut, root.records_untrained), (3, 1, 1));
        assert_eq!((root.tokens, root.tokens_cut, root.tokens_untrained), (360, 36, 220));
        assert_eq!(root.untrained_ids, ["long prompt"]);
        assert_eq!((root.trained_tokens, root.trained_tokens_lost), (20 + 10 + 50, 20 + 36));
        assert_eq!(root.trained_share_lost, 0.7);
        assert!(report.to_string().contains("70.00%"), "{report}");
    }

    #[test]
    fn longer_records_are_dropped_or_refused_where_that_is_asked_for() {
        let (kept, report) = apply(64, Overlong::Drop, vec![record("a", 65, 1), record("b", 64, 1)]);
        assert_eq!((kept.len(), &*kept[0].id), (1, "b"));
        balanced(&report.roots[0]);
        assert_eq!((report.roots[0].records_dropped, report.roots[0].tokens_dropped), (1, 65));
        let error = LengthLimit::new(64, Overlong::Error, &["talk".into()]).apply(record("a", 65, 1)).unwrap_err();
        assert!(error.message().contains("\"a\" has 65 tokens"), "{error}");
    }

    #[test]
    fn percentiles_are_nearest_ranks_of_the_lengths_before_the_cut() {
        let (_, report) = apply(10, Overlong::Truncate, (1..=200).rev().map(|n| record("", n, 0)).collect());
        let root = &report.roots[0];
        assert_eq!((root.p50, root.p90, root.p99, root.max), (100, 180, 198, 200));
        let (_, report) = apply(10, Overlong::Truncate, vec![]);
        assert_eq!((report.roots[0].p50, report.roots[0].max), (0, 0));
    }
}
