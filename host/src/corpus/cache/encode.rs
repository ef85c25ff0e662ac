//! The encoder with the cache before it.

use super::file::EncodingsFile;
use super::{CacheUse, Key, key};
use crate::corpus::encode::{Encoder, Record};
use crate::corpus::reader::RawRecord;
use crate::corpus::tokens::Tokens;
use crate::error::Result;
use rayon::prelude::*;
use std::collections::HashSet;
use std::path::Path;

/// Encodes records chunk by chunk on all cores, and takes from the cache what is there.
pub struct CachedEncoder<'a> {
    encoder: &'a Encoder,
    file: Option<EncodingsFile>,
    used: CacheUse,
    damaged: u64,
    /// What has been read since pages were last given back.
    mapped: Vec<Key>,
}

impl<'a> CachedEncoder<'a> {
    /// The encoder itself.
    pub fn encoder(&self) -> &'a Encoder {
        self.encoder
    }

    /// `encoder` with the cache in `folder`, or with none. An encoder without a tokenizer needs none.
    pub fn new(encoder: &'a Encoder, folder: Option<&Path>) -> Self {
        let file = folder.zip(encoder.identity()).map(|(folder, identity)| EncodingsFile::open(folder, &identity));
        Self { encoder, file, used: CacheUse::default(), damaged: 0, mapped: Vec::new() }
    }

    /// The records of `raws`, at full length; what was not in the cache is there when this returns.
    pub fn encode(&mut self, path: &Path, root: u32, raws: &[&RawRecord]) -> Vec<Result<Record>> {
        let tokens = self.tokens(raws);
        raws.par_iter().zip(tokens).map(|(raw, tokens)| self.encoder.record(path, root, raw, tokens)).collect()
    }

    fn tokens(&mut self, raws: &[&RawRecord]) -> Vec<Result<Tokens>> {
        let encode = |raw: &RawRecord| self.encoder.tokens(&raw.content);
        let Some(file) = &mut self.file else { return raws.par_iter().map(|raw| encode(raw)).collect() };
        let find = |raw: &&RawRecord| {
            let key = key(&raw.content);
            Slot { key, tokens: key.and_then(|key| file.get(&key)).map(Ok), new: false }
        };
        let mut slots: Vec<Slot> = raws.par_iter().map(find).collect();
        // of equal records the first is encoded
        let mut first = HashSet::new();
        for slot in &mut slots {
            slot.new = slot.tokens.is_none() && slot.key.is_none_or(|key| first.insert(key));
        }
        slots.par_iter_mut().zip(raws).filter(|(slot, _)| slot.new).for_each(|(slot, raw)| {
            slot.tokens = Some(encode(raw));
        });
        let new = |slot: &Slot| Some((slot.key.filter(|_| slot.new)?, slot.tokens.as_ref()?.as_ref().ok()?.clone()));
        let new: Vec<(Key, Tokens)> = slots.iter().filter_map(new).collect();
        self.damaged += new.iter().filter(|(key, _)| file.has(key)).count() as u64;
        file.append(&new);
        // mapped bytes take the place of those in memory, and the others of equal records find the first
        slots.par_iter_mut().filter(|slot| slot.new || slot.tokens.is_none()).for_each(|slot| {
            if let Some(tokens) = slot.key.and_then(|key| file.get(&key)) {
                slot.tokens = Some(Ok(tokens));
            }
        });
        let count =
            |of: &dyn Fn(&Slot) -> bool| slots.iter().filter(|slot| slot.key.is_some() && of(slot)).count() as u64;
        self.used.encoded += count(&|slot| slot.new);
        self.used.found += count(&|slot| !slot.new && matches!(slot.tokens, Some(Ok(_))));
        self.mapped.extend(slots.iter().filter_map(|slot| slot.key));
        // nothing was kept of a record that is refused, or where nothing can be
        slots.into_par_iter().zip(raws).map(|(slot, raw)| slot.tokens.unwrap_or_else(|| encode(raw))).collect()
    }

    /// Gives the pages of the records so far back, once they have been looked at: they are read from the file again where they
    /// are needed.
    pub fn release(&mut self) {
        if let Some(file) = &self.file {
            file.release(&self.mapped);
        }
        self.mapped.clear();
    }

    /// As [`CachedEncoder::release`], of all records.
    pub fn release_all(&self) {
        self.file.iter().for_each(EncodingsFile::release_all);
    }

    /// Frees what records are found by: none is looked up from here on.
    pub fn forget_keys(&mut self) {
        self.mapped = Vec::new();
        self.file.iter_mut().for_each(EncodingsFile::forget_keys);
    }

    /// What the cache did, where there is one, and what the person should know of it, each a sentence.
    pub fn finish(self) -> (Option<CacheUse>, Vec<String>) {
        let Some(file) = self.file else { return (None, Vec::new()) };
        let path = file.path().display();
        let mut warnings = Vec::new();
        if file.damaged_bytes() > 0 || self.damaged > 0 {
            warnings.push(format!(
                "the encode cache {path} was damaged ({} bytes of no record, {} records that are not as they were written): \
                 what was lost is encoded again",
                file.damaged_bytes(),
                self.damaged
            ));
        }
        if let Some(e) = file.unwritable() {
            warnings.push(format!("the encode cache {path} cannot be written ({e}): what is encoded now is not kept"));
        }
        (Some(self.used), warnings)
    }
}

/// A record of the chunk at hand.
struct Slot {
    /// What it is found by.
    key: Option<Key>,
    tokens: Option<Result<Tokens>>,
    /// Whether it is encoded now.
    new: bool,
}
