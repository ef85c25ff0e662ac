//! What is said when a plugin fails: plugin, version, function, cause, and what to do.

use wasmtime::{Trap, WasmBacktrace};

use super::Limits;
use super::reference::Identity;
use super::runtime::shown;
use super::state::{LOG_LINES_PER_CALL_MAX, LogFlood, MemoryCap, State};
use super::wasi::Exit;
use crate::error::Error;

const FRAMES_MAX: usize = 5;

/// A call that did not come back with an answer.
pub(super) fn explain(
    identity: &Identity,
    function: &str,
    limits: &Limits,
    starting: bool,
    state: &State,
    error: &wasmtime::Error,
) -> Error {
    let raise = |key| format!("raise {key} in [plugins.limits.{}]", identity.kind.config_key());
    let report = |code, cause: String| Error::new(code, format!("{identity}: {function} {cause}"));
    if let Some(cap) = error.downcast_ref::<MemoryCap>() {
        return report("plugin::memory", format!("wanted {} MiB of memory", cap.wanted_bytes.div_ceil(1 << 20)))
            .expected(format!("at most {} MiB", limits.memory_mib))
            .help(format!(
                "a plugin that needs this much is broken, or made for a smaller corpus; if not, {}",
                raise("memory_mib")
            ));
    }
    let trap = error.downcast_ref::<Trap>();
    if trap == Some(&Trap::Interrupt) {
        let (key, deadline_ms) = match starting {
            true => ("start_deadline_ms", limits.start_deadline_ms),
            false => ("call_deadline_ms", limits.call_deadline_ms),
        };
        return report("plugin::deadline", "did not answer in time".into())
            .expected(format!("an answer within {deadline_ms} ms"))
            .help(format!("it may loop for ever; use another plugin, tell its author, or {}", raise(key)));
    }
    if let Some(trap) = trap {
        // A panic's message says where it was; its frames are those of the panic's own machinery.
        let cause = match (state.panic(), trap) {
            (Some(message), _) => message.to_string(),
            (None, Trap::StackOverflow) => format!("overflowed its stack{}", frames(error)),
            (None, Trap::UnreachableCodeReached) => format!("aborted without saying why{}", frames(error)),
            (None, trap) => format!("trapped: {trap}{}", frames(error)),
        };
        return report("plugin::trapped", cause)
            .help("this is a bug in the plugin: use another, or send its author this message");
    }
    if let Some(exit) = error.downcast_ref::<Exit>() {
        return report("plugin::trapped", format!("called {exit}"))
            .expected("an answer: a plugin that has to give up answers with an error")
            .help("this is a bug in the plugin: use another, or tell its author");
    }
    if error.downcast_ref::<LogFlood>().is_some() {
        return report("plugin::log_flood", "logged without end".into())
            .expected(format!("at most {LOG_LINES_PER_CALL_MAX} lines in a call"))
            .help("this is a bug in the plugin: use another, or tell its author");
    }
    let cause = error.root_cause().to_string();
    if error.root_cause().downcast_ref::<std::io::Error>().is_some() {
        return report("plugin::no_memory", format!("could not be given memory: {cause}")).help(
            "the machine, or a limit on the process (ulimit -v), has too little address space left; the plugin is not at \
             fault",
        );
    }
    // wasmtime keeps the type of this error to itself.
    if cause.contains("fuel allocated for hostcalls") {
        return report("plugin::answer_too_large", "handed over too much".into())
            .expected(format!("at most {} MiB in one answer or log line", limits.answer_mib))
            .help(format!(
                "this is a bug in the plugin: use another, or tell its author; if not, {}",
                raise("answer_mib")
            ));
    }
    report("plugin::broken_answer", format!("broke the contract: {}", shown(&cause)))
        .help("this is a bug in the plugin or in the language it was written in: use another, or tell its author")
}

/// A component whose exports or imports are not those of its world.
pub(super) fn unfit(identity: &Identity, error: &wasmtime::Error) -> Error {
    Error::new("plugin::wrong_contract", format!("{identity} does not fit the world {}: {error:#}", identity.kind))
        .expected("every export of the world, with the types that stand in wit/")
        .help("rebuild the plugin with this repository's wit/ folder")
}

/// Where in the plugin it happened, innermost first.
fn frames(error: &wasmtime::Error) -> String {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else { return String::new() };
    let demangled = |frame: &wasmtime::FrameInfo| Some(format!("{:#}", rustc_demangle::demangle(frame.func_name()?)));
    let mut names: Vec<String> = backtrace.frames().iter().filter_map(demangled).collect();
    names.dedup();
    names.truncate(FRAMES_MAX);
    if names.is_empty() { String::new() } else { format!(" (in {})", shown(&names.join(", called by "))) }
}
