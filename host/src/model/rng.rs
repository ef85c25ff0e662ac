//! Counter-based random numbers that stay the same for good: adapters, sampling and dropout of a seed never change with a
//! library's version. SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream of its own for `seed` and a name.
    pub fn new(seed: u64, name: &str) -> Self {
        Self(derive_seed(seed, name))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A seed for `name` under `seed` (FNV-1a over the name, then mixed).
pub fn derive_seed(seed: u64, name: &str) -> u64 {
    let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
    SplitMix64(seed ^ hash).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_sequence() {
        // First outputs of SplitMix64 from state 1234567.
        let mut rng = SplitMix64(1_234_567);
        assert_eq!(
            [rng.next_u64(), rng.next_u64(), rng.next_u64()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn names_and_seeds_give_streams_of_their_own() {
        let first = |seed, name| SplitMix64::new(seed, name).next_u64();
        assert_ne!(first(1, "a"), first(1, "b"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_eq!(first(1, "a"), first(1, "a"));
        assert!((0..1000).map(|s| SplitMix64::new(s, "x").next_f64()).all(|v| (0.0..1.0).contains(&v)));
    }
}
