//! The file of the cache: a line of JSON that says whose encodings these are, then one entry a record.
//!
//! An entry, little-endian: the mark, the number of tokens, the record's key, a CRC-32 of these, a CRC-32 of what follows;
//! then the tokens as [`Tokens`] lays them out.

use super::Key;
use crate::corpus::tokens::Tokens;
use bytes::Bytes;
use std::ops::Range;

const MARK: [u8; 4] = *b"\xF7enc";
const HEADER_BYTES: usize = 32;

/// Bytes of `records` entries of `tokens` in all, but for what rounding adds.
pub fn size_bytes(records: usize, tokens: usize) -> usize {
    records * HEADER_BYTES + Tokens::size_bytes(tokens)
}

/// Where an entry lies in a part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// First byte of the entry.
    pub start: usize,
    /// Tokens.
    pub tokens: u32,
    crc: u32,
}

impl Place {
    /// The bytes of the whole entry.
    pub fn bytes(&self) -> Range<usize> {
        self.start..self.start + HEADER_BYTES + Tokens::size_bytes(self.tokens as usize)
    }
}

/// Appends the entry of a record, at its full length, to `out`.
pub fn write(out: &mut Vec<u8>, key: &Key, tokens: &Tokens) {
    debug_assert_eq!(tokens.as_bytes().len(), Tokens::size_bytes(tokens.len()), "nothing was cut off");
    let start = out.len();
    out.extend(MARK);
    out.extend((tokens.len() as u32).to_le_bytes());
    out.extend(key);
    out.extend(crc32fast::hash(&out[start..]).to_le_bytes());
    out.extend(crc32fast::hash(tokens.as_bytes()).to_le_bytes());
    out.extend(tokens.as_bytes());
}

/// The tokens of an entry; `None` where its bytes are not those that were written.
pub fn read(part: &Bytes, place: &Place) -> Option<Tokens> {
    let range = place.bytes();
    let payload = range.start + HEADER_BYTES..range.end;
    let whole = crc32fast::hash(part.get(payload.clone())?) == place.crc;
    whole.then(|| Tokens::from_bytes(part.slice(payload), place.tokens as usize))
}

/// The entry that begins at byte `start` of a part, and whose it is; `None` where none does.
pub fn at(part: &[u8], start: usize) -> Option<(Key, Place)> {
    let (key, tokens, crc) = header(part.get(start..)?)?;
    Some((key, Place { start, tokens, crc }))
}

/// The entries of a part of the file, in order. Their tokens are not looked at.
pub struct Entries<'a> {
    part: &'a [u8],
    /// The end of the last entry.
    pub end: usize,
    /// Bytes between entries that belong to none: a disk lost them.
    pub damaged: usize,
}

impl<'a> Entries<'a> {
    /// Those from byte `start` on.
    pub fn new(part: &'a [u8], start: usize) -> Self {
        Self { part, end: start, damaged: 0 }
    }
}

impl Iterator for Entries<'_> {
    type Item = (Key, Place);

    fn next(&mut self) -> Option<Self::Item> {
        let mut start = self.end;
        loop {
            let rest = self.part.get(start..)?;
            if let Some((key, place)) = at(self.part, start) {
                self.damaged += start - self.end;
                self.end = place.bytes().end;
                return Some((key, place));
            }
            start += 1 + rest.get(1..)?.windows(MARK.len()).position(|bytes| bytes == MARK)?;
        }
    }
}

/// Key, tokens and checksum of the entry that `bytes` begin with, where they do and hold the whole entry.
fn header(bytes: &[u8]) -> Option<(Key, u32, u32)> {
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let whole = header.starts_with(&MARK) && crc32fast::hash(&header[..24]) == word(24);
    let tokens = word(4);
    let key = header[8..24].try_into().ok()?;
    (whole && rest.len() >= Tokens::size_bytes(tokens as usize)).then(|| (key, tokens, word(28)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::NOT_TRAINED;

    #[test]
    fn entries_come_back_and_damage_costs_only_the_entry_it_is_in() {
        let mut file = b"{}\n".to_vec();
        let records = [0usize, 1, 31, 32, 33, 100].map(|n| {
            let ids: Vec<u32> = (0..n as u32).map(|i| i * 7919).collect();
            let labels: Vec<i32> = ids.iter().map(|&id| if id % 3 == 0 { NOT_TRAINED } else { id as i32 }).collect();
            Tokens::new(&ids, &labels)
        });
        for (i, tokens) in records.iter().enumerate() {
            write(&mut file, &[i as u8; 16], tokens);
        }
        let whole = Bytes::from(file.clone());
        let mut entries = Entries::new(&whole, 3);
        let found: Vec<_> = entries.by_ref().collect();
        assert_eq!((found.len(), entries.damaged, entries.end), (6, 0, file.len()));
        for ((key, place), (i, tokens)) in found.iter().zip(records.iter().enumerate()) {
            assert_eq!((key, read(&whole, place).as_ref()), (&[i as u8; 16], Some(tokens)));
        }
        // every byte matters, and the others stay readable
        for at in 3..file.len() {
            let mut broken = file.clone();
            broken[at] ^= 0x40;
            let broken = Bytes::from(broken);
            let good = Entries::new(&broken, 3).filter(|(_, place)| read(&broken, place).is_some()).count();
            assert_eq!(good, 5, "byte {at}");
        }
        // cut anywhere: the whole entries before it are there
        for end in 3..file.len() {
            let whole = found.iter().filter(|(_, place)| place.bytes().end <= end).count();
            let mut entries = Entries::new(&file[..end], 3);
            assert_eq!((entries.by_ref().count(), entries.damaged), (whole, 0));
            assert_eq!(entries.end, found[..whole].last().map_or(3, |(_, place)| place.bytes().end));
        }
    }
}
