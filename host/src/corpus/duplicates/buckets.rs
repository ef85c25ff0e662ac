//! Which records to compare: those of which a part of the signature is equal (locality-sensitive hashing by bands).

use super::Entry;
use super::sketch::{BINS, Sketch};
use rayon::prelude::*;

/// Parts of a signature that a bucket goes by. Two records that are 0.8 alike share a bucket with a probability of 0.95,
/// 0.9 alike of 0.9999, 0.5 alike of 0.06.
const BAND: usize = 8;
/// Of a bucket at most this many records are compared, the first ones.
const COMPARED_MAX: usize = 256;

/// For each band the records in the order of their parts and then their own: a bucket's stand side by side.
pub struct Buckets {
    bands: Vec<Vec<(u32, u32)>>,
}

impl Buckets {
    /// Buckets of `records`, indices into `entries`. Those that say nothing are in none.
    pub fn new(entries: &[Entry], records: &[u32]) -> Self {
        Self { bands: bands(entries, records, |_| {}) }
    }

    /// The buckets that several of `records` are in: most records are alone in theirs, and cost nothing then.
    pub fn shared(entries: &[Entry], records: &[u32]) -> Self {
        let drop_lone = |band: &mut Vec<(u32, u32)>| {
            *band = band.chunk_by(|a, b| a.0 == b.0).filter(|bucket| bucket.len() > 1).flatten().copied().collect();
        };
        Self { bands: bands(entries, records, drop_lone) }
    }

    /// The records in a bucket that one with this sketch is or would be in; ascending.
    pub fn like(&self, sketch: &Sketch) -> Vec<usize> {
        let Some(signature) = &sketch.signature else { return Vec::new() };
        let bands = self.bands.iter().zip(parts(signature)).flat_map(|(band, parts)| {
            let start = band.partition_point(|&(of, _)| of < parts);
            band[start..].iter().take_while(move |&&(of, _)| of == parts).take(COMPARED_MAX)
        });
        let mut records: Vec<usize> = bands.map(|&(_, i)| i as usize).collect();
        records.sort_unstable();
        records.dedup();
        records
    }
}

fn bands(entries: &[Entry], records: &[u32], reduce: impl Fn(&mut Vec<(u32, u32)>) + Sync) -> Vec<Vec<(u32, u32)>> {
    let band = |band: usize| {
        let of = |&i: &u32| Some((parts(entries[i as usize].sketch.signature.as_ref()?).nth(band)?, i));
        let mut order: Vec<(u32, u32)> = records.iter().filter_map(of).collect();
        order.sort_unstable();
        reduce(&mut order);
        order
    };
    (0..BINS / BAND).into_par_iter().map(band).collect()
}

/// The parts of a signature, a number for each band.
fn parts(signature: &[u8; BINS / 2]) -> impl Iterator<Item = u32> {
    signature.as_chunks::<{ BAND / 2 }>().0.iter().map(|parts| u32::from_le_bytes(*parts))
}
