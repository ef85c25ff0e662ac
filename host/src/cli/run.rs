//! `tunehost run` and `tunehost resume`.

use super::{ResumeArgs, RunArgs};
use crate::config;
use crate::error::Result;
use crate::job::{self, Otherwise};
use crate::report::Reporter;
use crate::run::clock::Until;

pub fn run(args: &RunArgs) -> Result<()> {
    let mut reporter = args.output.reporter();
    let (mut sets, mut plugins) = (args.config.sets.clone(), args.config.plugins.clone());
    sets.extend(args.device.as_ref().map(|device| format!("model.device={device}")));
    end_at(args.until.as_deref(), &mut sets, &mut plugins, &reporter)?;
    let resolved = config::load(&args.config.config, &sets, &plugins)?;
    job::start(&resolved, args.run_dir.as_deref(), &mut reporter)
}

pub fn resume(args: &ResumeArgs) -> Result<()> {
    let mut reporter = args.output.reporter();
    let (mut sets, mut plugins, mut allow) = (args.sets.clone(), Vec::new(), args.allow.clone());
    if end_at(args.until.as_deref(), &mut sets, &mut plugins, &reporter)? {
        // When a run is saved and ends decides nothing of what it computes; provenance notes the other scheduler.
        allow.push(job::SCHEDULER.into());
    }
    let otherwise = Otherwise { sets: &sets, plugins: &plugins, allow: &allow };
    job::resume(&args.run, &otherwise, &mut reporter)
}

/// `--until` is the scheduler `window` with its setting `until`. Whether there is one.
fn end_at(until: Option<&str>, sets: &mut Vec<String>, plugins: &mut Vec<String>, reporter: &Reporter) -> Result<bool> {
    let Some(until) = until.map(Until::parse).transpose()? else { return Ok(false) };
    reporter.line(format!("until       {}", until.local));
    sets.push(format!("plugins.config.checkpoint_scheduler.until=\"{}\"", until.utc));
    plugins.push("checkpoint-scheduler=window".into());
    Ok(true)
}
