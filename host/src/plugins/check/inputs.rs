//! Corpora for a sampler to lay out: every shape that has its own way to go wrong, the same at every run.

use crate::model::rng::SplitMix64;

/// Longest row that the conformance corpora are made for.
pub const MAX_SEQ_LEN: u32 = 4096;

/// The lengths of a corpus, and what is special about it.
#[derive(Debug, Clone)]
pub struct Lengths {
    /// What is special about it.
    pub name: &'static str,
    /// Tokens of each record.
    pub of_records: Vec<u32>,
}

/// `count` records of each shape.
pub fn shapes(count: usize) -> Vec<Lengths> {
    let lengths = |name: &'static str, of_records: Vec<u32>| Lengths { name, of_records };
    let mut long_and_short = skewed(count, MAX_SEQ_LEN);
    for length in long_and_short.iter_mut().step_by(3) {
        *length = MAX_SEQ_LEN;
    }
    vec![
        lengths("short ones more often", skewed(count, MAX_SEQ_LEN)),
        lengths("all alike", vec![1024; count]),
        lengths("single tokens", vec![1; count]),
        lengths("every row full", vec![MAX_SEQ_LEN; count]),
        lengths("rising", (0..count).map(|at| (at as u32 % MAX_SEQ_LEN) + 1).collect()),
        lengths("a third of them full rows", long_and_short),
        lengths("some too long for a row", skewed(count, 2 * MAX_SEQ_LEN)),
    ]
}

/// Lengths from 1 to `longest` whose cube root is spread evenly: many short records, few long ones.
pub fn skewed(count: usize, longest: u32) -> Vec<u32> {
    let mut rng = SplitMix64::new(0, "conformance");
    (0..count).map(|_| (rng.next_f64().powi(3) * f64::from(longest)) as u32 + 1).collect()
}

/// Three roots of unequal size.
pub fn roots(count: usize) -> Vec<u32> {
    (0..count).map(|at| [0, 0, 0, 1, 1, 2][at % 6]).collect()
}

/// Longest row of [`long_tailed`].
pub const ROW_TOKENS_MAX: u32 = 16_384;

/// Lengths and roots of a corpus such as a real one was: 20,982 records of 2,750 tokens on average in three roots, one of
/// short texts, one of passages cut to like lengths, one of dialogues with a long tail up to the longest row.
pub fn long_tailed() -> (Vec<u32>, Vec<u32>) {
    let mut rng = SplitMix64::new(0, "long-tailed corpus");
    let (mut lengths, mut roots) = (Vec::new(), Vec::new());
    for (root, (count, median, spread)) in
        [(3_583, 4800.0, 1.12), (12_003, 2100.0, 0.3), (5_396, 1100.0, 0.7)].iter().enumerate()
    {
        for _ in 0..*count {
            // Box and Muller 1958.
            let radius = (-2.0 * (1.0 - rng.next_f64()).ln()).sqrt();
            let normal: f64 = radius * (std::f64::consts::TAU * rng.next_f64()).cos();
            let length: f64 = median * (spread * normal).exp();
            lengths.push(length.clamp(142.0, f64::from(ROW_TOKENS_MAX)) as u32);
            roots.push(root as u32);
        }
    }
    (lengths, roots)
}
