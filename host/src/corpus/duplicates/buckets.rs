//! Which records to compare: those of which a part of the signature is equal (locality-sensitive hashing by bands).

use super::Entry;
use super::sketch::{BINS, Sketch};
use rayon::prelude::*;

/// Parts of a signature that a bucket goes by. Two records that are 0.8 alike share a bucket with a probability of 0.95,
/// 0.9 alike of 0.9999, 0.5 alike of 0.06.
const BAND: usize = 8;
/// Of a bucket at most this many records are compared, the first ones.
const COMPARED_MAX: usize = 256;

/// For each band the records in the order of their parts, so that a bucket's stand side by side, and where in that order the
/// bucket of a record begins. 128 bytes a record.
pub struct Buckets<'a> {
    entries: &'a [Entry],
    bands: Vec<(Vec<u32>, Vec<u32>)>,
}

impl<'a> Buckets<'a> {
    /// Buckets of `records`, indices into `entries` in ascending order. Those that say nothing are in none.
    pub fn new(entries: &'a [Entry], mut records: Vec<usize>) -> Self {
        records.retain(|&i| entries[i].sketch.signature.is_some());
        let bands = (0..BINS / BAND).into_par_iter().map(|band| {
            let parts = |i: u32| parts(&entries[i as usize].sketch, band);
            let mut order: Vec<u32> = records.iter().map(|&i| i as u32).collect();
            order.sort_by_key(|&i| parts(i));
            let mut starts = vec![0; entries.len()];
            let mut start = 0;
            for (at, &i) in order.iter().enumerate() {
                if parts(order[start]) != parts(i) {
                    start = at;
                }
                starts[i as usize] = start as u32;
            }
            (order, starts)
        });
        Self { entries, bands: bands.collect() }
    }

    /// The records in a bucket with `record`, which is in them, without itself; ascending.
    pub fn beside(&self, record: usize) -> Vec<usize> {
        if self.entries[record].sketch.signature.is_none() {
            return Vec::new();
        }
        let bands = self.bands.iter().flat_map(|(order, starts)| {
            let start = starts[record];
            order[start as usize..].iter().take_while(move |&&i| starts[i as usize] == start).take(COMPARED_MAX)
        });
        ascending(bands.filter(|&&i| i as usize != record))
    }

    /// The records in a bucket that one with this sketch would be in; ascending.
    pub fn like(&self, sketch: &Sketch) -> Vec<usize> {
        if sketch.signature.is_none() {
            return Vec::new();
        }
        let bands = self.bands.iter().enumerate().flat_map(|(band, (order, _))| {
            let of = move |i: u32| parts(&self.entries[i as usize].sketch, band);
            let wanted = parts(sketch, band);
            let start = order.partition_point(|&i| of(i) < wanted);
            order[start..].iter().take_while(move |&&i| of(i) == wanted).take(COMPARED_MAX)
        });
        ascending(bands)
    }
}

fn ascending<'a>(records: impl Iterator<Item = &'a u32>) -> Vec<usize> {
    let mut records: Vec<usize> = records.map(|&i| i as usize).collect();
    records.sort_unstable();
    records.dedup();
    records
}

fn parts(sketch: &Sketch, band: usize) -> Option<&[u16]> {
    sketch.signature.as_ref().map(|signature| &signature[band * BAND..(band + 1) * BAND])
}
