//! A plugin's lines in tunehost's log. A minute shows so many of them; the others are counted, and the count is told.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::Level;

use super::reference::Identity;
use super::runtime::shown;

const MINUTE: Duration = Duration::from_secs(60);

/// The log of one plugin, whatever number of instances it goes through.
pub(super) struct Log {
    label: String,
    rate: Mutex<Rate>,
}

impl Log {
    pub fn new(identity: &Identity, lines_per_minute: u64) -> Self {
        Self { label: format!("{} {}", identity.name, identity.version), rate: Mutex::new(Rate::new(lines_per_minute)) }
    }

    /// Show a line, unless this minute has had its share. A line that nobody listens for takes none of it.
    pub fn line(&self, level: Level, message: &str) {
        if !is_heard(level) {
            return;
        }
        let (counted, turn) = {
            let (mut rate, now) = (self.rate(), Instant::now());
            (rate.minute_over(now), rate.line(now))
        };
        self.tell(counted);
        let plugin = &self.label;
        match turn {
            Turn::Show => {
                let message = shown(message);
                match level {
                    Level::ERROR => tracing::error!(plugin, "{message}"),
                    Level::WARN => tracing::warn!(plugin, "{message}"),
                    Level::INFO => tracing::info!(plugin, "{message}"),
                    _ => tracing::debug!(plugin, "{message}"),
                }
            }
            Turn::FirstCounted { lines } => {
                tracing::warn!(plugin, "more than {lines} log lines in a minute: the others are counted, not shown");
            }
            Turn::Counted => {}
        }
    }

    /// Tell what a minute that is over did not show.
    pub fn end_of_call(&self) {
        let counted = self.rate().minute_over(Instant::now());
        self.tell(counted);
    }

    fn tell(&self, counted: Option<u64>) {
        if let Some(counted) = counted {
            tracing::warn!(plugin = self.label, "{counted} log lines were not shown");
        }
    }

    fn rate(&self) -> MutexGuard<'_, Rate> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let counted = self.rate().take_counted();
        self.tell(counted);
    }
}

fn is_heard(level: Level) -> bool {
    match level {
        Level::ERROR => tracing::enabled!(Level::ERROR),
        Level::WARN => tracing::enabled!(Level::WARN),
        Level::INFO => tracing::enabled!(Level::INFO),
        _ => tracing::enabled!(Level::DEBUG),
    }
}

/// What becomes of a line.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Show,
    /// The first that is only counted in a minute that shows so many lines.
    FirstCounted {
        lines: u64,
    },
    Counted,
}

/// Minutes start with a line, not by the clock.
struct Rate {
    lines_per_minute: u64,
    minute_start: Option<Instant>,
    shown: u64,
    counted: u64,
}

impl Rate {
    fn new(lines_per_minute: u64) -> Self {
        Self { lines_per_minute, minute_start: None, shown: 0, counted: 0 }
    }

    fn line(&mut self, now: Instant) -> Turn {
        self.minute_start.get_or_insert(now);
        if self.shown < self.lines_per_minute {
            self.shown += 1;
            return Turn::Show;
        }
        self.counted += 1;
        match self.counted {
            1 => Turn::FirstCounted { lines: self.lines_per_minute },
            _ => Turn::Counted,
        }
    }

    /// Where the minute is over, it ends here: how many lines it did not show, if any.
    fn minute_over(&mut self, now: Instant) -> Option<u64> {
        let start = self.minute_start?;
        if now.duration_since(start) < MINUTE {
            return None;
        }
        (self.minute_start, self.shown) = (None, 0);
        self.take_counted()
    }

    fn take_counted(&mut self) -> Option<u64> {
        Some(std::mem::take(&mut self.counted)).filter(|counted| *counted > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_shows_its_share_and_the_next_one_tells_the_rest() {
        let (mut rate, start) = (Rate::new(2), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(
            [0, 1, 30, 58].map(|second| rate.line(at(second))),
            [Turn::Show, Turn::Show, Turn::FirstCounted { lines: 2 }, Turn::Counted]
        );
        assert_eq!([59, 60, 61].map(|second| rate.minute_over(at(second))), [None, Some(2), None]);
        // The next minute starts with its first line.
        assert_eq!(
            [100, 101, 159].map(|second| rate.line(at(second))),
            [Turn::Show, Turn::Show, Turn::FirstCounted { lines: 2 }]
        );
        assert_eq!(rate.minute_over(at(159)), None);
        assert_eq!(rate.take_counted(), Some(1));
    }

    #[test]
    fn a_quiet_minute_has_nothing_to_tell() {
        let (mut rate, start) = (Rate::new(1), Instant::now());
        assert_eq!(rate.minute_over(start), None);
        assert_eq!(rate.line(start), Turn::Show);
        assert_eq!(rate.minute_over(start + MINUTE), None);
        assert_eq!(rate.line(start + MINUTE), Turn::Show);
    }

    #[test]
    fn no_line_may_be_shown_at_all() {
        let mut rate = Rate::new(0);
        assert_eq!(rate.line(Instant::now()), Turn::FirstCounted { lines: 0 });
    }
}
