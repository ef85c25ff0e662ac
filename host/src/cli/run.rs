//! `tunehost run` and `tunehost resume`.

use super::{ResumeArgs, RunArgs};
use crate::config;
use crate::error::Result;
use crate::job;

pub fn run(args: &RunArgs) -> Result<()> {
    let resolved = config::load(&args.config.config, &args.config.sets, &args.config.plugins)?;
    job::start(&resolved, args.run_dir.as_deref(), &mut args.output.reporter())
}

pub fn resume(args: &ResumeArgs) -> Result<()> {
    job::resume(&args.run, &args.sets, &mut args.output.reporter())
}
