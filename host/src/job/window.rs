//! `[window]`: commands around a run, such as those that take another service off the device and bring it back.

use crate::config::WindowConfig;
use crate::error::{Error, Result};
use crate::report::{Reporter, duration, note};
use crate::run::atomic::{self, Existing};
use crate::run::clock::utc_now;
use crate::run::folder::{RunFolder, WINDOW_LOG, WINDOW_OPEN};
use crate::run::signal::StopRequest;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a command is looked at.
const POLL: Duration = Duration::from_millis(10);

/// The window of one process of a run. Once it began to open it is closed, however the run ends: by [`Window::close`], when it is
/// dropped, or before a second Ctrl-C ends the process. Only a process that is killed leaves it open; the next one closes it.
pub struct Window(Arc<Commands>);

/// What a second Ctrl-C needs of a window, on another thread.
struct Commands {
    config: WindowConfig,
    log: PathBuf,
    /// A file that is there while the window is open.
    mark: PathBuf,
    /// Whether it is to be closed; locked while it is.
    begun: Mutex<bool>,
    closing: AtomicBool,
    /// The last command of `open` that was started.
    opening: Mutex<Option<Running>>,
}

/// A command that was started, for the thread that waits for it and the one that may kill it.
type Running = Arc<Mutex<Child>>;

/// Where lines for people go.
type Say<'a> = &'a dyn Fn(String);

impl Window {
    /// The window of the run in `folder`: not yet open, or as a process that was killed left it.
    pub fn new(config: &WindowConfig, folder: &RunFolder) -> Self {
        let mark = folder.file(WINDOW_OPEN);
        Self(Arc::new(Commands {
            config: config.clone(),
            log: folder.file(WINDOW_LOG),
            begun: Mutex::new(mark.exists()),
            mark,
            closing: AtomicBool::new(false),
            opening: Mutex::new(None),
        }))
    }

    /// Whether it is to be closed.
    pub fn is_open(&self) -> bool {
        *lock(&self.0.begun)
    }

    /// Runs the commands of `open`, one after the other, up to the first that fails or to a request to stop.
    ///
    /// # Errors
    /// `run::window_open` for a command that fails, cannot be started or does not end; class `io` for its files.
    pub fn open(&self, stop: &StopRequest, reporter: &Reporter) -> Result<()> {
        let commands = self.0.clone();
        stop.before_end(move || commands.close_at_once());
        let say = |line| reporter.line(line);
        for (i, command) in self.0.config.open.iter().enumerate() {
            if stop.is_set() {
                return Ok(());
            }
            let name = format!("window.open[{i}]");
            let started = {
                // Held, so that nothing is opened beside a second Ctrl-C that closes.
                let mut begun = lock(&self.0.begun);
                if !*begun {
                    let text = "window.close is due\n";
                    atomic::write(&self.0.mark, text.as_bytes(), Existing::Refuse)?;
                    *begun = true;
                }
                let started = self.0.start(&name, command, &say);
                *lock(&self.0.opening) = started.as_ref().ok().cloned();
                started
            };
            self.0.wait(&name, command, started).map_err(|problem| {
                self.0.error("run::window_open", problem).help("nothing was loaded; window.close was run")
            })?;
        }
        Ok(())
    }

    /// Runs every command of `close`, whatever became of those before it; once, and only where `open` began.
    ///
    /// # Errors
    /// `run::window_close`, naming each command that failed.
    pub fn close(&self, reporter: &Reporter) -> Result<()> {
        self.0.close(&|line| reporter.line(line))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Err(error) = self.0.close(&note) {
            note(format_args!("warning: {error}"));
        }
    }
}

impl Commands {
    fn close(&self, say: Say) -> Result<()> {
        self.closing.store(true, Ordering::SeqCst);
        self.close_held(lock(&self.begun), say)
    }

    fn close_held(&self, mut begun: MutexGuard<bool>, say: Say) -> Result<()> {
        if !std::mem::take(&mut *begun) {
            return Ok(());
        }
        let run = |(i, command): (usize, &Vec<String>)| {
            let name = format!("window.close[{i}]");
            self.wait(&name, command, self.start(&name, command, say)).err()
        };
        let mut problems: Vec<String> = self.config.close.iter().enumerate().filter_map(run).collect();
        problems.extend(fs::remove_file(&self.mark).err().map(|e| format!("{}: {e}", self.mark.display())));
        if problems.is_empty() {
            return Ok(());
        }
        Err(self
            .error("run::window_close", problems.join("; "))
            .help("what the run computed is saved; run the command by hand"))
    }

    /// Closes beside a run that goes on, for a process that ends then; not where the run closes already and ends by itself.
    fn close_at_once(&self) -> bool {
        if self.closing.swap(true, Ordering::SeqCst) {
            return false;
        }
        let begun = lock(&self.begun);
        if *begun {
            note("interrupted again: window.close, then the end");
            if let Some(opening) = &*lock(&self.opening) {
                kill(&mut lock(opening));
            }
        }
        if let Err(error) = self.close_held(begun, &note) {
            note(error);
        }
        true
    }

    fn error(&self, code: &'static str, problem: String) -> Error {
        let log = self.log.display();
        Error::new(code, problem).expected("exit status 0").help(format!("what it printed is in {log}"))
    }

    /// Starts one command, its output appended to the log, or shown where that cannot be written: what is open is closed all the
    /// same. It has a process group of its own: Ctrl-C is for the run, which
    /// closes the window afterwards.
    fn start(&self, name: &str, command: &[String], say: Say) -> io::Result<Running> {
        let shown = command.join(" ");
        say(format!("window      {name}: {shown}"));
        let log = self.log(format_args!("{} {name}: {shown}", utc_now()));
        let (program, arguments) = command.split_first().expect("checked with the configuration");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).process_group(0);
        match log.and_then(|log| Some((log.try_clone().ok()?, log))) {
            Some((out, err)) => command.stdout(out).stderr(err),
            None => command.stdout(io::stderr()).stderr(io::stderr()),
        };
        Ok(Arc::new(Mutex::new(command.spawn()?)))
    }

    /// Waits for the end of a command that was started; what went wrong, in words.
    fn wait(&self, name: &str, command: &[String], started: io::Result<Running>) -> Result<(), String> {
        let since = Instant::now();
        let ended = started.and_then(|running| self.status(&running, since));
        let outcome = match &ended {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => format!("killed: it did not end within {} s", self.config.deadline_s),
            Err(e) => e.to_string(),
        };
        self.log(format_args!("{} {name}: {outcome}, {}", utc_now(), duration(since.elapsed())));
        match ended {
            Ok(Some(status)) if status.success() => Ok(()),
            _ => Err(format!("{name} ({}): {outcome}", command.join(" "))),
        }
    }

    /// How the command that runs ended; nothing where it was killed at its deadline.
    fn status(&self, running: &Mutex<Child>, since: Instant) -> io::Result<Option<ExitStatus>> {
        let deadline = Duration::from_secs(self.config.deadline_s);
        loop {
            let mut child = lock(running);
            let ended = child.try_wait()?;
            if ended.is_some() {
                return Ok(ended);
            }
            if since.elapsed() >= deadline {
                kill(&mut child);
                child.wait()?;
                return Ok(None);
            }
            drop(child);
            std::thread::sleep(POLL);
        }
    }

    /// Appends a line to the log, and returns it for what comes next; nothing where it cannot be written, which is said.
    fn log(&self, line: std::fmt::Arguments) -> Option<File> {
        let log = OpenOptions::new().append(true).create(true).open(&self.log);
        let logged = log.and_then(|mut log| log.write_all(format!("{line}\n").as_bytes()).map(|()| log));
        logged.inspect_err(|e| note(format_args!("warning: {}: {e}; not logged: {line}", self.log.display()))).ok()
    }
}

/// Kills a command that still runs, with everything that it started and did not take out of its process group.
fn kill(child: &mut Child) {
    if let Ok(None) = child.try_wait() {
        // The standard library knows no groups; where there is no `kill`, its children stay.
        _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
        _ = child.kill();
    }
}

/// A panic elsewhere leaves nothing half done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
