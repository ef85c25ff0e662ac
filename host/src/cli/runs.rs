//! `tunehost runs`.

use super::{RunsCommand, print, print_as};
use crate::error::{Error, Result};
use crate::job;
use crate::run::provenance::{Outcome, Provenance, Status, Verdict};
use crate::run::{diff, verify};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};

pub fn execute(command: &RunsCommand) -> Result<()> {
    match command {
        RunsCommand::List { root, json } => list(root, *json),
        RunsCommand::Show { run, json } => show(run, *json),
        RunsCommand::Diff { a, b, json } => {
            let found = diff::differences(&Provenance::read(a)?, &Provenance::read(b)?);
            print_as(*json, || json!(found), || diff::text(&found))
        }
        RunsCommand::Verify { run, steps, hashes_only, json } => {
            let mut checks = verify::verify(run)?;
            if !hashes_only {
                checks.extend(
                    job::recompute(run, *steps).unwrap_or_else(|error| vec![verify::not_recomputed(run, &error)]),
                );
            }
            print_as(*json, || json!(checks), || verify::text(&checks))?;
            verify::verdict(run, &checks)
        }
    }
}

fn list(root: &Path, json: bool) -> Result<()> {
    let (mut runs, mut broken) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(root).map_err(|e| Error::io("list", root, e))? {
        let path = entry.map_err(|e| Error::io("list", root, e))?.path();
        if path.join(crate::run::folder::PROVENANCE).is_file() {
            match Provenance::read(&path) {
                Ok(run) => runs.push((path, run)),
                Err(error) => broken.push(error),
            }
        }
    }
    runs.sort_by(|(a, x), (b, y)| (&x.created, a).cmp(&(&y.created, b)));
    broken.iter().for_each(|error| eprintln!("{error}"));
    let value = || {
        let run = |(path, run): &(PathBuf, Provenance)| json!({"folder": path, "run_id": run.run_id, "created": run.created, "outcome": run.outcome});
        json!(runs.iter().map(run).collect::<Vec<_>>())
    };
    print_as(json, value, || {
        let mut text = format!("{:<28} {:<20} {:<9} {:>7}  held out\n", "run", "started", "status", "step");
        for (path, run) in &runs {
            let name = path.file_name().unwrap_or_default().display();
            let outcome = run.outcome.as_ref();
            let (status, step) = outcome.map_or(("open", "-".into()), |o| (status(o), o.step.to_string()));
            let held_out = outcome.map(held_out).unwrap_or_default();
            writeln!(text, "{name:<28} {:<20} {status:<9} {step:>7}  {held_out}", run.created).unwrap();
        }
        text
    })
}

fn status(outcome: &Outcome) -> &'static str {
    match outcome.status {
        Status::Finished => "finished",
        Status::Stopped => "stopped",
        Status::Failed => "failed",
    }
}

fn held_out(outcome: &Outcome) -> String {
    let roots = outcome.held_out.iter().map(|(root, loss)| format!("{root} {:.3} -> {:.3}", loss.before, loss.after));
    roots.collect::<Vec<_>>().join(", ")
}

fn show(run: &Path, json: bool) -> Result<()> {
    let provenance = Provenance::read(run)?;
    if json {
        return print(&serde_json::to_string_pretty(&provenance).expect("provenance has string keys"));
    }
    let Provenance { program, machine, kernels, inputs, gates, outcome, .. } = &provenance;
    let mut text = String::new();
    let mut row = |name: &str, value: String| writeln!(text, "{name:<12} {value}").unwrap();
    row("run", provenance.run_id.clone());
    if let Some(parent) = &provenance.parent_run {
        row("starts from", parent.clone());
    }
    row("started", format!("{}  {}", provenance.created, provenance.command_line.join(" ")));
    for resume in &provenance.resumes {
        row("resumed", format!("{} after step {}  {}", resume.at, resume.from_step, resume.command_line.join(" ")));
    }
    let revision = program.git_revision.as_deref().unwrap_or("no git revision");
    row("program", format!("{} {} ({revision})", program.name, program.version));
    row("machine", format!("{} on {}, {} threads", machine.device, machine.device_name, machine.threads));
    for (name, kernel) in kernels {
        row("kernel", format!("{name}: {} (asked for: {})", kernel.resolved, kernel.requested));
    }
    for (name, file) in &inputs.base {
        row("base", format!("{name} {}", file.sha256));
    }
    for (name, file) in [("tokenizer", &inputs.tokenizer), ("template", &inputs.template)] {
        row(name, file.as_ref().map_or("none".into(), |file| file.sha256.clone()));
    }
    for file in &inputs.corpus {
        row("corpus", format!("{} {}", file.path.display(), file.sha256));
    }
    for (kind, plugin) in &inputs.plugins {
        row("plugin", format!("{kind}: {} {} ({}) {}", plugin.name, plugin.version, plugin.source, plugin.sha256));
    }
    if let Some(eligibility) = &provenance.eligibility {
        row("eligibility", eligibility.verdict.clone());
    }
    for (name, gate) in gates {
        let verdict = match gate.verdict {
            Verdict::Passed => "passed",
            Verdict::Warned => "WARNED",
            Verdict::Stopped => "STOPPED",
            Verdict::Off => "off",
        };
        row("gate", format!("{name}: {verdict}: {}", gate.found));
    }
    match outcome {
        None => row("outcome", "open: it is running, or was killed".into()),
        Some(outcome) => {
            let reason = outcome.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            row("outcome", format!("{} after step {}, {}{reason}", status(outcome), outcome.step, outcome.ended));
            if let Some(best) = &outcome.best {
                row("best", format!("step {}, held-out loss {:.4}", best.step, best.loss));
            }
            if !outcome.held_out.is_empty() {
                row("held out", held_out(outcome));
            }
        }
    }
    print(&text)
}
