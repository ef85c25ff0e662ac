//! What a record says, in 64 bytes: MinHash signatures, whose equal parts estimate how alike two records are.
//!
//! The words of a record are hashed in runs of [`SHINGLE_WORDS`]; the similarity of two records is the Jaccard index of
//! their sets of runs. The signature is one-permutation hashing (Li, Owen and Zhang, 2012) with optimal densification
//! (Shrivastava, 2017): one hash a run, however many bins. Of a bin's smallest hash 4 bits are kept, which are equal by chance
//! in one part of 16: the estimate takes that off (b-bit minwise hashing, Li and Koenig, 2010).

use crate::corpus::reader::Content;
use crate::corpus::split::hash_content;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Words in a run.
const SHINGLE_WORDS: usize = 5;
/// Parts of a signature; an estimate's standard error is at most 1 / (2 sqrt(BINS)), 0.04.
pub const BINS: usize = 128;
/// Share of the parts of two signatures that are equal by chance.
const BY_CHANCE: f64 = 1.0 / 16.0;

/// What two records are compared by.
#[derive(Debug, Clone, PartialEq)]
pub struct Sketch {
    /// Equal for the same content and for no other.
    pub exact: [u8; 16],
    /// Two parts a byte; `None` where the record says nothing.
    pub signature: Option<[u8; BINS / 2]>,
}

impl Sketch {
    /// Of all that is said but by the system: instructions and tools that many records share do not make them alike. Letter case
    /// and white space do not count.
    pub fn of(content: &Content) -> Self {
        let mut words = Words::default();
        match content {
            Content::Chat(chat) => {
                let system = |message: &&Value| matches!(message["role"].as_str(), Some("system" | "developer"));
                chat.messages.iter().filter(|message| !system(message)).for_each(|message| words.value(message));
            }
            Content::Text(text) => words.text(text),
            Content::Completion { prompt, completion } => [prompt, completion].iter().for_each(|text| words.text(text)),
            Content::Tokens { ids, .. } => ids.iter().for_each(|&id| words.end_of_word(id.into())),
        }
        let mut exact = Sha256::new();
        hash_content(&mut exact, content);
        let digest: [u8; 32] = exact.finalize().into();
        Self { exact: digest[..16].try_into().expect("16 of 32 bytes"), signature: words.signature() }
    }

    /// An estimate of the Jaccard index of the two records, 0 to 1; 1 for equal ones.
    pub fn similarity(&self, other: &Self) -> f64 {
        match (&self.signature, &other.signature) {
            _ if self.exact == other.exact => 1.0,
            (Some(a), Some(b)) => {
                let equal = 1.0 - f64::from(unequal(a, b)) / BINS as f64;
                ((equal - BY_CHANCE) / (1.0 - BY_CHANCE)).max(0.0)
            }
            _ => 0.0,
        }
    }
}

/// How many parts of two signatures are not equal.
fn unequal(a: &[u8; BINS / 2], b: &[u8; BINS / 2]) -> u32 {
    let words = a.as_chunks().0.iter().zip(b.as_chunks().0);
    let differs = words.map(|(a, b)| u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b));
    // one bit of four for a part that differs
    differs.map(|bits| ((bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x1111_1111_1111_1111).count_ones()).sum()
}

/// The smallest hash of each bin while words come in.
struct Words {
    /// Hashes of the last words, the oldest first.
    run: [u64; SHINGLE_WORDS],
    count: usize,
    bins: [Option<u64>; BINS],
}

impl Default for Words {
    fn default() -> Self {
        Self { run: [0; SHINGLE_WORDS], count: 0, bins: [None; BINS] }
    }
}

impl Words {
    /// All text and numbers in a message, without its role.
    fn value(&mut self, value: &Value) {
        match value {
            Value::Object(object) => {
                object.iter().filter(|(key, _)| *key != "role").for_each(|(_, value)| self.value(value))
            }
            Value::Array(list) => list.iter().for_each(|value| self.value(value)),
            Value::String(text) => self.text(text),
            Value::Number(number) => self.text(&number.to_string()),
            Value::Null | Value::Bool(_) => {}
        }
    }

    /// A word is a run of letters and digits, or one other character; where a script writes without spaces, one letter.
    fn text(&mut self, text: &str) {
        const START: u64 = 0xCBF2_9CE4_8422_2325;
        let mut word = START;
        let add = |word: u64, c: char| (word ^ u64::from(c)).wrapping_mul(0x0000_0100_0000_01B3);
        for c in text.chars() {
            let spaced = c.is_alphanumeric() && c < '\u{2E80}';
            if !spaced && word != START {
                self.end_of_word(std::mem::replace(&mut word, START));
            }
            match c {
                'A'..='Z' => word = add(word, c.to_ascii_lowercase()),
                _ if spaced && c.is_ascii() => word = add(word, c),
                _ if spaced => word = c.to_lowercase().fold(word, add),
                _ if c.is_whitespace() => {}
                _ => self.end_of_word(add(START, c)),
            }
        }
        if word != START {
            self.end_of_word(word);
        }
    }

    fn end_of_word(&mut self, word: u64) {
        self.run.rotate_left(1);
        self.run[SHINGLE_WORDS - 1] = word;
        self.count += 1;
        if self.count >= SHINGLE_WORDS {
            self.end_of_run();
        }
    }

    fn end_of_run(&mut self) {
        let hash = self.run.iter().fold(0, |hash, &word| mix(hash ^ word));
        let bin = &mut self.bins[(hash >> 57) as usize];
        *bin = Some(bin.map_or(hash, |least| least.min(hash)));
    }

    /// An empty bin takes what a filled one has, found along a walk that is the same for every record.
    fn signature(mut self) -> Option<[u8; BINS / 2]> {
        if self.count == 0 {
            return None;
        }
        if self.count < SHINGLE_WORDS {
            self.end_of_run();
        }
        let value = |bin: usize| {
            let walk = (0u64..).map(|step| mix((bin as u64) << 32 | step) as usize % BINS);
            let found = std::iter::once(bin).chain(walk).find_map(|bin| self.bins[bin]);
            found.expect("a run was hashed, and the walk comes to every bin") as u8 & 0xF
        };
        Some(std::array::from_fn(|byte| value(2 * byte) | value(2 * byte + 1) << 4))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::reader::Chat;
    use serde_json::json;

    fn text(text: &str) -> Sketch {
        Sketch::of(&Content::Text(text.into()))
    }

    fn words(range: std::ops::Range<u32>) -> String {
        range.map(|i| format!("word{i} ")).collect()
    }

    #[test]
    fn the_estimate_is_the_jaccard_index_of_runs_of_words() {
        for (count, shift) in [(400, 20), (400, 100), (60, 4), (2000, 1500), (30, 30)] {
            let shared = f64::from(count - shift) - 4.0;
            let index = (shared / (2.0 * f64::from(count - 4) - shared)).max(0.0);
            let mut sum = 0.0;
            for base in (0..40).map(|i| i * 10_000) {
                let (a, b) = (text(&words(base..base + count)), text(&words(base + shift..base + shift + count)));
                sum += a.similarity(&b);
            }
            assert!((sum / 40.0 - index).abs() < 0.03, "{count} words, shift {shift}: {} for {index}", sum / 40.0);
        }
    }

    #[test]
    fn case_and_white_space_do_not_count_but_signs_and_letters_of_any_script_do() {
        let alike = |a: &str, b: &str| text(a).similarity(&text(b));
        assert_eq!(alike("Good  morning,\nMRS Doolittle. Ça VA", "good morning, mrs doolittle. ça va"), 1.0);
        assert!(alike("what is 3 + 4 in all", "what is 3 - 4 in all") < 0.5);
        assert!(alike("你好吗我很好谢谢你", "你好吗我很坏谢谢你") < 0.8);
        assert_eq!(alike("Yes.", "yes ."), 1.0);
        assert_ne!(text("Yes.").exact, text("yes .").exact);
        assert_eq!(alike("Yes.", "No."), 0.0);
        assert_eq!(text(" \n").signature, None);
    }

    #[test]
    fn what_the_system_says_makes_no_two_records_alike() {
        let chat = |system: &str, said: &str| {
            let messages = vec![json!({"role": "system", "content": system}), json!({"role": "user", "content": said})];
            Sketch::of(&Content::Chat(Chat { messages, ..Chat::default() }))
        };
        let (long, a, b) = (words(0..500), words(1000..1020), words(2000..2020));
        assert!(chat(&long, &a).similarity(&chat(&long, &b)) < 0.1);
        assert_eq!(chat(&long, &a).similarity(&chat("Be brief.", &a)), 1.0);
        assert_ne!(chat(&long, &a).exact, chat("Be brief.", &a).exact);
    }

    #[test]
    fn token_ids_are_words() {
        let tokens = |ids: std::ops::Range<u32>| Sketch::of(&Content::Tokens { ids: ids.collect(), labels: None });
        assert!(tokens(0..100).similarity(&tokens(2..100)) > 0.9);
        assert!(tokens(0..100).similarity(&tokens(100..200)) < 0.1);
    }
}
