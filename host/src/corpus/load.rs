//! The whole path from the sources of a configuration to the records of a run.

use super::cache::{self, CachedEncoder};
use super::duplicates::{Duplicates, Entry};
use super::encode::{Encoder, Record};
use super::file::{Encoded, Line, Place, encode_file, encode_lines};
use super::filter::{Filtering, Judged};
use super::length::LengthLimit;
use super::options::EncodeOptions;
use super::reader;
use super::weigh::{Keyed, weigh};
use super::{CacheUse, Corpus, FileInfo, split, turns};
use crate::config::{DataConfig, Overlong, SourceConfig, TemplateConfig};
use crate::error::{Error, Result};
use crate::plugins::{CorpusFilter, Verdict};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Records that are cut to the length limit before the pages that hold their tokens are given back.
const LIMITED_AT_ONCE: usize = 4096;

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
        parts: HashMap::new(),
        read: HashMap::new(),
        train: Vec::new(),
        held_out: Vec::new(),
        entries: Vec::new(),
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
    let duplicates = Duplicates::find(std::mem::take(&mut loader.entries), &roots, config.dedup, config.leakage);
    let left_out = duplicates.left_out();
    let mut sources = Vec::new();
    let mut train = Vec::new();
    let mut held_out = Vec::new();
    for (source, of_source, (mut to_train, mut to_hold_out)) in read {
        for records in [&mut to_train, &mut to_hold_out] {
            records.retain(|(_, record)| !left_out.contains(loader.origin(&record.id)));
        }
        sources.push(weigh(source, &files[of_source], &mut to_train, &mut to_hold_out)?);
        for (at, (_, record)) in to_train.into_iter().enumerate() {
            train.extend(loader.limited(record)?);
            if at % LIMITED_AT_ONCE == 0 {
                cached.release_all();
            }
        }
        for (key, record) in to_hold_out {
            held_out.extend(loader.limited(record)?.map(|record| (key, record)));
        }
        cached.release_all();
    }
    held_out.sort_by_key(|(key, record): &(u64, Record)| (record.root, *key));
    let held_out: Vec<Record> = held_out.into_iter().map(|(_, record)| record).collect();
    let mut warnings = encoder.warnings()?;
    let (cache, of_cache) = cached.finish();
    warnings.extend(of_cache);
    for (index, root) in roots.iter().enumerate() {
        let none = |records: &[Record]| !records.iter().any(|record| record.root as usize == index);
        if none(&train) {
            warnings.push(format!("root {root}: every record is held out, none is trained"));
        }
        if config.held_out > 0.0 && none(&held_out) {
            warnings.push(format!("root {root}: no record is held out, it cannot be evaluated"));
        }
    }
    let mut ids = HashSet::new();
    if let Some(copy) = train.iter().chain(&held_out).find(|record| !ids.insert(record.id.as_str())) {
        let message = format!("a copy or a part of a record is called {:?}, which is a record's own id", copy.id);
        return Err(Error::new("corpus::duplicate_id", message).expected("ids that are unique in the corpus"));
    }
    ids.extend(loader.parts.values().map(String::as_str));
    let duplicates = duplicates.finish(&ids);
    if duplicates.leaked() > 0 {
        let (leaked, all) = (duplicates.leaked(), held_out.len());
        warnings.push(format!(
            "held-out records that a trained one is like: {leaked} of {all}, so that their loss says less; \
             data.leakage = \"drop\" leaves those trained ones out"
        ));
    }
    let Loader { filtering, limit, .. } = loader;
    let report = limit.finish();
    if !report.refused.is_empty() {
        let first = &report.refused[0].reason;
        warnings.push(format!("records refused and not trained: {}; the first: {first}", report.refused.len()));
    }
    Ok(Corpus {
        roots,
        train,
        held_out,
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
fn expand_sources(config: &DataConfig) -> Result<Vec<Vec<PathBuf>>> {
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
    /// Where each id stands: an index into `paths`, and a line.
    places: HashMap<String, (u32, u64)>,
    /// The files so far.
    paths: Vec<PathBuf>,
    /// The record that a part of one belongs to.
    parts: HashMap<String, String>,
    /// Which source reads each file, by its canonical path.
    read: HashMap<PathBuf, PathBuf>,
    /// What the source at hand has to train on.
    train: Keyed,
    /// What is held out of it.
    held_out: Keyed,
    /// What all sources so far have, for comparison.
    entries: Vec<Entry>,
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
            if !line.named && self.places.contains_key(&line.id) {
                line.id = format!("{}/{}", source.root, line.id);
                if self.places.contains_key(&line.id) {
                    line.id = format!("{}-{}", source.path.display(), line.line);
                }
                if let Ok(record) = record {
                    record.id = line.id.clone();
                }
            }
            let place = (self.paths.len() as u32 - 1, line.line);
            if let Some(first) = self.places.insert(line.id.clone(), place) {
                let at = |(path, line): (u32, u64)| format!("{}:{line}", self.paths[path as usize].display());
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
                    let record = Record { id: line.id.clone(), ..record };
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
                self.parts.extend(records.iter().map(|part| (part.id.clone(), line.id.clone())));
            }
        }
        for record in records {
            tally.kept += usize::from(self.limit.leaves(&record));
            match held_out {
                true => self.held_out.push((line.key, record)),
                false => self.train.push((line.key, record)),
            }
        }
        Ok(())
    }

    /// The record that the record `id` is, or is a part of.
    fn origin<'a>(&'a self, id: &'a str) -> &'a str {
        self.parts.get(id).map_or(id, String::as_str)
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
