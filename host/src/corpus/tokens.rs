//! The tokens of a record as they lie in memory and in the encode cache.

use super::NOT_TRAINED;
use bytes::Bytes;
use std::fmt;

/// Token ids and which of them are trained. A copy shares the bytes, which are in memory or in a mapped file of the cache.
#[derive(Clone, Default)]
pub struct Tokens {
    /// The ids, 4 bytes each, little-endian; then one bit a token for whether it is trained, filled up to 4 bytes.
    bytes: Bytes,
    /// Tokens in `bytes`.
    stored: u32,
    /// How many of them, from the first on, count.
    len: u32,
}

impl Tokens {
    /// `labels[t]` is `ids[t]` where that token is trained and [`NOT_TRAINED`] elsewhere.
    pub fn new(ids: &[u32], labels: &[i32]) -> Self {
        let mut bytes = Vec::with_capacity(Self::size_bytes(ids.len()));
        ids.iter().for_each(|id| bytes.extend(id.to_le_bytes()));
        for labels in labels.chunks(32) {
            let bits = labels.iter().enumerate().map(|(bit, &label)| u32::from(label != NOT_TRAINED) << bit);
            bytes.extend(bits.sum::<u32>().to_le_bytes());
        }
        Self::from_bytes(bytes.into(), ids.len())
    }

    /// What [`Tokens::as_bytes`] gave for `len` tokens: [`Tokens::size_bytes`] bytes.
    pub(super) fn from_bytes(bytes: Bytes, len: usize) -> Self {
        debug_assert_eq!(bytes.len(), Self::size_bytes(len), "ids and bits");
        let len = u32::try_from(len).expect("a record has fewer than 2^32 tokens");
        Self { bytes, stored: len, len }
    }

    /// What `len` tokens take.
    pub(super) fn size_bytes(len: usize) -> usize {
        4 * len + len.div_ceil(32) * 4
    }

    /// The tokens as [`Tokens::new`] laid them out, also those that were cut off since.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Leaves the first `len` at most.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len().min(len) as u32;
    }

    /// The ids.
    pub fn ids(&self) -> Vec<u32> {
        self.id_bytes().as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect()
    }

    /// The ids as bytes, to compare records by.
    pub(super) fn id_bytes(&self) -> &[u8] {
        &self.bytes[..4 * self.len()]
    }

    /// `labels[t]` is `ids[t]` where that token is trained and [`NOT_TRAINED`] elsewhere.
    pub fn labels(&self) -> Vec<i32> {
        let trained = self.trained();
        self.ids().into_iter().zip(trained).map(|(id, trained)| if trained { id as i32 } else { NOT_TRAINED }).collect()
    }

    /// Whether each is trained.
    pub fn trained(&self) -> impl Iterator<Item = bool> {
        let bits = &self.bytes[4 * self.stored as usize..];
        (0..self.len()).map(|t| bits[t / 8] >> (t % 8) & 1 == 1)
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        self.id_bytes() == other.id_bytes() && self.trained().eq(other.trained())
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("ids", &self.ids()).field("labels", &self.labels()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_labels_come_back_at_every_length_and_cut() {
        let ids: Vec<u32> = (0..100).map(|t| t * 7919 + (t << 25)).collect();
        let labels: Vec<i32> = ids.iter().map(|&id| if id % 3 == 0 { NOT_TRAINED } else { id as i32 }).collect();
        for len in [0, 1, 31, 32, 33, 100] {
            let whole = Tokens::new(&ids[..len], &labels[..len]);
            assert_eq!(whole.as_bytes().len(), Tokens::size_bytes(len));
            for cut in [0, 1, 32, 40, 1000] {
                let mut tokens = whole.clone();
                tokens.truncate(cut);
                let cut = cut.min(len);
                assert_eq!((tokens.ids(), tokens.labels()), (ids[..cut].to_vec(), labels[..cut].to_vec()));
                assert_eq!(tokens, Tokens::new(&ids[..cut], &labels[..cut]));
                assert_eq!(tokens.is_empty(), cut == 0);
            }
        }
        let untrained = Tokens::new(&[5, 6], &[NOT_TRAINED, NOT_TRAINED]);
        assert_ne!(untrained, Tokens::new(&[5, 6], &[NOT_TRAINED, 6]));
        assert_ne!(untrained, Tokens::new(&[5, 7], &[NOT_TRAINED, NOT_TRAINED]));
    }
}
