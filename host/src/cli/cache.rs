//! `tunehost cache`.

use super::{CacheFolderArgs, ConfigArgs, OutputArgs, print};
use crate::corpus::cache::{self, CacheFile};
use crate::corpus::{self, EncodeOptions, Encoder, Filled};
use crate::error::{Error, Result};
use crate::model::config::TextConfig;
use crate::model::lora::group;
use crate::report::{bytes, duration};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

pub fn ls(args: &CacheFolderArgs) -> Result<()> {
    let files = cache::list(&folder(args)?, false)?;
    show(args, &files)
}

pub fn verify(args: &CacheFolderArgs) -> Result<()> {
    let files = cache::list(&folder(args)?, true)?;
    show(args, &files)?;
    match files.iter().filter(|file| file.damaged.is_some()).count() {
        0 => Ok(()),
        n => Err(Error::new("corpus::damaged_cache", format!("damaged files of the cache: {n} of {}", files.len()))
            .help("nothing is lost: the next run that needs one encodes again what is damaged, and says so")),
    }
}

pub fn rm(args: &CacheFolderArgs, names: &[String], all: bool) -> Result<()> {
    let folder = folder(args)?;
    let paths: Vec<PathBuf> = match all {
        true => cache::list(&folder, false)?.into_iter().map(|file| file.path).collect(),
        false => names.iter().map(|name| cache::find(&folder, name)).collect::<Result<_>>()?,
    };
    for path in &paths {
        std::fs::remove_file(path).map_err(|e| Error::io("remove", path, e))?;
    }
    print(&match args.json {
        true => json!({"removed": paths}).to_string(),
        false => format!("removed: {}", paths.len()),
    })
}

/// Encodes the sources of a configuration into the cache, and keeps nothing of them in memory.
pub fn fill(args: &ConfigArgs, output: &OutputArgs) -> Result<()> {
    let config = args.load()?.config;
    let data = &config.data;
    let vocab_size = TextConfig::read(&config.model.base)?.vocab_size;
    let options = EncodeOptions::of(data, &config.template);
    let encoder = Encoder::open(&config.model.base, data.template.as_deref(), vocab_size, options)?;
    let folder = corpus::cache_folder(data).ok_or_else(|| {
        Error::new("usage::no_cache", "this configuration has no encode cache").help("set data.cache to a folder")
    })?;
    let mut reporter = output.reporter();
    let started = Instant::now();
    let filled = corpus::fill_cache(&encoder, data, &folder, &mut |done, total| {
        reporter.progress("bytes of the corpus", done, total);
    })?;
    reporter.finish_steps();
    filled.warnings.iter().for_each(|warning| reporter.warn(warning));
    let Filled { records, tokens, used, .. } = filled;
    reporter.result(format!(
        "{} records, {} tokens: {} encoded, {} found in {}, in {}",
        group(records as usize),
        group(tokens as usize),
        group(used.encoded as usize),
        group(used.found as usize),
        folder.display(),
        duration(started.elapsed())
    ));
    reporter.event(
        "cache",
        json!({"folder": folder, "records": records, "tokens": tokens, "encoded": used.encoded, "found": used.found,
               "seconds": started.elapsed().as_secs_f64()}),
    );
    Ok(())
}

fn folder(args: &CacheFolderArgs) -> Result<PathBuf> {
    args.folder.clone().or_else(cache::default_folder).ok_or_else(|| {
        Error::new("usage::no_cache", "neither XDG_CACHE_HOME nor HOME names a folder").help("name it: --folder DIR")
    })
}

fn show(args: &CacheFolderArgs, files: &[CacheFile]) -> Result<()> {
    if args.json {
        return print(&serde_json::to_string_pretty(files).expect("names and numbers are JSON"));
    }
    if files.is_empty() {
        return print(&format!("no encodings in {}", folder(args)?.display()));
    }
    let mut table = format!(
        "{:<16}  {:>10} {:>13} {:>10}  {:<12}  {:<12}  state\n",
        "name", "records", "tokens", "size", "tokenizer", "template"
    );
    for file in files {
        let identity = file.identity.as_ref();
        let short = |sha256: Option<&String>| sha256.map_or("-".into(), |sha256| sha256.chars().take(12).collect());
        let state = match file.damaged {
            None => "whole".into(),
            Some(damage) => format!("damaged: {} bytes of no record, {} records", damage.bytes, damage.records),
        };
        let (tokenizer, template): (String, String) = (
            short(identity.map(|identity| &identity.tokenizer_sha256)),
            short(identity.and_then(|identity| identity.template_sha256.as_ref())),
        );
        let size = bytes(file.bytes as usize);
        table += &format!(
            "{:<16}  {:>10} {:>13} {size:>10}  {tokenizer:<12}  {template:<12}  {state}\n",
            file.name, file.records, file.tokens
        );
    }
    print(&table)
}
