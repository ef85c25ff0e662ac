//! Near copies, told by MinHash (Broder, "On the resemblance and containment of documents", 1997): two texts are as alike as
//! the share of their shingles (runs of [`SHINGLE_WORDS`] words) that they have in common, and of many hash functions the
//! same share has its least value over both texts' shingles at a common one. Candidates are found by bands: texts that agree
//! in all hashes of a band, in any of the bands.
//!
//! A kept record takes 256 bytes for its least hashes and some 20 for each band, at the default similarity about 700.

use std::collections::HashMap;

use tunehost_plugin_sdk::SplitMix64;

use crate::murmur::hash128;

/// Hash functions; the share that agrees is off by 0.035 (standard error, at 0.8).
const HASHES: usize = 128;
/// Words in a shingle; a shorter text is one shingle.
const SHINGLE_WORDS: usize = 3;
/// A pair as alike as asked for has a band in common with at least this probability.
const FOUND: f64 = 0.99;
/// At most so many candidates of a band are looked at, the latest, so that a corpus from one mould is no square of work.
const CANDIDATES_MAX: usize = 64;
const NOBODY: u32 = u32::MAX;

/// The least value of each hash function, its low 16 bits: two that differ agree there once in 65,536.
type Signature = [u16; HASHES];

/// The texts kept so far.
pub struct Near {
    similarity: f64,
    /// Hashes in a band.
    rows: usize,
    /// Factor and summand of each hash function.
    functions: Vec<(u64, u64)>,
    #[expect(clippy::vec_box, reason = "while a list grows it is there twice: it holds pointers, not signatures")]
    signatures: Vec<Box<Signature>>,
    /// For each band, by its hashes, the latest text that has them.
    latest: Vec<HashMap<u32, u32>>,
    /// For each text and band, the text before it that has the same hashes.
    before: Vec<u32>,
}

impl Near {
    /// Of no texts. They are near copies from this share of common shingles on.
    pub fn new(similarity: f64) -> Self {
        let rows = rows(similarity);
        let mut rng = SplitMix64::new(0, 0);
        let functions = (0..HASHES).map(|_| (rng.next_u64() | 1, rng.next_u64())).collect();
        let latest = vec![HashMap::new(); HASHES / rows];
        Self { similarity, rows, functions, signatures: Vec::new(), latest, before: Vec::new() }
    }

    /// Whether this text, words joined by single spaces, is a near copy of one kept before; otherwise it is kept.
    pub fn is_copy(&mut self, text: &str) -> bool {
        let signature = self.signature(text);
        let keys: Vec<u32> = signature.chunks_exact(self.rows).map(band_key).collect();
        if keys.iter().enumerate().any(|(band, &key)| self.has_copy(band, key, &signature)) {
            return true;
        }
        let text = self.signatures.len() as u32;
        for (latest, key) in self.latest.iter_mut().zip(keys) {
            self.before.push(latest.insert(key, text).unwrap_or(NOBODY));
        }
        self.signatures.push(Box::new(signature));
        false
    }

    fn has_copy(&self, band: usize, key: u32, signature: &Signature) -> bool {
        let first = self.latest[band].get(&key).copied();
        let before = |&text: &u32| match self.before[text as usize * self.latest.len() + band] {
            NOBODY => None,
            text => Some(text),
        };
        std::iter::successors(first, before)
            .take(CANDIDATES_MAX)
            .any(|text| likeness(&self.signatures[text as usize], signature) >= self.similarity)
    }

    fn signature(&self, text: &str) -> Signature {
        let mut least = [u32::MAX; HASHES];
        for shingle in shingles(text) {
            let hash = hash128(shingle.as_bytes(), 0) as u64;
            for (least, (factor, summand)) in least.iter_mut().zip(&self.functions) {
                *least = (*least).min((factor.wrapping_mul(hash).wrapping_add(*summand) >> 32) as u32);
            }
        }
        least.map(|least| least as u16)
    }
}

/// The share of hash functions that agree: an estimate of the share of common shingles.
fn likeness(one: &Signature, other: &Signature) -> f64 {
    one.iter().zip(other).filter(|(one, other)| one == other).count() as f64 / HASHES as f64
}

/// The most hashes in a band with which enough pairs are found: the more, the fewer candidates.
fn rows(similarity: f64) -> usize {
    let found = |rows: usize| 1.0 - (1.0 - similarity.powi(rows as i32)).powi((HASHES / rows) as i32);
    (1..=HASHES).rev().find(|&rows| found(rows) >= FOUND).unwrap_or(1)
}

fn band_key(hashes: &[u16]) -> u32 {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    hash128(&bytes, 0) as u32
}

fn shingles(text: &str) -> impl Iterator<Item = &str> {
    let ends: Vec<usize> = text.match_indices(' ').map(|(at, _)| at).chain([text.len()]).collect();
    let words = SHINGLE_WORDS.min(ends.len());
    (0..=ends.len() - words).map(move |first| {
        let start = if first == 0 { 0 } else { ends[first - 1] + 1 };
        &text[start..ends[first + words - 1]]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// A text of `count` words out of `vocabulary`.
    fn text(rng: &mut SplitMix64, count: usize, vocabulary: u64) -> Vec<String> {
        (0..count).map(|_| format!("w{}", rng.below(vocabulary))).collect()
    }

    #[test]
    fn shingles_are_runs_of_three_words() {
        let of = |text| shingles(text).collect::<Vec<_>>();
        assert_eq!(of("a bé c d"), ["a bé c", "bé c d"]);
        assert_eq!(of("a b"), ["a b"]);
        assert_eq!(of(""), [""]);
    }

    #[test]
    fn bands_are_as_wide_as_the_similarity_allows() {
        assert_eq!([1.0, 0.95, 0.8, 0.5, 0.01].map(rows), [128, 16, 6, 3, 1]);
    }

    #[test]
    fn agreeing_hashes_estimate_the_share_of_common_shingles() {
        let near = Near::new(0.8);
        let mut rng = SplitMix64::new(1, 0);
        for changes in 0..40 {
            let mut words = text(&mut rng, 200, 10_000);
            let one = words.join(" ");
            (0..changes).for_each(|_| words[rng.below(200) as usize] = "changed".into());
            let other = words.join(" ");
            let sets = [&one, &other].map(|text| shingles(text).collect::<HashSet<_>>());
            let common = sets[0].intersection(&sets[1]).count() as f64 / sets[0].union(&sets[1]).count() as f64;
            let estimate = likeness(&near.signature(&one), &near.signature(&other));
            // Four standard errors.
            assert!((estimate - common).abs() < 0.177, "{estimate} for {common}");
        }
    }

    #[test]
    fn bands_find_what_comparing_all_would() {
        let mut rng = SplitMix64::new(2, 0);
        let mut texts: Vec<Vec<String>> = (0..100).map(|_| text(&mut rng, 60, 1000)).collect();
        for _ in 0..500 {
            let mut copy = texts[rng.below(texts.len() as u64) as usize].clone();
            (0..rng.below(8)).for_each(|_| copy[rng.below(60) as usize] = format!("x{}", rng.below(1000)));
            texts.push(copy);
        }
        let mut near = Near::new(0.8);
        let mut kept: Vec<Signature> = Vec::new();
        let (mut copies, mut missed) = (0, 0);
        for text in texts.iter().map(|words| words.join(" ")) {
            let signature = near.signature(&text);
            let expected = kept.iter().any(|kept| likeness(kept, &signature) >= 0.8);
            let found = near.is_copy(&text);
            assert!(expected || !found, "{text}");
            copies += u32::from(expected);
            missed += u32::from(expected && !found);
            if !found {
                kept.push(signature);
            }
        }
        assert!(copies > 150 && copies < 450, "{copies}");
        assert!(missed * 100 <= copies, "{missed} of {copies}");
    }
}
