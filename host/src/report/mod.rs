//! What a person, a log file or a program reads while a command works.
//!
//! On a terminal: a progress bar. Where standard output is none: plain lines. `--quiet`: the final result and errors. `--json`: one JSON object a
//! line on standard output, each with an `event`.

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Seconds between two plain progress lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Where the words go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A bar on a terminal, else plain lines.
    Human,
    /// Results and errors only.
    Quiet,
    /// JSON lines.
    Json,
}

/// One finished optimiser step, as shown.
#[derive(Debug, Clone, Copy)]
pub struct StepView {
    /// Steps done, from 1.
    pub step: u64,
    /// Steps in all.
    pub total: u64,
    /// Mean loss per trained token of this step.
    pub loss: f64,
    /// Real tokens per second over the last steps.
    pub tokens_per_s: f64,
    /// Share of the padded rectangle that is padding.
    pub padding: f64,
    /// Time left.
    pub left: Duration,
}

/// Prints in one of the modes.
#[derive(Debug)]
pub struct Reporter {
    mode: Mode,
    bar: Option<ProgressBar>,
    last_plain: Option<Instant>,
}

impl Reporter {
    /// A reporter for `mode`.
    pub fn new(mode: Mode) -> Self {
        Self { mode, bar: None, last_plain: None }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A line for people.
    pub fn line(&self, text: impl AsRef<str>) {
        if self.mode == Mode::Human {
            self.print(text.as_ref());
        }
    }

    /// A line of the final result: also shown with `--quiet`.
    pub fn result(&self, text: impl AsRef<str>) {
        if self.mode != Mode::Json {
            self.print(text.as_ref());
        }
    }

    /// Something the reader should know before trusting the result: shown in every mode, on standard error.
    pub fn warn(&self, text: impl AsRef<str>) {
        match self.mode {
            Mode::Json => self.event("warning", json!({ "message": text.as_ref() })),
            _ => self.suspend(|| note(format_args!("warning: {}", text.as_ref()))),
        }
    }

    /// An event for programs.
    pub fn event(&self, name: &str, mut fields: Value) {
        if self.mode == Mode::Json {
            let mut event = json!({ "event": name });
            if let (Some(event), Some(fields)) = (event.as_object_mut(), fields.as_object_mut()) {
                event.append(fields);
            }
            self.print(&event.to_string());
        }
    }

    /// A finished step: moves the bar, prints a plain line every few seconds, or emits an event.
    pub fn step(&mut self, view: StepView) {
        match self.mode {
            Mode::Quiet => {}
            Mode::Json => self.event(
                "step",
                json!({"step": view.step, "steps": view.total, "loss": view.loss, "tokens_per_s": view.tokens_per_s,
                       "padding": view.padding, "left_s": view.left.as_secs_f64()}),
            ),
            Mode::Human => self.human_step(view),
        }
    }

    fn human_step(&mut self, view: StepView) {
        let text = format!(
            "loss {:.3}  {:.0} tokens/s  padding {:.1}%  {} left",
            view.loss,
            view.tokens_per_s,
            100.0 * view.padding,
            duration(view.left)
        );
        if on_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let style = ProgressStyle::with_template("step {pos}/{len} {bar:28} {msg}").expect("a valid template");
                ProgressBar::new(view.total).with_style(style)
            });
            bar.set_position(view.step);
            bar.set_message(text);
        } else if view.step == view.total || self.last_plain.is_none_or(|t| t.elapsed() >= PLAIN_INTERVAL) {
            self.last_plain = Some(Instant::now());
            self.print(&format!("step {}/{}  {text}", view.step, view.total));
        }
    }

    /// How far something long has come, for people: on a terminal a bar, else a line now and then.
    pub fn progress(&mut self, what: &str, done: usize, total: usize) {
        if self.mode != Mode::Human {
            return;
        }
        if done >= total {
            return self.finish_steps();
        }
        if on_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let style = ProgressStyle::with_template("{bar:28} {percent}% {msg}").expect("a valid template");
                ProgressBar::new(total as u64).with_style(style)
            });
            bar.set_message(what.to_string());
            bar.set_position(done as u64);
        } else if self.last_plain.get_or_insert_with(Instant::now).elapsed() >= PLAIN_INTERVAL {
            self.last_plain = Some(Instant::now());
            self.print(&format!("{what}: {done} of {total}"));
        }
    }

    /// Takes the bar off the screen.
    pub fn finish_steps(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn suspend(&self, f: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(f),
            None => f(),
        }
    }

    fn print(&self, text: &str) {
        // A closed pipe is the reader's choice, not a failure of the run.
        self.suspend(|| drop(writeln!(std::io::stdout(), "{}", text.trim_end_matches('\n'))));
    }
}

/// A line on standard error. As a closed pipe, a terminal that is gone is no failure of what is written about.
pub fn note(text: impl Display) {
    drop(writeln!(std::io::stderr(), "{text}"));
}

/// Whether a bar can be drawn: it goes to standard error, and must not mix with lines that are piped elsewhere.
fn on_terminal() -> bool {
    std::io::stdout().is_terminal() && std::io::stderr().is_terminal()
}

/// `42 s`, `3 min 05 s`, `2 h 07 min`.
pub fn duration(d: Duration) -> String {
    let s = d.as_secs_f64().round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        _ => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
    }
}

/// `3.4 MiB`.
pub fn bytes(n: usize) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_read_well() {
        assert_eq!(duration(Duration::from_secs_f64(41.6)), "42 s");
        assert_eq!(duration(Duration::from_secs(185)), "3 min 05 s");
        assert_eq!(duration(Duration::from_secs(7620)), "2 h 07 min");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(51_300_000), "48.9 MiB");
    }
}
