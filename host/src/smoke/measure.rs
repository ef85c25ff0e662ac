//! The process that starts a process for each shape, and makes a result of how that ends.

use super::child::{Peak, Told};
use super::file::{Outcome, Prediction, SCHEMA, ShapeResult, Smoke};
use super::fingerprint::Fingerprint;
use super::fit::Fit;
use super::shapes::{Asked, asked};
use crate::config::{Config, TrainConfig};
use crate::eligibility;
use crate::error::{Error, Result};
use crate::job::{self, Policies, Prepared, planned_steps};
use crate::plan::memory::Model;
use crate::plan::steps;
use crate::plan::{Source, Spread};
use crate::report::{Reporter, bytes};
use crate::run::clock::utc_now;
use crate::run::lease::DeviceLease;
use crate::run::machine::free_memory_bytes;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;

/// What the standard error of a process that ran out of memory says, in lower case: Rust's allocator, the C library's and the
/// system's words, those of graphics drivers.
const OUT_OF_MEMORY: [&str; 5] =
    ["memory allocation of", "cannot allocate memory", "out of memory", "outofmemory", "out_of_memory"];
/// SIGKILL, with which Linux ends a process when memory is out.
const KILLED: i32 = 9;

/// How to start a process for a shape.
pub struct Options<'a> {
    /// Steps of each shape.
    pub steps: u64,
    /// The command of the process that computes a shape.
    pub command: &'a dyn Fn(&Asked) -> Result<Command>,
}

/// Measures the shapes of the run that `config` describes, by size, up to the first that runs out of memory. Nothing of the device
/// is used by this process.
///
/// # Errors
/// Those of a run before its base is loaded; class `io` where no process can be started.
pub fn measure(config: &Config, options: &Options, reporter: &mut Reporter) -> Result<Smoke> {
    // Times would be those of two.
    let _lease = DeviceLease::take(&config.model.device, config.model.allow_shared)?;
    let manifest = job::manifest(config)?;
    let mut policies = Policies::load(&config.plugins, None)?;
    // What may not be trained on is not computed on either.
    eligibility::ask(config, manifest.as_ref(), &mut policies.eligibility, None, None)?;
    let mut prepared = Prepared::new(config, manifest.map(|manifest| manifest.file), policies, reporter)?;
    // Whole, where the run ends within it.
    let one = TrainConfig { epochs: 1, max_steps: None, ..config.train.clone() };
    let (epoch, _) =
        planned_steps(&Config { train: one, ..config.clone() }, &prepared.corpus, &mut prepared.policies.sampler)?;
    let Prepared { text, checkpoint, spec, lora, corpus, steps: planned, .. } = &prepared;
    let fingerprint = Fingerprint::of(config, checkpoint, lora)?;
    let model = Model::new(config, text, spec, lora);
    let batches = planned.iter().flat_map(|step| &step.batches);
    let tokens: Vec<usize> = batches.map(|batch| batch.tokens(&corpus.train).0).collect();
    let free_bytes = free_memory_bytes(&config.model.device);
    let mut shapes: Vec<ShapeResult> = Vec::new();
    for asked in asked(&tokens, config.train.micro_batch as usize, config.data.max_seq_len) {
        let computed_peak_bytes = model.memory(asked.shape).peak_bytes;
        let result = match shapes.iter().find(|shape| shape.outcome == Outcome::OutOfMemory) {
            Some(_) => ShapeResult::new(asked, computed_peak_bytes, Outcome::NotTried),
            None => of_shape(asked, computed_peak_bytes, options, reporter)?,
        };
        reporter.line(super::text::progress(&result));
        shapes.push(result);
    }
    let points: Vec<(usize, Spread)> =
        shapes.iter().filter_map(|shape| Some((shape.asked.shape.seq_len_tokens, shape.micro_batch_s?))).collect();
    let updates: Vec<Spread> = shapes.iter().filter_map(|shape| shape.optimizer_s).collect();
    let fit = updates.last().and_then(|update| Fit::new(config.train.micro_batch as usize, &points, *update));
    let counted = steps::steps(&model, planned, &corpus.train);
    let epoch = steps::steps(&model, &epoch, &corpus.train);
    let prediction = fit.as_ref().map(|fit| Prediction::new(fit, &counted, &epoch));
    Ok(Smoke {
        schema: SCHEMA,
        source: Source::Measured,
        measured: utc_now(),
        fingerprint,
        free_bytes,
        shapes,
        fit,
        prediction,
    })
}

impl ShapeResult {
    fn new(asked: Asked, computed_peak_bytes: usize, outcome: Outcome) -> Self {
        Self {
            asked,
            computed_peak_bytes,
            outcome,
            why: None,
            steps: 0,
            loaded_bytes: None,
            peak_bytes: None,
            peak_in_use_bytes: None,
            host_peak_bytes: None,
            trained_tokens: None,
            step_s: None,
            micro_batch_s: None,
            optimizer_s: None,
        }
    }

    fn told(&mut self, Peak { bytes, in_use_bytes, host_bytes }: Peak) {
        (self.peak_bytes, self.peak_in_use_bytes, self.host_peak_bytes) = (bytes, in_use_bytes, host_bytes);
    }
}

/// A process that does not outlive this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already cannot be killed, and need not be.
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

fn of_shape(
    asked: Asked,
    computed_peak_bytes: usize,
    options: &Options,
    reporter: &mut Reporter,
) -> Result<ShapeResult> {
    let mut command = (options.command)(&asked)?;
    // It ends when its standard input does, and so with this process.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed =
        |e: std::io::Error| Error::new("io::failed", format!("cannot start a process for a shape: {e}")).source(e);
    let mut running = Running(command.spawn().map_err(failed)?);
    // Held to the end: waiting would close it, and end the process early.
    let _input = running.0.stdin.take();
    let (stdout, mut stderr) = (running.0.stdout.take().expect("piped"), running.0.stderr.take().expect("piped"));
    let said = thread::spawn(move || {
        let mut said = Vec::new();
        _ = stderr.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    });
    let mut result = ShapeResult::new(asked, computed_peak_bytes, Outcome::Fits);
    let done = listen(stdout, &mut result, options.steps, reporter);
    reporter.finish_steps();
    let status = running.0.wait().map_err(failed)?;
    let said = said.join().unwrap_or_default();
    if !(status.success() && done) {
        (result.outcome, result.why) = ended(status, &said);
    }
    Ok(result)
}

/// Takes down what the process tells; whether it did all its steps.
fn listen(stdout: ChildStdout, result: &mut ShapeResult, steps: u64, reporter: &mut Reporter) -> bool {
    let mut walls = Vec::new();
    let shape = result.asked.shape;
    let what = format!("steps of {} x {}", shape.micro_batch, shape.seq_len_tokens);
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Told::Loaded(peak)) => {
                result.loaded_bytes = peak.bytes;
                result.told(peak);
            }
            Ok(Told::Step { wall_s, peak }) => {
                result.steps += 1;
                result.told(peak);
                walls.extend(wall_s);
                reporter.progress(&what, result.steps as usize, steps as usize);
            }
            Ok(Told::Done { micro_batches, trained_tokens, optimizer_s }) => {
                let update = Spread::of(&optimizer_s);
                let of_batch = |wall: &f64| (wall - update.map_or(0.0, |update| update.median)) / micro_batches as f64;
                result.trained_tokens = Some(trained_tokens);
                result.step_s = Spread::of(&walls);
                result.micro_batch_s = Spread::of(&walls.iter().map(of_batch).collect::<Vec<_>>());
                result.optimizer_s = update;
                return true;
            }
            // Another library's words.
            Err(_) => {}
        }
    }
    false
}

/// What the end of a process that did not do all its steps means, and how it ended in words.
fn ended(status: ExitStatus, said: &str) -> (Outcome, Option<String>) {
    let memory = |line: &&str| OUT_OF_MEMORY.iter().any(|words| line.to_lowercase().contains(words));
    if let Some(line) = said.lines().find(memory) {
        return (Outcome::OutOfMemory, Some(line.trim().into()));
    }
    if status.signal() == Some(KILLED) {
        return (Outcome::OutOfMemory, Some("killed by SIGKILL, as the system does when memory is out".into()));
    }
    let is_reason = |line: &&str| line.starts_with("error[") || line.contains("panicked at");
    let words = said.lines().find(is_reason).or(said.lines().last()).unwrap_or("nothing was said");
    (Outcome::Crashed, Some(format!("{status}: {words}")))
}

/// The most memory that a shape had, or when it last told.
pub(super) fn had(result: &ShapeResult) -> String {
    result.peak_bytes.map_or_else(|| "not known".into(), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_out_of_memory_only_where_it_says_so() {
        let status = ExitStatus::from_raw;
        let of = |raw: i32, said: &str| ended(status(raw), said);
        let allocation = "memory allocation of 1073741824 bytes failed";
        assert_eq!(of(6, allocation), (Outcome::OutOfMemory, Some(allocation.into())));
        assert_eq!(of(KILLED, "").0, Outcome::OutOfMemory);
        let io = "error[io::failed]: cannot map w: Cannot allocate memory (os error 12)";
        assert_eq!(of(8 << 8, io), (Outcome::OutOfMemory, Some(io.into())));
        let (outcome, why) =
            of(7 << 8, "warning: a\nerror[gate::not_finite]: step 1 has loss NaN\n  expected: numbers\n");
        assert_eq!(outcome, Outcome::Crashed);
        assert!(why.unwrap().ends_with("7: error[gate::not_finite]: step 1 has loss NaN"));
        assert_eq!(of(11, "").0, Outcome::Crashed);
    }
}
