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
        let random = self.next_u64();
        match u32::try_from(bound) {
            // The same number. WebAssembly has no 128-bit product, and of four partial ones these two are not 0.
            Ok(bound) => {
                let (high, low) = (random >> 32, random & u64::from(u32::MAX));
                (high * u64::from(bound) + ((low * u64::from(bound)) >> 32)) >> 32
            }
            Err(_) => ((u128::from(random) * u128::from(bound)) >> 64) as u64,
        }
    }

    /// Fisher-Yates: every order equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    /// The groups of `items` that end at `ends`, every order of the groups equally likely: the items, and where the
    /// groups end now. Rows or micro-batches, at the close of a plan.
    pub fn shuffle_groups(&mut self, items: &[u32], ends: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let mut groups: Vec<(u32, u32)> = starts.zip(ends.iter().copied()).collect();
        self.shuffle(&mut groups);
        let (mut shuffled, mut shuffled_ends) = (Vec::with_capacity(items.len()), Vec::with_capacity(ends.len()));
        for (start, end) in groups {
            // One by one: most groups are small, and a call to copy memory costs more than they do.
            for &item in &items[start as usize..end as usize] {
                shuffled.push(item);
            }
            shuffled_ends.push(shuffled.len() as u32);
        }
        (shuffled, shuffled_ends)
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
    fn a_bound_of_any_size_takes_the_high_half_of_the_product() {
        let mut rng = SplitMix64::new(3, 0);
        for bound in [1, 2, 3, 1 << 31, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            for _ in 0..1000 {
                let product = u128::from(rng.clone().next_u64()) * u128::from(bound);
                assert_eq!(rng.below(bound), (product >> 64) as u64, "below {bound}");
            }
        }
    }

    #[test]
    fn groups_are_shuffled_as_a_list_of_them_would_be() {
        let items: Vec<u32> = (100..200).collect();
        let ends: Vec<u32> = (1..=13).map(|end| end * end * 100 / 169).collect();
        let starts = std::iter::once(&0).chain(&ends);
        let mut groups: Vec<&[u32]> =
            starts.zip(&ends).map(|(&start, &end)| &items[start as usize..end as usize]).collect();
        let (shuffled, shuffled_ends) = SplitMix64::new(5, 1).shuffle_groups(&items, &ends);
        SplitMix64::new(5, 1).shuffle(&mut groups);
        assert_eq!(shuffled, groups.concat());
        let sizes: Vec<u32> = groups.iter().map(|group| group.len() as u32).collect();
        let sums: Vec<u32> = (1..=sizes.len()).map(|count| sizes[..count].iter().sum()).collect();
        assert_eq!(shuffled_ends, sums);
        assert_eq!(SplitMix64::new(5, 1).shuffle_groups(&[], &[]), (Vec::new(), Vec::new()));
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
