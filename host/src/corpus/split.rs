//! Which records are held out: decided by each record alone, so that a corpus that grows moves none of the old ones.

use super::encode::Record;
use super::reader::Content;
use crate::config::SplitBy;
use sha2::{Digest, Sha256};

/// A record's place in the order that decides the split: the first eight bytes of the sha256 of its content, with the id
/// before it where the split is by record.
pub fn key(by: SplitBy, id: &str, content: &Content) -> u64 {
    let mut hasher = Sha256::new();
    if by == SplitBy::Record {
        hasher.update(id);
    }
    hash_content(&mut hasher, content);
    let digest = hasher.finalize();
    digest.iter().take(8).fold(0, |key, &byte| key << 8 | u64::from(byte))
}

/// Hashes all that a record is trained on, and nothing else.
pub fn hash_content(hasher: &mut Sha256, content: &Content) {
    match content {
        Content::Chat(chat) => {
            hasher.update(serde_json::json!([chat.messages, chat.tools]).to_string());
        }
        Content::Text(text) => hasher.update(text),
        Content::Completion { prompt, completion } => {
            hasher.update(serde_json::json!([prompt, completion]).to_string());
        }
        Content::Tokens { ids, labels } => {
            ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
            labels.iter().flatten().for_each(|label| hasher.update(label.to_le_bytes()));
        }
    }
}

/// Whether a record with this key is held out when `share` (0 to 1) of all are.
pub fn is_held_out(key: u64, share: f64) -> bool {
    (key as f64) < share * 2f64.powi(64)
}

/// At most `max_per_root` of the held-out records of each root: the first in hash order, the order `held_out` has.
pub fn evaluation_sample(held_out: &[Record], max_per_root: usize) -> Vec<&Record> {
    let mut taken = std::collections::HashMap::new();
    let mut sample = Vec::new();
    for record in held_out {
        let count = taken.entry(record.root).or_insert(0usize);
        if *count < max_per_root {
            *count += 1;
            sample.push(record);
        }
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(text: &str) -> u64 {
        key(SplitBy::Content, "id", &Content::Text(text.into()))
    }

    #[test]
    fn the_share_is_met_and_larger_shares_hold_out_the_same_records_and_more() {
        let keys: Vec<u64> = (0..10_000).map(|i| key_of(&format!("record {i}"))).collect();
        let held = |share: f64| keys.iter().filter(|&&key| is_held_out(key, share)).count();
        // five standard deviations of a binomial count
        assert!((held(0.05) as i64 - 500).abs() < 110, "{}", held(0.05));
        assert_eq!(held(0.0), 0);
        assert!(keys.iter().all(|&key| !is_held_out(key, 0.05) || is_held_out(key, 0.1)));
    }

    #[test]
    fn the_key_is_that_of_the_content() {
        assert_eq!(key_of("abc"), 0xba78_16bf_8f01_cfea, "the sha256 of FIPS 180-2, appendix B.1");
        let tokens = |ids: &[u32], labels| key(SplitBy::Content, "id", &Content::Tokens { ids: ids.into(), labels });
        assert_ne!(tokens(&[1, 2], None), tokens(&[2, 1], None));
        assert_ne!(tokens(&[1, 2], None), tokens(&[1, 2], Some(vec![-100, 2])));
        let record = |id: &str| key(SplitBy::Record, id, &Content::Text("abc".into()));
        assert_ne!(record("a"), record("b"));
    }
}
