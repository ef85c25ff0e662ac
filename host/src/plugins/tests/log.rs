//! What of a plugin's log lines is shown.

use std::sync::{Arc, Mutex};

use tracing::Level;

use super::assert_error;
use super::hostile::{limits, load, small_request};

/// The lines down to `level` that `work` leaves in tunehost's log.
pub(super) fn logged(level: Level, work: impl FnOnce()) -> Vec<String> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    tracing::subscriber::with_default(Lines { lines: Arc::clone(&lines), level }, work);
    Arc::into_inner(lines).expect("the subscriber is gone").into_inner().unwrap()
}

/// Calls of a sampler that would log 100,000 lines in each and is ended after 10,000.
fn flood(calls: u32) {
    let mut sampler = load("log-flood", limits()).unwrap();
    for _ in 0..calls {
        let error = sampler.plan(&small_request()).unwrap_err();
        assert_error(&error, "plugin::log_flood", &["hostile-sampler 0.1.0", "plan logged", "at most 10000 lines"]);
    }
}

#[test]
fn a_flood_of_log_lines_is_cut() {
    let lines = logged(Level::DEBUG, || flood(1));
    assert_eq!(lines[..3], ["line 0", "line 1", "line 2"]);
    let told = "more than 3 log lines in a minute: the others are counted, not shown";
    assert_eq!(lines[3..], [told, "9997 log lines were not shown"]);
}

#[test]
fn the_rate_is_the_plugins_not_a_calls() {
    let lines = logged(Level::DEBUG, || flood(3));
    assert_eq!(lines.len(), 5, "{lines:?}");
    assert_eq!(lines[4], "29997 log lines were not shown");
}

#[test]
fn lines_that_nobody_listens_for_are_not_missed() {
    assert_eq!(logged(Level::INFO, || flood(2)), [""; 0]);
}

/// Collects the messages of log lines down to a level.
struct Lines {
    lines: Arc<Mutex<Vec<String>>>,
    level: Level,
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("tunehost") && *metadata.level() <= self.level
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.lines.lock().unwrap().push(message.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
