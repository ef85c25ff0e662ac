//! What a run leaves behind for others: what an exporter plugin lays out, such as the adapter as PEFT reads it, and the
//! base with the adapter merged in.
//!
//! A folder appears under its final name only when it is whole.

mod blocks;
mod carry_out;
mod gguf;
mod judged;
mod pending;
mod proof;
mod quantize;
mod search;
pub mod source;
mod tensor;
mod vocabulary;

pub use carry_out::{ChooseScales, carry_out, tuned, untrained};
pub use judged::{MIN_RETAINED_GAIN, Made, Trial, judge};
pub use pending::PendingFolder;
pub use proof::{Judge, OnDisk, Proof, Verdict};
pub(crate) use proof::{rows_at_once, tokens_at_once};
pub use search::{SearchReport, search_scales};
pub use tensor::QuantizedWeight;
