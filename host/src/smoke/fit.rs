//! Time of a micro-batch as a function of its rows' width: `t(w) = A w + B w^2`.

use crate::plan::steps::Steps;
use crate::plan::{Source, Spread};
use serde::{Deserialize, Serialize};

/// `t(w) = A w + B w^2`, the time of a micro-batch whose rows all have `w` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// A, in seconds a token of width.
    pub a_s_per_token: f64,
    /// B, in seconds a squared token.
    pub b_s_per_token2: f64,
}

impl Curve {
    /// The least squares of the *relative* residuals of `points`, (width, seconds): timing noise grows with the time. Neither
    /// coefficient is negative, since no work takes less than no time: where the free fit has one that is, the other fits alone.
    /// One width alone gives a straight line.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let points: Vec<(f64, f64)> = points.iter().copied().filter(|(w, t)| *w > 0.0 && *t > 0.0).collect();
        if points.is_empty() {
            return None;
        }
        // Divided by t, the model is 1 = A x + B y with x = w/t and y = w^2/t.
        let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|(w, t)| of(w / t, w * w / t)).sum::<f64>();
        let (x, y) = (sum(&|x, _| x), sum(&|_, y| y));
        let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
        let determinant = xx * yy - xy * xy;
        // Widths that are nearly alike say nothing of a curve.
        let (a, b) = match determinant > 1e-9 * xx * yy {
            true => ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant),
            false => (x / xx, 0.0),
        };
        let (a, b) = match (a < 0.0, b < 0.0) {
            (true, _) => (0.0, y / yy),
            (_, true) => (x / xx, 0.0),
            _ => (a, b),
        };
        Some(Self { a_s_per_token: a, b_s_per_token2: b })
    }

    /// Seconds of a micro-batch of full rows of `width` tokens.
    pub fn seconds(&self, width: f64) -> f64 {
        self.a_s_per_token * width + self.b_s_per_token2 * width * width
    }
}

/// A shape's time as measured and as the curve has it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Residual {
    /// Width of the rows.
    pub seq_len_tokens: usize,
    /// Median of the measured micro-batches.
    pub measured_s: f64,
    /// What the curve says.
    pub fitted_s: f64,
}

impl Residual {
    /// Measured less fitted.
    pub fn seconds(&self) -> f64 {
        self.measured_s - self.fitted_s
    }

    /// The same as a share of what was measured.
    pub fn share(&self) -> f64 {
        self.seconds() / self.measured_s
    }
}

/// Speed of a run's steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Of the curve and its residuals.
    pub source: Source,
    /// Rows of the micro-batches that the curve is of.
    pub micro_batch: usize,
    /// Through the medians of the measured shapes.
    pub curve: Curve,
    /// The fastest step of any shape, as a share of what the curve says of it.
    pub fastest_share: f64,
    /// The slowest, likewise.
    pub slowest_share: f64,
    /// The optimiser's update, once a step.
    pub optimizer_s: Spread,
    /// How far the medians are from the curve.
    pub residuals: Vec<Residual>,
    /// Why the curve, and what is predicted by it, cannot be trusted; empty where nothing says so.
    #[serde(default)]
    pub doubts: Vec<String>,
}

/// The fewest widths whose residuals say anything of a curve with two coefficients.
const LEAST_WIDTHS: usize = 3;
/// The widest over the narrowest: below it the two terms cannot be told apart.
const LEAST_RATIO: usize = 2;
/// The most that the curve may miss a median by, as a share of it.
const MOST_RESIDUAL: f64 = 0.1;

/// What speaks against a curve with these residuals, through medians of `least_n` micro-batches or more.
fn doubts(residuals: &[Residual], least_n: usize) -> Vec<String> {
    let widths = || residuals.iter().map(|residual| residual.seq_len_tokens);
    let (narrowest, widest) = (widths().min().unwrap_or(0), widths().max().unwrap_or(0));
    let mut doubts = Vec::new();
    if least_n < 2 {
        doubts.push("a shape was timed once (n = 1), and has no spread: --steps N measures more".into());
    }
    if residuals.len() < LEAST_WIDTHS {
        let count = residuals.len();
        doubts.push(format!("two coefficients through n = {count} widths: {LEAST_WIDTHS} show whether they fit"));
    } else if widest < LEAST_RATIO * narrowest {
        doubts.push(format!(
            "widths of {narrowest} to {widest} tokens are within a factor of {LEAST_RATIO}, and cannot tell its terms apart"
        ));
    }
    let missed = |residual: &&Residual| residual.share().abs() > MOST_RESIDUAL;
    if let Some(worst) = residuals.iter().filter(missed).max_by(|a, b| a.share().abs().total_cmp(&b.share().abs())) {
        let (share, width) = (100.0 * worst.share(), worst.seq_len_tokens);
        doubts.push(format!(
            "it misses the median of rows of {width} tokens by {share:+.1}%, more than {:.0}%: --steps N tells whether that is \
             noise, or what a step takes whatever its width, of which the curve has no part",
            100.0 * MOST_RESIDUAL
        ));
    }
    doubts
}

/// Which of the measured steps all steps of a run are taken to be like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// The fastest.
    Fastest,
    /// The median.
    Median,
    /// The slowest.
    Slowest,
}

impl Pace {
    /// Fastest first.
    pub const ALL: [Self; 3] = [Self::Fastest, Self::Median, Self::Slowest];

    /// As texts call it.
    pub fn name(self) -> &'static str {
        ["fastest", "median", "slowest"][self as usize]
    }
}

impl Fit {
    /// Through `points`: widths of micro-batches of `micro_batch` rows, and their seconds. Nothing without a point.
    pub fn new(micro_batch: usize, points: &[(usize, Spread)], optimizer_s: Spread) -> Option<Self> {
        let medians: Vec<(f64, f64)> = points.iter().map(|(width, spread)| (*width as f64, spread.median)).collect();
        let curve = Curve::fit(&medians)?;
        // What the curve misses is part of the band.
        let shares = |of: fn(&Spread) -> f64| {
            points.iter().map(move |(width, spread)| of(spread) / curve.seconds(*width as f64))
        };
        let residual = |(width, spread): &(usize, Spread)| Residual {
            seq_len_tokens: *width,
            measured_s: spread.median,
            fitted_s: curve.seconds(*width as f64),
        };
        let residuals: Vec<Residual> = points.iter().map(residual).collect();
        Some(Self {
            source: Source::Computed,
            micro_batch,
            curve,
            fastest_share: shares(|spread| spread.min).fold(1.0, f64::min),
            slowest_share: shares(|spread| spread.max).fold(1.0, f64::max),
            optimizer_s,
            doubts: doubts(&residuals, points.iter().map(|(_, spread)| spread.n).min().unwrap_or(0)),
            residuals,
        })
    }

    /// Seconds of each of a run's steps.
    pub fn of_steps(&self, pace: Pace, steps: &Steps) -> Vec<f64> {
        steps.step_lengths.iter().map(|(tokens, squares)| self.step_s(pace, *tokens, *squares)).collect()
    }

    /// Seconds of a step whose documents have `tokens` tokens, and of whose lengths the squares add up to `squares`.
    pub fn step_s(&self, pace: Pace, tokens: f64, squares: f64) -> f64 {
        let (share, optimizer_s) = match pace {
            Pace::Fastest => (self.fastest_share, self.optimizer_s.min),
            Pace::Median => (1.0, self.optimizer_s.median),
            Pace::Slowest => (self.slowest_share, self.optimizer_s.max),
        };
        // The curve is of `micro_batch` documents at once.
        let documents_s = self.curve.a_s_per_token * tokens + self.curve.b_s_per_token2 * squares;
        share * documents_s / self.micro_batch as f64 + optimizer_s
    }

    /// The widest row that was measured.
    pub fn widest_tokens(&self) -> usize {
        self.residuals.iter().map(|residual| residual.seq_len_tokens).max().unwrap_or(0)
    }
}
