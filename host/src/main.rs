//! The `tunehost` command.

use clap::Parser;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tunehost::{cli, report};

fn main() -> ExitCode {
    // What plugins log: warnings, unless TUNEHOST_LOG says otherwise (`TUNEHOST_LOG=info`).
    let filter = EnvFilter::try_from_env("TUNEHOST_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time();
    log.log_internal_errors(false).init();
    match cli::execute(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::note(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
