//! Gates on the plan of a run, before its base is read.

use crate::config::{GatesConfig, TrainConfig};
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::lora::group;
use crate::train::steps::Step;
use std::collections::BTreeSet;

/// Where so many windows of a single root are at least as likely as this, there are too few of them to say anything.
const LUCK_MIN: f64 = 0.05;
/// Ids named in a message.
const NAMED_IDS: usize = 5;

fn records_of<'a>(step: &'a Step, records: &'a [Record]) -> impl Iterator<Item = &'a Record> {
    step.batches.iter().flat_map(|batch| batch.rows.iter().flatten()).map(|i| &records[*i as usize])
}

/// Whether any position of the record has a target: the first token is predicted by none.
fn trains(record: &Record) -> bool {
    record.tokens.trained().skip(1).any(|trained| trained)
}

/// Looks for micro-batches in which no token is trained: they cost their time and give nothing.
///
/// # Errors
/// `gate::nothing_trained`, naming step and records.
pub fn nothing_trained(steps: &[Step], records: &[Record]) -> Result<String> {
    let mut batches = 0;
    for (index, step) in steps.iter().enumerate() {
        for batch in &step.batches {
            batches += 1;
            let mut of_batch = batch.rows.iter().flatten().map(|i| &records[*i as usize]);
            if !of_batch.any(trains) {
                let ids = batch.rows.iter().flatten().map(|i| &*records[*i as usize].id);
                let ids = ids.take(NAMED_IDS).collect::<Vec<_>>().join(", ");
                let message = format!("a micro-batch of step {} trains no token; its records: {ids}", index + 1);
                return Err(Error::new("gate::nothing_trained", message)
                    .expected("at least one token with a loss in every micro-batch")
                    .help("`tunehost corpus inspect` shows what of a record is trained"));
            }
        }
    }
    Ok(format!("each of {} micro-batches trains a token", group(batches)))
}

/// Compares the mean tokens of the planned steps with what the configuration says. The last step of an epoch, which may be
/// a part of one, does not count where there are others; a plan of one step that ran out of records is measured by
/// `gates.tokens_per_step_planned` alone.
///
/// # Errors
/// `gate::tokens_per_step`, with both numbers.
pub fn tokens_per_step(steps: &[Step], records: &[Record], train: &TrainConfig, gates: &GatesConfig) -> Result<String> {
    let last_of_epoch = |i: usize| steps.get(i + 1).is_none_or(|next| next.epoch != steps[i].epoch);
    let whole: Vec<&Step> = (0..steps.len()).filter(|i| !last_of_epoch(*i)).map(|i| &steps[i]).collect();
    let whole = if whole.is_empty() { steps.iter().collect() } else { whole };
    let tokens = |step: &&Step| records_of(step, records).map(|r| r.tokens.len()).sum::<usize>();
    let sizes: Vec<usize> = whole.iter().map(tokens).collect();
    let mean = sizes.iter().sum::<usize>() as f64 / sizes.len().max(1) as f64;
    let rows: usize = whole.iter().flat_map(|s| &s.batches).map(|b| b.rows.len()).sum();
    let rows_of_a_step = f64::from(train.micro_batch) * f64::from(train.accumulation);
    let (planned, of) = match gates.tokens_per_step_planned {
        Some(planned) => (planned as f64, "gates.tokens_per_step_planned".to_string()),
        None => {
            let of = format!("{} x {} rows of mean length", train.micro_batch, train.accumulation);
            (mean * whole.len() as f64 / rows.max(1) as f64 * rows_of_a_step, of)
        }
    };
    let (least, most) = (sizes.iter().min().unwrap_or(&0), sizes.iter().max().unwrap_or(&0));
    let said = format!(
        "{} tokens a step on average ({} to {}), {} planned ({of})",
        group(mean.round() as usize),
        group(*least),
        group(*most),
        group(planned.round() as usize)
    );
    let factor = gates.tokens_per_step_factor;
    let ran_out = steps.len() == 1 && steps[0].batches.len() < train.accumulation as usize;
    let measured = gates.tokens_per_step_planned.is_some() || !ran_out;
    if mean * factor >= planned && mean <= planned * factor || !measured {
        return Ok(said);
    }
    Err(Error::new("gate::tokens_per_step", said)
        .expected(format!("no more than {factor} times more or fewer"))
        .help("the sampler may leave micro-batches unfilled: `tunehost corpus batches` shows them"))
}

/// Most that it may be likely to see a `share` of `n` draws or more, where each has the chance `p`: the bound of Chernoff and
/// Hoeffding, exp(-n D(share || p)) with the relative entropy D, which is exact where the share is 1.
fn by_luck(share: f64, p: f64, n: usize) -> f64 {
    let term = |a: f64, b: f64| if a > 0.0 { a * (a / b).ln() } else { 0.0 };
    (-(n as f64) * (term(share, p) + term(1.0 - share, 1.0 - p))).exp()
}

/// Counts the accumulation windows whose records come from one root, where the corpus has several. A window drawn from one
/// root pulls the whole update its way; length-sorted or unshuffled plans make many of them. How many chance alone gives is
/// the sum over roots of p^m, with p the root's share of the corpus' records and m the micro-batches of a window.
///
/// # Errors
/// `gate::single_root`, with the share and what chance gives.
pub fn single_root(steps: &[Step], records: &[Record], roots: &[String], gates: &GatesConfig) -> Result<String> {
    let mut by_root = vec![0_usize; roots.len()];
    records.iter().for_each(|record| by_root[record.root as usize] += 1);
    let is_single = |step: &&Step| records_of(step, records).map(|r| r.root).collect::<BTreeSet<u32>>().len() == 1;
    let single = steps.iter().filter(is_single).count();
    let chance = |step: &Step| {
        let windows = step.batches.len() as i32;
        by_root.iter().map(|n| (*n as f64 / records.len() as f64).powi(windows)).sum::<f64>()
    };
    let steps_count = steps.len().max(1) as f64;
    let (share, by_chance) = (single as f64 / steps_count, steps.iter().map(chance).sum::<f64>() / steps_count);
    let said = format!(
        "{single} of {} accumulation windows ({:.0}%) draw from a single root, {:.0}% by chance",
        group(steps.len()),
        100.0 * share,
        100.0 * by_chance
    );
    if share <= by_chance + gates.single_root_excess || by_luck(share, by_chance, steps.len()) > LUCK_MIN {
        return Ok(said);
    }
    Err(Error::new("gate::single_root", said)
        .expected(format!("at most {:.0}% more than by chance", 100.0 * gates.single_root_excess))
        .help("use a sampler that shuffles its micro-batches, such as bucket-to-pair or shuffled"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::Tokens;
    use crate::train::batch::IGNORED;
    use crate::train::steps::MicroBatch;

    fn record(root: u32, length: usize, trained: bool) -> Record {
        let labels = vec![if trained { 5 } else { IGNORED }; length];
        Record { id: format!("r{root}-{length}").into(), root, tokens: Tokens::new(&vec![5; length], &labels) }
    }

    /// Steps of two micro-batches of one row each, in the order given.
    fn in_order(records: usize) -> Vec<Step> {
        let batch = |i: usize| MicroBatch { rows: vec![vec![i as u32]] };
        (0..records / 2).map(|s| Step { epoch: 0, batches: vec![batch(2 * s), batch(2 * s + 1)] }).collect()
    }

    #[test]
    fn a_micro_batch_that_trains_nothing_is_named() {
        let mut records: Vec<Record> = (0..4).map(|i| record(0, 4 + i, true)).collect();
        assert!(nothing_trained(&in_order(4), &records).unwrap().contains("4 micro-batches"));
        // A label on the first token only: no position predicts it.
        records[3].tokens = Tokens::new(&[5; 7], &[5, -100, -100, -100, -100, -100, -100]);
        let error = nothing_trained(&in_order(4), &records).unwrap_err();
        assert_eq!(error.code(), "gate::nothing_trained");
        assert!(error.message().contains("step 2") && error.message().contains("r0-7"), "{error}");
    }

    #[test]
    fn steps_far_from_what_was_planned_are_told() {
        let records: Vec<Record> = (0..20).map(|i| record(0, 100 + i, true)).collect();
        let train = TrainConfig { micro_batch: 1, accumulation: 2, ..TrainConfig::default() };
        let gates = GatesConfig::default();
        tokens_per_step(&in_order(20), &records, &train, &gates).unwrap();
        // Micro-batches of four rows were asked for, and hold one.
        let wide = TrainConfig { micro_batch: 4, ..train.clone() };
        let error = tokens_per_step(&in_order(20), &records, &wide, &gates).unwrap_err();
        assert_eq!(error.code(), "gate::tokens_per_step");
        assert!(error.message().starts_with("217 tokens a step on average (201 to 233), 868 planned"), "{error}");
        for (planned, passes) in [(217, true), (400, true), (500, false), (109, true), (100, false)] {
            let gates = GatesConfig { tokens_per_step_planned: Some(planned), ..gates.clone() };
            assert_eq!(tokens_per_step(&in_order(20), &records, &train, &gates).is_ok(), passes, "{planned}");
        }
    }

    #[test]
    fn a_plan_of_one_step_is_measured_unless_the_records_ran_out() {
        let records: Vec<Record> = (0..2).map(|_| record(0, 100, true)).collect();
        let plan = in_order(2);
        let told = |micro_batch, accumulation, tokens_per_step_planned| {
            let train = TrainConfig { micro_batch, accumulation, ..TrainConfig::default() };
            let gates = GatesConfig { tokens_per_step_planned, ..GatesConfig::default() };
            tokens_per_step(&plan, &records, &train, &gates).is_err()
        };
        assert!(told(4, 2, None) && !told(1, 2, None) && !told(1, 64, None));
        assert!(told(1, 64, Some(9000)) && !told(1, 64, Some(200)));
    }

    #[test]
    fn windows_of_a_single_root_are_counted_against_chance() {
        let roots = ["a".to_string(), "b".into()];
        let gates = GatesConfig::default();
        let sorted: Vec<Record> = (0..40).map(|i| record(i / 20, 9, true)).collect();
        let error = single_root(&in_order(40), &sorted, &roots, &gates).unwrap_err();
        assert_eq!(error.code(), "gate::single_root");
        assert!(error.message().starts_with("20 of 20 accumulation windows (100%)"), "{error}");
        assert!(error.message().ends_with("50% by chance"), "{error}");
        let mixed: Vec<Record> = (0..40).map(|i| record(i % 2, 9, true)).collect();
        single_root(&in_order(40), &mixed, &roots, &gates).unwrap();
        // A plan that takes the first records alone is held against the whole corpus.
        assert!(single_root(&in_order(20), &sorted, &roots, &gates).is_err());
        // A single window of two micro-batches is one root's half of the time.
        single_root(&in_order(2), &sorted, &roots, &gates).unwrap();
        assert!((by_luck(1.0, 0.5, 3) - 0.125).abs() < 1e-12 && by_luck(0.76, 0.5, 100) < 1e-5);
        // One root only, or nearly: chance gives as many.
        single_root(&in_order(40), &vec![record(0, 9, true); 40], &roots[..1], &gates).unwrap();
        let rare: Vec<Record> = (0..40).map(|i| record(u32::from(i > 37), 9, true)).collect();
        single_root(&in_order(40), &rare, &roots, &gates).unwrap();
    }
}
