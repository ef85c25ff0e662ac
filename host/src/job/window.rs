//! `[window]`: commands around a run, such as those that take another service off the device and bring it back.

use crate::config::WindowConfig;
use crate::error::{Error, Result};
use crate::report::{Reporter, duration};
use crate::run::clock::utc_now;
use crate::run::folder::{RunFolder, WINDOW_LOG};
use crate::run::signal::StopRequest;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often a command is looked at.
const POLL: Duration = Duration::from_millis(10);

/// The window of one process of a run. Once it began to open it is to be closed, however the run ends.
pub struct Window<'a> {
    config: &'a WindowConfig,
    log: PathBuf,
    begun: bool,
}

impl<'a> Window<'a> {
    /// The window of the run in `folder`, not yet open.
    pub fn new(config: &'a WindowConfig, folder: &RunFolder) -> Self {
        Self { config, log: folder.file(WINDOW_LOG), begun: false }
    }

    /// Runs the commands of `open`, one after the other, up to the first that fails or to a request to stop.
    ///
    /// # Errors
    /// `run::window_open` for a command that fails, cannot be started or does not end; class `io` for the log.
    pub fn open(&mut self, stop: &StopRequest, reporter: &Reporter) -> Result<()> {
        for (i, command) in self.config.open.iter().enumerate() {
            if stop.is_set() {
                return Ok(());
            }
            self.begun = true;
            self.run(&format!("window.open[{i}]"), command, reporter).map_err(|problem| {
                self.error("run::window_open", problem).help("nothing was loaded; window.close was run")
            })?;
        }
        Ok(())
    }

    /// Runs every command of `close`, whatever became of those before it; once, and only where `open` began.
    ///
    /// # Errors
    /// `run::window_close`, naming each command that failed.
    pub fn close(&mut self, reporter: &Reporter) -> Result<()> {
        if !std::mem::take(&mut self.begun) {
            return Ok(());
        }
        let commands = self.config.close.iter().enumerate();
        let problems: Vec<String> = commands
            .filter_map(|(i, command)| self.run(&format!("window.close[{i}]"), command, reporter).err())
            .collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(self
            .error("run::window_close", problems.join("; "))
            .help("what the run computed is saved; run the command by hand"))
    }

    fn error(&self, code: &'static str, problem: String) -> Error {
        let log = self.log.display();
        Error::new(code, problem).expected("exit status 0").help(format!("what it printed is in {log}"))
    }

    /// Runs one command to its end, its output appended to the log; what went wrong, in words.
    fn run(&self, name: &str, command: &[String], reporter: &Reporter) -> Result<(), String> {
        let shown = command.join(" ");
        reporter.line(format!("window      {name}: {shown}"));
        let started = Instant::now();
        let ended = self
            .log(format_args!("{} {name}: {shown}", utc_now()))
            .and_then(|log| spawn(command, log))
            .and_then(|child| wait(child, Duration::from_secs(self.config.deadline_s)));
        let outcome = match &ended {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => format!("killed: it did not end within {} s", self.config.deadline_s),
            Err(e) => e.to_string(),
        };
        let logged = self.log(format_args!("{} {name}: {outcome}, {}", utc_now(), duration(started.elapsed())));
        match ended {
            Ok(Some(status)) if status.success() => {
                logged.map(drop).map_err(|e| format!("{}: {e}", self.log.display()))
            }
            _ => Err(format!("{name} ({shown}): {outcome}")),
        }
    }

    /// Appends a line to the log, and returns it for what comes next.
    fn log(&self, line: std::fmt::Arguments) -> std::io::Result<File> {
        let mut log = OpenOptions::new().append(true).create(true).open(&self.log)?;
        log.write_all(format!("{line}\n").as_bytes())?;
        Ok(log)
    }
}

/// Starts a command in a process group of its own: Ctrl-C is for the run, which closes the window afterwards.
fn spawn(command: &[String], log: File) -> std::io::Result<Child> {
    let (program, arguments) = command.split_first().expect("checked with the configuration");
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).spawn()
}

/// How a command ended; nothing where it was killed at its deadline.
fn wait(mut child: Child, deadline: Duration) -> std::io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}
