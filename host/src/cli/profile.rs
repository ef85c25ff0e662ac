//! `tunehost profile`.

use super::{ConfigArgs, print_as};
use crate::error::{Error, Result};
use crate::job::Rehearsal;
use crate::profile;
use crate::run::atomic::{self, Existing};
use crate::run::signal::StopRequest;
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct ProfileArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Optimiser steps that are measured, after one that is not.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Also write their spans to this new file, for chrome://tracing or Perfetto.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub fn profile(args: &ProfileArgs) -> Result<()> {
    if let Some(path) = &args.trace {
        new_file(path)?;
    }
    let config = args.config.load()?.config;
    let mut rehearsal = Rehearsal::new(&config)?;
    let stop = StopRequest::install()?;
    let (report, recorded) = profile::profile(&config, &mut rehearsal, args.steps as usize, &|| stop.is_set())?;
    print_as(args.json, || serde_json::to_value(&report).expect("numbers and names are JSON"), || report.to_string())?;
    if let Some(path) = &args.trace {
        let trace = profile::chrome_trace(&recorded).to_string();
        atomic::write(path, trace.as_bytes(), Existing::Refuse)?;
    }
    Ok(())
}

/// Whether `path` can be a new file, before anything long starts.
///
/// # Errors
/// `usage::trace_exists`; `io::failed` where its folder is none.
fn new_file(path: &Path) -> Result<()> {
    if path.exists() {
        return Err(
            Error::new("usage::trace_exists", format!("{} exists already", path.display())).help("name a new file")
        );
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::read_dir(folder).map(drop).map_err(|e| Error::io("write the trace into", folder, e))
}
