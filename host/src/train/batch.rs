//! Records of a micro-batch laid end to end: no padding, documents told apart by offsets.

use crate::corpus::Record;
use tunehost_kernels::attention::Segments;

pub use tunehost_kernels::cross_entropy::IGNORED;

/// N tokens of one micro-batch.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Token ids `[N]`.
    pub ids: Vec<u32>,
    /// Position of each token in its document `[N]`.
    pub position_ids: Vec<u32>,
    /// Document boundaries.
    pub segments: Segments,
    /// The token that position t must predict, [`IGNORED`] where nothing is trained `[N]`. The last token of a document
    /// predicts nothing, so no document predicts the first token of the next one.
    pub targets: Vec<i32>,
}

impl Batch {
    /// Lays documents end to end; `labels[t]` is `ids[t]` where that token is trained, else [`IGNORED`].
    ///
    /// # Panics
    /// On an empty document or a length mismatch: the corpus yields neither.
    pub fn new<'a>(documents: impl IntoIterator<Item = (&'a [u32], &'a [i32])>) -> Self {
        let (mut ids, mut position_ids, mut targets, mut cu_seqlens) = (vec![], vec![], vec![], vec![0]);
        for (tokens, labels) in documents {
            assert!(!tokens.is_empty() && tokens.len() == labels.len(), "a document with its labels");
            ids.extend_from_slice(tokens);
            position_ids.extend(0..tokens.len() as u32);
            targets.extend_from_slice(&labels[1..]);
            targets.push(IGNORED);
            cu_seqlens.push(ids.len() as u32);
        }
        let segments = Segments::new(cu_seqlens, ids.len()).expect("offsets grow from 0 to N");
        Self { ids, position_ids, segments, targets }
    }

    /// Lays records end to end.
    ///
    /// # Panics
    /// On an empty record: the corpus yields none.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Self {
        let documents: Vec<_> =
            records.into_iter().map(|record| (record.tokens.ids(), record.tokens.labels())).collect();
        Self::new(documents.iter().map(|(ids, labels)| (&ids[..], &labels[..])))
    }

    /// Tokens in the batch.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Positions that have a target.
    pub fn trained(&self) -> usize {
        self.targets.iter().filter(|t| **t != IGNORED).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_stay_apart() {
        let batch = Batch::new([(&[2u32, 7, 8][..], &[-100, 7, 8][..]), (&[2, 9], &[2, 9])]);
        assert_eq!(batch.ids, [2, 7, 8, 2, 9]);
        assert_eq!(batch.position_ids, [0, 1, 2, 0, 1]);
        assert_eq!(batch.targets, [7, 8, IGNORED, 9, IGNORED]);
        assert_eq!((batch.tokens(), batch.trained()), (5, 3));
    }
}
