//! Where the documents of a micro-batch begin and end.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Offsets of documents laid end to end: document `s` is tokens `cu_seqlens[s] .. cu_seqlens[s + 1]`. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    cu_seqlens: Arc<[u32]>,
}

impl Segments {
    /// Checks the offsets of a micro-batch of `tokens` tokens: from 0, strictly growing, up to `tokens`.
    ///
    /// # Errors
    /// [`SegmentsError`], naming the first offset that breaks the rule.
    pub fn new(cu_seqlens: impl Into<Arc<[u32]>>, tokens: usize) -> Result<Self, SegmentsError> {
        let cu_seqlens = cu_seqlens.into();
        match (cu_seqlens.first(), cu_seqlens.last()) {
            (Some(0), Some(&end)) if end as usize == tokens => {}
            (Some(0), Some(&end)) => return Err(SegmentsError::End { end, tokens }),
            (start, _) => return Err(SegmentsError::Start { start: start.copied() }),
        }
        match cu_seqlens.windows(2).position(|pair| pair[0] >= pair[1]) {
            Some(index) => Err(SegmentsError::NotGrowing { index: index + 1, offset: cu_seqlens[index + 1] }),
            None => Ok(Self { cu_seqlens }),
        }
    }

    /// Number of tokens in all segments.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens[self.cu_seqlens.len() - 1] as usize
    }

    /// The offsets, one more than there are segments.
    pub fn cu_seqlens(&self) -> &[u32] {
        &self.cu_seqlens
    }

    /// The token ranges, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.cu_seqlens.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
    }
}

/// Offsets that do not describe segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentsError {
    /// The first offset is not 0, or there is none.
    Start {
        /// The first offset.
        start: Option<u32>,
    },
    /// The last offset is not the number of tokens.
    End {
        /// The last offset.
        end: u32,
        /// The number of tokens.
        tokens: usize,
    },
    /// An offset is not above the one before it.
    NotGrowing {
        /// Its place in `cu_seqlens`.
        index: usize,
        /// Its value.
        offset: u32,
    },
}

impl fmt::Display for SegmentsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { start: Some(start) } => write!(f, "cu_seqlens starts at 0, not at {start}"),
            Self::Start { start: None } => write!(f, "cu_seqlens has at least the offset 0"),
            Self::End { end, tokens } => write!(f, "cu_seqlens ends at {end}, the batch has {tokens} tokens"),
            Self::NotGrowing { index, offset } => {
                write!(f, "cu_seqlens[{index}] = {offset} is not above the offset before it")
            }
        }
    }
}

impl std::error::Error for SegmentsError {}
