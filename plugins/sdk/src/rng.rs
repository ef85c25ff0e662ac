//! Seeded randomness that gives the same numbers on every machine.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A stream of its own for each seed and epoch.
    pub fn new(seed: u64, epoch: u32) -> Self {
        let mut mixed = Self(seed);
        let start = mixed.next_u64() ^ u64::from(epoch).wrapping_mul(0xD605_1A2F_5C4B_8E43);
        Self(start)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which must not be 0. The high half of a 128-bit product (Lemire 2019); the bias of at
    /// most `bound / 2^64` cannot be seen in a shuffle.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Fisher-Yates: every order equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_gives_the_published_numbers() {
        let mut rng = SplitMix64(1234567);
        assert_eq!(rng.next_u64(), 6457827717110365317);
        assert_eq!(rng.next_u64(), 3203168211198807973);
    }

    #[test]
    fn a_shuffle_keeps_every_item_and_depends_on_seed_and_epoch() {
        let order = |seed, epoch| {
            let mut items: Vec<u32> = (0..1000).collect();
            SplitMix64::new(seed, epoch).shuffle(&mut items);
            items
        };
        assert_eq!(order(7, 0), order(7, 0));
        assert_ne!(order(7, 0), order(7, 1));
        assert_ne!(order(7, 0), order(8, 0));
        let mut sorted = order(7, 0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
    }

    #[test]
    fn every_place_is_equally_likely() {
        let mut counts = [[0u32; 4]; 4];
        let mut rng = SplitMix64::new(1, 0);
        for _ in 0..24_000 {
            let mut items = [0, 1, 2, 3];
            rng.shuffle(&mut items);
            for (place, &item) in items.iter().enumerate() {
                counts[item][place] += 1;
            }
        }
        for count in counts.iter().flatten() {
            assert!((5_700..6_300).contains(count), "{counts:?}");
        }
    }
}
