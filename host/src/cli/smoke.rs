//! `tunehost smoke`.

use super::{ConfigArgs, print};
use crate::error::{Error, Result};
use crate::plan::memory::Shape;
use crate::report::{Mode, Reporter};
use crate::smoke::child::{self, LEAST_STEPS};
use crate::smoke::{self, Asked, Options, Smoke};
use clap::Args;
use std::path::PathBuf;
use std::process::Command;

#[derive(Debug, Args)]
pub struct SmokeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Steps of each shape, 3 or more: the first and the last are not timed.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(LEAST_STEPS..))]
    steps: u64,
    /// Write what was measured to this file. `plan --smoke` reads it there; `run` reads <run.root>/<name>.smoke.json alone, where it is
    /// written without this.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print what was measured as JSON.
    #[arg(long)]
    json: bool,
    /// Compute this shape, ROWSxTOKENS, in this process, and tell what it takes as JSON lines. For the process that measures.
    #[arg(long, hide = true, value_name = "SHAPE")]
    shape: Option<String>,
}

pub fn smoke(args: &SmokeArgs) -> Result<()> {
    let config = args.config.load()?.config;
    if let Some(shape) = &args.shape {
        let line = |told: &child::Told| print(&serde_json::to_string(told).expect("numbers and names are JSON"));
        return child::compute(&config, read_shape(shape)?, args.steps, &mut |told| line(told));
    }
    let command = |asked: &Asked| {
        let program = std::env::current_exe()
            .map_err(|e| Error::new("io::failed", format!("cannot find this program: {e}")).source(e))?;
        let Shape { micro_batch, seq_len_tokens } = asked.shape;
        let mut command = Command::new(program);
        command.arg("smoke").arg(&args.config.config).args(["--steps", &args.steps.to_string()]);
        command.args(args.config.sets().iter().flat_map(|set| ["--set", set]));
        command.args(args.config.plugins.iter().flat_map(|plugin| ["--plugins", plugin]));
        command.args(["--shape", &format!("{micro_batch}x{seq_len_tokens}")]);
        Ok(command)
    };
    let mut reporter = Reporter::new(if args.json { Mode::Quiet } else { Mode::Human });
    let options = Options { steps: args.steps, command: &command };
    let out = args.out.clone().unwrap_or_else(|| smoke::path_of(&config));
    Smoke::require_writable(&out)?;
    let measured = smoke::measure(&config, &options, &mut reporter)?;
    measured.write(&out)?;
    match args.json {
        true => print(&serde_json::to_string_pretty(&measured).expect("numbers and names are JSON")),
        false => print(&format!("\n{measured}\nwritten to {}", out.display())),
    }
}

fn read_shape(text: &str) -> Result<Shape> {
    let shape = text.split_once('x').and_then(|(rows, tokens)| {
        Some(Shape { micro_batch: rows.parse().ok()?, seq_len_tokens: tokens.parse().ok()? })
    });
    shape.filter(|shape| shape.micro_batch > 0 && shape.seq_len_tokens > 1).ok_or_else(|| {
        Error::new("usage::shape", format!("`--shape {text}` is no shape")).expected("rows and tokens, such as 2x4096")
    })
}
