//! `tunehost run` and `tunehost resume`.

use super::{ResumeArgs, RunArgs};
use crate::error::Result;
use crate::job::{self, Otherwise};
use crate::report::Reporter;
use crate::run::clock::Until;

pub fn run(args: &RunArgs) -> Result<()> {
    let mut reporter = args.output.reporter();
    let until = end_at(args.until.as_deref(), &reporter)?;
    job::start(&args.config.load()?, args.run_dir.as_deref(), until.as_ref(), &mut reporter)
}

pub fn resume(args: &ResumeArgs) -> Result<()> {
    let mut reporter = args.output.reporter();
    let until = end_at(args.until.as_deref(), &reporter)?;
    let otherwise = Otherwise { sets: &args.sets, allow: &args.allow, until: until.as_ref() };
    job::resume(&args.run, &otherwise, &mut reporter)
}

/// When the process is to have ended, as `--until` says, and says so.
fn end_at(until: Option<&str>, reporter: &Reporter) -> Result<Option<Until>> {
    let until = until.map(Until::parse).transpose()?;
    until.iter().for_each(|until| reporter.line(format!("until       {}", until.local)));
    Ok(until)
}
