//! Text from a model: greedy, or sampled with a temperature and a nucleus (top-p, arXiv 1904.09751).
//!
//! Each new token runs the whole prefix again. That is for a look at a tuned model, not for serving.

use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::model::rng::SplitMix64;
use crate::train::batch::{Batch, IGNORED};
use crate::train::engine::Engine;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; otherwise logits are divided by it.
    pub temperature: f64,
    /// Smallest probability mass that the candidates must cover, in (0, 1].
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// Continues `prompt` by at most `max_new_tokens`, stopping at an end-of-sequence token (which is not returned).
///
/// # Errors
/// `model::not_finite` where the model gives a logit that is no number.
pub fn generate(
    engine: &Engine,
    adapter: Option<&Adapter>,
    prompt: &[u32],
    max_new_tokens: usize,
    sampling: Sampling,
) -> Result<Vec<u32>> {
    let mut ids = prompt.to_vec();
    let mut rng = SplitMix64::new(sampling.seed, "generate");
    for _ in 0..max_new_tokens {
        let batch = Batch::new([(&ids[..], &vec![IGNORED; ids.len()][..])]);
        let hidden = engine.hidden(adapter, &batch, &mut |_, _| {});
        let last = hidden.narrow(0, ids.len() - 1, 1);
        let logits = values(&engine.logits_of(last));
        if logits.iter().any(|l| !l.is_finite()) {
            return Err(Error::new("model::not_finite", "the model gives logits that are not finite")
                .help("the base or the adapter holds values that are not finite, or its files are damaged"));
        }
        let next = choose(&logits, sampling, &mut rng);
        if engine.model.config.eos_token_ids.contains(&next) {
            break;
        }
        ids.push(next);
    }
    Ok(ids.split_off(prompt.len()))
}

fn choose(logits: &[f32], sampling: Sampling, rng: &mut SplitMix64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |i: u32| logits[i as usize];
    // Ties go to the lower id, as in argmax.
    let descending = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
    if sampling.temperature <= 0.0 {
        return order.into_iter().min_by(descending).expect("a vocabulary is not empty");
    }
    order.sort_unstable_by(descending);
    let top = f64::from(logit(order[0]));
    let weight = |i: u32| ((f64::from(logit(i)) - top) / sampling.temperature).exp();
    let total: f64 = order.iter().map(|i| weight(*i)).sum();
    let mut kept = 0.0;
    let mut nucleus = 0;
    while nucleus < order.len() && (nucleus == 0 || kept < sampling.top_p * total) {
        kept += weight(order[nucleus]);
        nucleus += 1;
    }
    let mut at = rng.next_f64() * kept;
    for i in &order[..nucleus] {
        at -= weight(*i);
        if at < 0.0 {
            return *i;
        }
    }
    order[nucleus - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(logits: &[f32], temperature: f64, top_p: f64, n: usize) -> Vec<usize> {
        let mut rng = SplitMix64::new(1, "test");
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[choose(logits, Sampling { temperature, top_p, seed: 0 }, &mut rng) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(draw(&[0.0, 2.0, 2.0, -1.0], 0.0, 1.0, 3), [0, 3, 0, 0]);
    }

    #[test]
    fn sampling_follows_the_softmax() {
        let counts = draw(&[0.0, 3f32.ln(), 0.0], 1.0, 1.0, 5000);
        assert!((counts[1] as f64 / 5000.0 - 0.6).abs() < 0.03, "{counts:?}");
        let cold = draw(&[0.0, 3f32.ln(), 0.0], 0.1, 1.0, 1000);
        assert!(cold[1] > 990);
    }

    #[test]
    fn the_nucleus_cuts_the_tail() {
        let counts = draw(&[3f32.ln(), 0.0, 0.0], 1.0, 0.6, 500);
        assert_eq!(counts, [500, 0, 0]);
        assert!(draw(&[3f32.ln(), 0.0, 0.0], 1.0, 0.61, 500)[1] > 0);
    }
}
