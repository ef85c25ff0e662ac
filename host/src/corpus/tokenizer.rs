//! The base's tokenizer: text to ids with byte offsets, and back.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use tokenizers::{NormalizedString, Normalizer};

/// `tokenizer.json` and the special tokens that `tokenizer_config.json` names.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: BTreeMap<String, String>,
    adds_bos: bool,
    text_bos: Option<u32>,
    sha256: String,
}

/// Token ids of a text and where each token stands in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The bytes of the text that each token covers; the tokens of one character cut into bytes share its range.
    pub offsets: Vec<Range<usize>>,
}

impl Tokenizer {
    /// Opens the tokenizer of the folder `base`; `None` where the folder has no `tokenizer.json`.
    ///
    /// # Errors
    /// `corpus::bad_tokenizer` for a file that is no tokenizer, or a special token the vocabulary lacks.
    pub fn open(base: &Path) -> Result<Option<Self>> {
        let path = base.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let bytes = std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| Error::new("corpus::bad_tokenizer", format!("{}: {e}", path.display())).source(e))?;
        // a length limit or padding saved with the tokenizer would cut records without a word
        inner
            .with_truncation(None)
            .map_err(|e| Error::new("corpus::bad_tokenizer", format!("{}: {e}", path.display())).source(e))?;
        inner.with_padding(None);

        let config = super::read_json(&base.join("tokenizer_config.json"))?.unwrap_or_default();
        let mut special = BTreeMap::new();
        for (key, value) in config.as_object().into_iter().flatten() {
            // older files have the token as an object with `content`
            let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
            if let (true, Some(text)) = (key.ends_with("_token"), text) {
                if inner.token_to_id(text).is_none() {
                    let message = format!("{}: {key} {text:?} is not in tokenizer.json", base.display());
                    return Err(Error::new("corpus::bad_tokenizer", message));
                }
                special.insert(key.clone(), text.to_string());
            }
        }
        let bos = special.get("bos_token").and_then(|text| inner.token_to_id(text));
        let empty = inner.encode("", true).map_err(failed)?;
        let adds_bos = bos.is_some() && empty.get_ids().first().copied() == bos;
        let text_bos = bos.filter(|_| config.get("add_bos_token") != Some(&Value::Bool(false)));
        Ok(Some(Self { inner, special, adds_bos, text_bos, sha256: crate::hash::sha256(&bytes) }))
    }

    /// The ids of `text` with nothing put in front or behind; special tokens spelled out in it become their ids.
    pub fn encode(&self, text: &str) -> Result<Encoded> {
        let encoding = self.inner.encode(text, false).map_err(failed)?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets })
    }

    /// The text of `ids`, special tokens left out where `skip_special` says so.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(failed)
    }

    /// What the tokenizer cuts up in place of `text`.
    pub fn normalized(&self, text: &str) -> Result<String> {
        let mut text = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut text).map_err(failed)?;
        }
        Ok(text.get().to_string())
    }

    /// The id of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of one token as the vocabulary has it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Whether a token is one that is never made of pieces and never merged into its neighbours.
    pub fn is_added(&self, id: u32) -> bool {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    /// The id of a special token by its key in `tokenizer_config.json`, such as `bos_token`.
    pub fn special_id(&self, key: &str) -> Option<u32> {
        self.special.get(key).and_then(|text| self.id(text))
    }

    /// Special tokens by their key, the variables a chat template sees.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special
    }

    /// The token put in front of plain text: the bos token, unless the tokenizer's configuration turns it off.
    pub fn text_bos(&self) -> Option<u32> {
        self.text_bos
    }

    /// Whether the tokenizer itself puts the bos token in front of what it encodes.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The largest token id and one.
    pub fn id_bound(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// The largest id of an ordinary token, one that was not added to the vocabulary, and one.
    pub fn vocabulary_bound(&self) -> usize {
        let ids = self.inner.get_vocab(false).into_values().filter(|&id| !self.is_added(id));
        ids.max().map_or(0, |id| id as usize + 1)
    }

    /// sha256 of `tokenizer.json`.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

fn failed(error: tokenizers::Error) -> Error {
    Error::new("corpus::tokenizer_failed", format!("the tokenizer failed: {error}")).source(error)
}
