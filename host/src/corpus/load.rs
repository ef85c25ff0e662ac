//! The whole path from the sources of a configuration to the records of a run.

use super::cache::{self, CachedEncoder};
use super::copies::{self, Copies};
use super::duplicates::{Duplicates, Entry};
use super::encode::{Encoder, Record};
use super::file::{Encoded, Line, Place, encode_file, encode_lines};
use super::filter::{Filtering, Judged};
use super::length::LengthLimit;
use super::options::EncodeOptions;
use super::reader;
use super::weigh::{Kept, weigh};
use super::{CacheUse, Corpus, FileInfo, split, turns};
use crate::config::{DataConfig, Overlong, SourceConfig, TemplateConfig};
use crate::error::{Error, Result};
use crate::plugins::{CorpusFilter, Verdict};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records that are cut to the length limit before the pages that hold their tokens are given back. The system maps 64 KiB around
/// each.
const LIMITED_AT_ONCE: usize = 1024;

/// Reads, renders, tokenises, filters, cuts and splits all sources of `config` for the model in the folder `base`, whose
/// embedding has `vocab_size` rows. `progress` is told how many bytes of the files, as they lie on disk, are done, of how many.
///
/// # Errors
/// Class `corpus`, naming file, line and record: a line that cannot be read, a duplicate id, messages without a template,
/// a template and a tokenizer that do not fit, a token beyond the vocabulary, a file that leaves nothing to train. Class
/// `plugin` where the filter fails. A record whose trained part cannot be decided is no error: it stands in the report's
/// `refused`.
pub fn load(
    config: &DataConfig,
    template: &TemplateConfig,
    base: &Path,
    vocab_size: usize,
    filter: &mut CorpusFilter,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Corpus> {
    let options = EncodeOptions::of(config, template);
    let encoder = Encoder::open(base, config.template.as_deref(), vocab_size, options)?;
    if !template.accept_mismatch {
        encoder.require_base_template()?;
    }
    let mut roots: Vec<String> = Vec::new();
    for source in &config.sources {
        if !roots.contains(&source.root) {
            roots.push(source.root.clone());
        }
    }
    let files_of = expand_sources(config)?;
    let mut cached = CachedEncoder::new(&encoder, cache_folder(config).as_deref());
    let mut loader = Loader {
        config,
        filtering: Filtering::new(filter, &roots),
        limit: LengthLimit::new(config.max_seq_len, config.overlong, &roots),
        progress: Progress::new(&files_of, progress),
        places: HashMap::new(),
        paths: Vec::new(),
        read: HashMap::new(),
        train: Vec::new(),
        held_out: Vec::new(),
        entries: Vec::new(),
        unshown_thoughts: 0,
    };
    let mut files = Vec::new();
    let mut read = Vec::new();
    for (source, paths) in config.sources.iter().zip(files_of) {
        let root = roots.iter().position(|root| *root == source.root).unwrap_or_default();
        let first = files.len();
        for path in paths {
            files.push(loader.file(&mut cached, source, path, root as u32)?);
        }
        let records = (std::mem::take(&mut loader.train), std::mem::take(&mut loader.held_out));
        read.push((source, first..files.len(), records));
    }
    cached.forget_keys();
    let duplicates = Duplicates::find(std::mem::take(&mut loader.entries), &roots, config.dedup, config.leakage);
    let mut used = vec![false; duplicates.compared()];
    let mut limited = |kept: Kept, loader: &mut Loader| {
        let record = loader.limited(kept.record)?;
        used[kept.origin as usize] |= record.is_some();
        Ok::<_, Error>(record)
    };
    // tokens lie in the mapped cache: what has been looked at is given back before it fills the memory
    let mut looked_at = 0;
    let mut release = || {
        looked_at += 1;
        if looked_at % LIMITED_AT_ONCE == 0 {
            cached.release_all();
        }
    };
    let mut sources = Vec::new();
    let mut to_train = Vec::new();
    let mut held_out = Vec::new();
    for (source, of_source, (mut of_train, mut of_held_out)) in read {
        for records in [&mut of_train, &mut of_held_out] {
            records.retain(|kept| !duplicates.left_out().contains(&(kept.origin as usize)));
        }
        sources.push(weigh(source, &files[of_source], &mut of_train, &mut of_held_out)?);
        to_train.push(of_train);
        for kept in of_held_out {
            let key = kept.key;
            held_out.extend(limited(kept, &mut loader)?.map(|record| (key, copies::hash(&record), record)));
            release();
        }
    }
    held_out.sort_by_key(|(key, _, record): &(u64, u64, Record)| (record.root, *key));
    let (hashes, held_out): (Vec<u64>, Vec<Record>) =
        held_out.into_iter().map(|(_, hash, record)| (hash, record)).unzip();
    let mut copies = Copies::of(&held_out, hashes.into_iter());
    let mut train: Vec<Record> = Vec::new();
    for of_train in to_train {
        let records = of_train.into_iter().filter_map(|kept| {
            release();
            limited(kept, &mut loader).map(|record| record.inspect(|record| copies.note(record))).transpose()
        });
        // in place: the records of a source are never there twice
        let mut records: Vec<Record> = records.collect::<Result<_>>()?;
        match train.is_empty() {
            true => train = records,
            false => train.append(&mut records),
        }
    }
    let copied = copies.finish();
    cached.release_all();
    let mut warnings = encoder.warnings()?;
    let (cache, of_cache) = cached.finish();
    warnings.extend(of_cache);
    for (index, root) in roots.iter().enumerate() {
        let none = |records: &[Record]| !records.iter().any(|record| record.root as usize == index);
        match (none(&train), none(&held_out)) {
            (true, true) => warnings.push(format!("root {root}: every record is left out, none is trained")),
            (true, false) => warnings.push(format!("root {root}: every record is held out, none is trained")),
            _ => {}
        }
        if config.held_out > 0.0 && none(&held_out) && !none(&train) {
            warnings.push(format!("root {root}: no record is held out, it cannot be evaluated"));
        }
    }
    loader.check_given_ids(train.iter().chain(&held_out))?;
    let duplicates = duplicates.finish(&used);
    if duplicates.leaked() > 0 {
        let (leaked, all) = (duplicates.leaked(), held_out.len());
        warnings.push(format!(
            "held-out records that a trained one is like: {leaked} of {all}, so that their loss says less; \
             data.leakage = \"drop\" leaves those trained ones out"
        ));
    }
    let Loader { filtering, limit, unshown_thoughts, .. } = loader;
    if unshown_thoughts > 0 {
        warnings.push(format!(
            "records with a thought (`reasoning`, `reasoning_content` or `thinking`) that the template does not print, and that \
             is not trained: {unshown_thoughts} [corpus::thoughts_left_out]"
        ));
    }
    let report = limit.finish();
    if !report.refused.is_empty() {
        let first = &report.refused[0].reason;
        warnings.push(format!("records refused and not trained: {}; the first: {first}", report.refused.len()));
    }
    Ok(Corpus {
        roots,
        train,
        held_out,
        copied,
        filtered: filtering.finish(),
        report,
        files,
        sources,
        cache,
        duplicates,
        template: encoder.template().map(|template| template.info().clone()),
        tokenizer_sha256: encoder.tokenizer().ok().map(|tokenizer| tokenizer.sha256().to_string()),
        warnings,
    })
}

/// The folder of the encode cache; `None` where the configuration turns it off, or the user has no cache folder.
pub fn cache_folder(config: &DataConfig) -> Option<PathBuf> {
    match config.cache.as_deref() {
        Some("off") => None,
        Some(folder) => Some(folder.into()),
        None => cache::default_folder(),
    }
}

/// Encodes the sources of `config` into the cache in `folder` and drops them. How many records and tokens there are, refused
/// records left out; what the cache did, and what the person should know of it. `progress` as for [`load`].
///
/// # Errors
/// As [`load`], but for what only a whole corpus shows: duplicate ids, and files that leave nothing to train.
pub fn fill_cache(
    encoder: &Encoder,
    config: &DataConfig,
    folder: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Filled> {
    let files_of = expand_sources(config)?;
    let mut progress = Progress::new(&files_of, progress);
    let mut cached = CachedEncoder::new(encoder, Some(folder));
    let (mut records, mut tokens) = (0, 0);
    for (source, paths) in config.sources.iter().zip(files_of) {
        for path in paths {
            let file = Place { path: &path, columns: &source.columns, root: 0, by: config.split_by };
            let read = encode_file(&mut cached, file, |_, lines, read| {
                for (_, record) in lines {
                    match record {
                        Ok(record) => (records, tokens) = (records + 1, tokens + record.tokens.len() as u64),
                        Err(error) if error.code() == "corpus::undecidable_spans" => {}
                        Err(error) => return Err(error),
                    }
                }
                progress.tell(read);
                Ok(())
            })?;
            progress.file_done(&read);
        }
    }
    let (used, warnings) = cached.finish();
    Ok(Filled { records, tokens, used: used.unwrap_or_default(), warnings })
}

/// What [`fill_cache`] did.
pub struct Filled {
    /// Records of the sources, without those that are refused.
    pub records: u64,
    /// Their tokens.
    pub tokens: u64,
    /// How many of them were there.
    pub used: CacheUse,
    /// What the person should know of the cache, each a sentence.
    pub warnings: Vec<String>,
}

/// The files of each source.
pub(super) fn expand_sources(config: &DataConfig) -> Result<Vec<Vec<PathBuf>>> {
    config.sources.iter().map(|source| reader::expand(&source.path)).collect()
}

/// How much of the sources' files has been read.
struct Progress<'a> {
    /// Bytes of the files before the one at hand.
    done: u64,
    total: u64,
    tell: &'a mut dyn FnMut(usize, usize),
}

impl<'a> Progress<'a> {
    fn new(files_of: &[Vec<PathBuf>], tell: &'a mut dyn FnMut(usize, usize)) -> Self {
        // a file that is not there is an error when it is opened
        let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |file| file.len());
        Self { done: 0, total: files_of.iter().flatten().map(bytes).sum(), tell }
    }

    fn tell(&mut self, read: u64) {
        (self.tell)((self.done + read) as usize, self.total as usize);
    }

    fn file_done(&mut self, file: &FileInfo) {
        self.done += file.bytes;
    }
}

struct Loader<'a> {
    config: &'a DataConfig,
    filtering: Filtering<'a>,
    limit: LengthLimit,
    progress: Progress<'a>,
    /// Where each id stands: an index into `paths`, and a line (of a file of more lines than that, the last that can be told).
    places: HashMap<Arc<str>, (u32, u32)>,
    /// The files so far.
    paths: Vec<PathBuf>,
    /// Which source reads each file, by its canonical path.
    read: HashMap<PathBuf, PathBuf>,
    /// What the source at hand has to train on.
    train: Vec<Kept>,
    /// What is held out of it.
    held_out: Vec<Kept>,
    /// What all sources so far have, for comparison.
    entries: Vec<Entry>,
    /// Records of which the template leaves out a thought.
    unshown_thoughts: u64,
}

/// What became of one file's records.
#[derive(Default)]
struct Tally {
    kept: usize,
    /// Why the first of them was left out by the reader or the filter.
    left_out: Option<String>,
}

impl Loader<'_> {
    fn file(
        &mut self,
        encoder: &mut CachedEncoder,
        source: &SourceConfig,
        path: PathBuf,
        root: u32,
    ) -> Result<FileInfo> {
        // one file may be written, or linked, in many ways; one that is missing is told when it is opened
        let file = path.canonicalize().unwrap_or_else(|_| path.clone());
        if let Some(other) = self.read.insert(file, source.path.clone()) {
            let message = format!("{}: the source {} reads it already", path.display(), other.display());
            return Err(Error::new("corpus::file_twice", message).expected("each file once"));
        }
        self.paths.push(path.clone());
        let source = &SourceConfig { path, ..source.clone() };
        let mut tally = Tally::default();
        let place = Place { path: &source.path, columns: &source.columns, root, by: self.config.split_by };
        let mut file = encode_file(encoder, place, |encoder, lines, read| {
            let lines = self.name_apart(lines, source)?;
            let lines = self.set_refused_aside(lines, root, &mut tally)?;
            self.filter(encoder, lines, source, place, &mut tally)?;
            self.progress.tell(read);
            Ok(())
        })?;
        self.progress.file_done(&file);
        if tally.kept == 0 {
            let reason = tally.left_out.map_or(String::new(), |reason| format!("; the first: {reason}"));
            let message = format!("{}: none of its {} records can be trained", source.path.display(), file.records);
            return Err(Error::new("corpus::nothing_to_train", message + &reason)
                .expected("records with an assistant turn, or text, within data.max_seq_len"));
        }
        file.root = source.root.clone();
        Ok(file)
    }

    /// Files of the same name in two folders: records without an id of their own are told apart by their root, and in one
    /// root by their file's whole path.
    fn name_apart(&mut self, mut lines: Vec<Encoded>, source: &SourceConfig) -> Result<Vec<Encoded>> {
        for (line, record) in &mut lines {
            if !line.named && self.places.contains_key(line.id.as_str()) {
                line.id = format!("{}/{}", source.root, line.id);
                if self.places.contains_key(line.id.as_str()) {
                    line.id = format!("{}-{}", source.path.display(), line.line);
                }
            }
            let id: Arc<str> = line.id.as_str().into();
            if let Ok(record) = record {
                record.id = id.clone();
            }
            let place = (self.paths.len() as u32 - 1, u32::try_from(line.line).unwrap_or(u32::MAX));
            if let Some(first) = self.places.insert(id, place) {
                let at = |(path, line): (u32, u32)| format!("{}:{line}", self.paths[path as usize].display());
                let message = format!("{}: the id {:?} stands at {} too", at(place), line.id, at(first));
                return Err(Error::new("corpus::duplicate_id", message).expected("ids that are unique in the corpus")
                    .help("records without an `id` are named after their file and line, and after their root or their path where that is taken"));
            }
        }
        Ok(lines)
    }

    fn set_refused_aside(&mut self, lines: Vec<Encoded>, root: u32, tally: &mut Tally) -> Result<Vec<(Line, Record)>> {
        let mut encoded = Vec::with_capacity(lines.len());
        for (line, record) in lines {
            match record {
                Ok(record) => encoded.push((line, record)),
                Err(error) if error.code() == "corpus::undecidable_spans" => {
                    tally.left_out.get_or_insert_with(|| error.message().to_string());
                    self.limit.refuse(line.id, root, error.message().to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(encoded)
    }

    fn filter(
        &mut self,
        encoder: &mut CachedEncoder,
        lines: Vec<(Line, Record)>,
        source: &SourceConfig,
        file: Place,
        tally: &mut Tally,
    ) -> Result<()> {
        let judged: Vec<Judged> = lines.iter().map(|(line, record)| Judged { json: &line.json, record }).collect();
        let mut verdicts = self.filtering.judge(&judged)?;
        let replacing = lines.iter().zip(&mut verdicts).filter_map(|((line, _), verdict)| match verdict {
            Verdict::Replace(json) => Some((line.line, std::mem::take(json).into_bytes())),
            _ => None,
        });
        let mut replacements = encode_lines(encoder, file, replacing.collect()).into_iter();
        for ((line, record), verdict) in lines.into_iter().zip(verdicts) {
            let place = place(source, line.line);
            let record_id = record.id.clone();
            match verdict {
                Verdict::Keep => self.keep(encoder.encoder(), &line, source, record, tally)?,
                Verdict::Drop(reason) => {
                    tally
                        .left_out
                        .get_or_insert_with(|| format!("{place}: dropped by {}: {reason}", self.filtering.filter()));
                }
                Verdict::Replace(_) => {
                    let (replaced, record) = replacements
                        .next()
                        .expect("a JSON object is not blank")
                        .and_then(|(replaced, record)| Ok((replaced, record?)))
                        .map_err(|error| self.filtering.untrainable(&line.id, &place, error))?;
                    let record = Record { id: record_id, ..record };
                    self.keep(encoder.encoder(), &Line { id: line.id, ..replaced }, source, record, tally)?;
                }
            }
        }
        Ok(())
    }

    fn keep(
        &mut self,
        encoder: &Encoder,
        line: &Line,
        source: &SourceConfig,
        record: Record,
        tally: &mut Tally,
    ) -> Result<()> {
        let (root, limit) = (record.root, self.config.max_seq_len);
        let held_out = split::is_held_out(line.key, self.config.held_out);
        let sketch = line.sketch.clone();
        let origin = self.entries.len() as u32;
        self.unshown_thoughts += u64::from(line.unshown_thought);
        self.entries.push(Entry { id: record.id.clone(), root, held_out, sketch });
        let mut records = vec![record];
        if self.config.overlong == Overlong::SplitTurns && records[0].tokens.len() > limit {
            records = match turns::split(encoder, line, source, records.remove(0), limit) {
                Err(error) if error.code() == "corpus::undecidable_spans" => {
                    self.limit.refuse(line.id.clone(), root, error.message().to_string());
                    return Ok(());
                }
                parts => parts?,
            };
            if records.len() > 1 {
                self.limit.split(root, records.len());
            }
        }
        for record in records {
            tally.kept += usize::from(self.limit.leaves(&record));
            let side = if held_out { &mut self.held_out } else { &mut self.train };
            side.push(Kept { key: line.key, origin, record });
        }
        Ok(())
    }

    /// Whether the ids given to copies and parts of `records` are unique too: those that stand in files are.
    fn check_given_ids<'a>(&self, records: impl Iterator<Item = &'a Record>) -> Result<()> {
        let mut given = HashSet::new();
        for Record { id, .. } in records {
            // one and the same is the id of a file's record itself
            let of_file = self.places.get_key_value(id).map(|(id, _)| id);
            if of_file.map_or_else(|| !given.insert(id.clone()), |of_file| !Arc::ptr_eq(of_file, id)) {
                let message = format!("a copy or a part of a record is called {id:?}, which is a record's own id");
                return Err(Error::new("corpus::duplicate_id", message).expected("ids that are unique in the corpus"));
            }
        }
        Ok(())
    }

    /// The record within the length limit; `None` where nothing is left to train.
    fn limited(&mut self, record: Record) -> Result<Option<Record>> {
        let id = record.id.clone();
        self.limit.apply(record).map_err(|error| match self.places.get(&id) {
            Some((path, line)) => error.at(&format!("{}:{line}", self.paths[*path as usize].display())),
            None => error.at(&id),
        })
    }
}

fn place(source: &SourceConfig, line: u64) -> String {
    format!("{}:{line}", source.path.display())
}
