//! SIGINT, SIGTERM and, on Linux, SIGHUP (the terminal is gone) ask a run to stop: it finishes its step and saves. A second
//! SIGINT ends the process at once, but for what must be done first ([`StopRequest::before_end`]).

use crate::error::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::{flag, low_level};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Exit code of a process ended by SIGINT, as shells count it: 128 + 2.
const INTERRUPTED: i32 = 130;

/// What is done before a second SIGINT ends the process; whether it may end then.
type LastAct = Box<dyn FnMut() -> bool + Send>;

/// Whether a signal asked this process to stop.
#[derive(Clone, Default)]
pub struct StopRequest {
    flag: Arc<AtomicBool>,
    last_act: Arc<Mutex<Option<LastAct>>>,
}

impl StopRequest {
    /// Takes over the signals for the rest of the process.
    pub fn install() -> Result<Self> {
        let stop = Self::default();
        stop.take_over().map_err(|e| Error::new("io::signal", format!("cannot handle signals: {e}")).source(e))?;
        Ok(stop)
    }

    fn take_over(&self) -> std::io::Result<()> {
        // A byte for each SIGINT, so that two that come at once are two.
        let (mut interrupts, sender) = UnixStream::pair()?;
        low_level::pipe::register(SIGINT, sender)?;
        for signal in ending() {
            flag::register(signal, self.flag.clone())?;
        }
        let_large_writes_fail()?;
        let stop = self.clone();
        thread::Builder::new().name("signals".into()).spawn(move || {
            let mut first = true;
            while interrupts.read_exact(&mut [0]).is_ok() {
                if !std::mem::take(&mut first) {
                    stop.end();
                }
            }
        })?;
        Ok(())
    }

    /// Whether a signal came.
    pub fn is_set(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// What is done before a second SIGINT ends the process, on a thread of its own; it says whether the process may end then.
    pub fn before_end(&self, act: impl FnMut() -> bool + Send + 'static) {
        *self.last_act.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }

    fn end(&self) {
        let mut act = self.last_act.lock().unwrap_or_else(PoisonError::into_inner);
        if act.as_mut().is_none_or(|act| act()) {
            low_level::exit(INTERRUPTED);
        }
    }
}

/// The signals that ask this process to end.
pub(crate) fn ending() -> impl Iterator<Item = i32> {
    let hang_up = (!hang_up_is_ignored()).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hang_up)
}

/// Lets a write beyond the limit of file sizes fail, instead of ending the process without a word.
pub(crate) fn let_large_writes_fail() -> std::io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Whether this process was started to outlive its terminal, as by `nohup`; where that is not known, it is left as it was.
fn hang_up_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_none_or(|signals| signals & (1 << (SIGHUP - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    /// Set for the child processes below, which are this test binary again: signals are for a whole process.
    const CHILD: &str = "TUNEHOST_TEST_SIGNALS";

    /// Sends itself the signals named in [`CHILD`]; only does something in a child. `ACT` is no signal: it registers a last act
    /// that forbids the end, and `END` one that allows it.
    #[test]
    fn child() {
        let Ok(signals) = std::env::var(CHILD) else { return };
        let stop = StopRequest::install().unwrap();
        assert!(!stop.is_set());
        for signal in signals.split(' ') {
            match signal {
                "ACT" => stop.before_end(|| false),
                "END" => stop.before_end(|| true),
                _ => {
                    low_level::raise(match signal {
                        "INT" => SIGINT,
                        "HUP" => SIGHUP,
                        _ => SIGTERM,
                    })
                    .unwrap();
                    assert!(stop.is_set());
                }
            }
        }
        // A process that is to end does so from another thread.
        thread::sleep(Duration::from_millis(300));
    }

    #[test]
    fn one_signal_sets_the_flag_and_a_second_interrupt_ends_the_process() {
        let cases = [
            ("INT", 0),
            ("TERM", 0),
            ("HUP", 0),
            ("TERM TERM", 0),
            ("INT TERM", 0),
            ("TERM INT", 0),
            ("ACT INT INT", 0),
            ("END INT INT", INTERRUPTED),
            ("INT INT", INTERRUPTED),
            ("TERM INT INT", INTERRUPTED),
        ];
        // tests that were started by nohup hand that on
        let cases = cases.into_iter().filter(|(signals, _)| *signals != "HUP" || !hang_up_is_ignored());
        let children = cases.map(|(signals, code)| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let command = command.args(["--exact", "run::signal::tests::child"]).env(CHILD, signals);
            (signals, code, command.stdout(std::process::Stdio::null()).spawn().unwrap())
        });
        let children: Vec<_> = children.collect();
        for (signals, code, child) in children {
            assert_eq!(child.wait_with_output().unwrap().status.code(), Some(code), "{signals}");
        }
    }

    #[test]
    fn nohup_is_respected() {
        let run = |signals: &str| {
            let mut command = Command::new("sh");
            let script = "trap '' HUP; exec \"$0\" --exact run::signal::tests::child";
            command.args(["-c", script]).arg(std::env::current_exe().unwrap()).env(CHILD, signals);
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).status().unwrap()
        };
        assert!(run("TERM").success());
        assert!(!run("HUP").success(), "the flag is not set by a hang-up that is ignored");
    }
}
