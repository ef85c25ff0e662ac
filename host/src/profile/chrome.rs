//! Spans as a trace file for `chrome://tracing` and Perfetto: complete events (`ph: X`) in microseconds.

use super::Recorded;
use serde_json::{Value, json};
use std::time::Duration;

/// The trace of `steps`, one object.
pub fn chrome_trace(steps: &[Recorded]) -> Value {
    let mut events = Vec::new();
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    for (number, step) in (1..).zip(steps) {
        let event = |name: String, category: &str, start: Duration, end: Duration, args: Value| {
            json!({"name": name, "cat": category, "ph": "X", "ts": us(step.start + start), "dur": us(end) - us(start),
                   "pid": 1, "tid": 1, "args": args})
        };
        events.push(event(format!("step {number}"), "step", Duration::ZERO, step.end - step.start, json!({})));
        for span in &step.spans {
            let (category, args) = match (span.work, span.index) {
                (Some(work), _) => ("kernel", json!({"flop": work.flop, "bytes": work.bytes})),
                (None, Some(_)) => ("layer", json!({})),
                (None, None) => ("phase", json!({})),
            };
            let name = span.index.map_or(span.name.into(), |index| format!("{} {index}", span.name));
            events.push(event(name, category, span.start, span.end, args));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}
