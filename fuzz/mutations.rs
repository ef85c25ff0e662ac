//! Mutations of seeds, for tests that a fuzzer does not run.

/// Changes, cuts, doubles and joins the seeds: the same mutations in every run.
pub fn mutations(seeds: &[&[u8]], count: usize, mut each: impl FnMut(&[u8])) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut below = |bound: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % bound as u64) as usize
    };
    for _ in 0..count {
        let mut bytes = seeds[below(seeds.len())].to_vec();
        for _ in 0..=below(4) {
            let at = below(bytes.len() + 1);
            match below(6) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, below(256) as u8),
                2 => bytes.insert(at, b"{}[]\",:\\0\n"[below(10)]),
                3 => bytes.extend_from_within(at..),
                4 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = below(256) as u8),
                _ => bytes.extend(seeds[below(seeds.len())].iter().take(below(20))),
            }
        }
        each(&bytes);
    }
}
