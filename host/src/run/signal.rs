//! SIGINT and SIGTERM ask a run to stop: it finishes its step and saves. A second SIGINT ends the process at once.

use crate::error::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a process ended by SIGINT, as shells count it: 128 + 2.
const INTERRUPTED: i32 = 130;

/// Whether a signal asked this process to stop.
#[derive(Debug, Clone)]
pub struct StopRequest {
    flag: Arc<AtomicBool>,
}

impl StopRequest {
    /// Takes over SIGINT and SIGTERM for the rest of the process.
    pub fn install() -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let install = || {
            // Handlers run in this order: the first signal finds the flag unset and sets it.
            flag::register_conditional_shutdown(SIGINT, INTERRUPTED, stop.clone())?;
            flag::register(SIGINT, stop.clone())?;
            flag::register(SIGTERM, stop.clone())
        };
        install().map_err(|e| Error::new("io::signal", format!("cannot handle signals: {e}")).source(e))?;
        Ok(Self { flag: stop })
    }

    /// Whether a signal came.
    pub fn is_set(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::Command;

    /// Set for the child processes below, which are this test binary again: signals are for a whole process.
    const CHILD: &str = "TUNEHOST_TEST_SIGNALS";

    /// Sends itself the signals named in [`CHILD`]; only does something in a child.
    #[test]
    fn child() {
        let Ok(signals) = std::env::var(CHILD) else { return };
        let stop = StopRequest::install().unwrap();
        assert!(!stop.is_set());
        for signal in signals.split(' ') {
            raise(if signal == "INT" { SIGINT } else { SIGTERM }).unwrap();
            assert!(stop.is_set());
        }
    }

    #[test]
    fn one_signal_sets_the_flag_and_a_second_interrupt_ends_the_process() {
        for (signals, code) in
            [("INT", 0), ("TERM", 0), ("TERM TERM", 0), ("INT INT", INTERRUPTED), ("TERM INT", INTERRUPTED)]
        {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "run::signal::tests::child"])
                .env(CHILD, signals)
                .output()
                .unwrap()
                .status;
            assert_eq!(status.code(), Some(code), "{signals}");
        }
    }
}
