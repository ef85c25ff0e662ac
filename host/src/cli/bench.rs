//! `tunehost bench`.

use super::{ConfigArgs, print_as};
use crate::bench;
use crate::error::Result;
use crate::job::Rehearsal;
use crate::run::signal::StopRequest;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Times that each part is measured, after one that is not.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    times: u32,
    /// The folder of a run: its kernels are compared with those here, and nothing is measured where they are others.
    #[arg(long, value_name = "RUN")]
    run: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub fn bench(args: &BenchArgs) -> Result<()> {
    let config = args.config.load()?.config;
    let mut rehearsal = Rehearsal::new(&config)?;
    let stop = StopRequest::install()?;
    let (times, run) = (args.times as usize, args.run.as_deref());
    let report = bench::bench(&config, &mut rehearsal, times, run, &|| stop.is_set())?;
    print_as(args.json, || serde_json::to_value(&report).expect("numbers and names are JSON"), || report.to_string())
}
