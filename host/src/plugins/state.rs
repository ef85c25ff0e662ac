//! The host's side of one instance: what it holds in memory, and what it said before it failed.

use std::fmt;
use std::sync::Arc;

use wasmtime::ResourceLimiter;

use super::log::Log;
use super::runtime::shown;
use super::wasi;

/// The host's side of one instance.
pub struct State {
    memory_bytes: usize,
    memory_bytes_max: usize,
    panic: Option<String>,
    /// Lines logged in this call, shown or not.
    log_lines: u64,
    pub(super) log: Arc<Log>,
    pub(super) wasi: wasi::Virtual,
}

impl State {
    pub(super) fn new(memory_bytes_max: usize, log: Arc<Log>) -> Self {
        Self { memory_bytes: 0, memory_bytes_max, panic: None, log_lines: 0, log, wasi: wasi::Virtual::new() }
    }

    pub(super) fn begin_call(&mut self) {
        (self.panic, self.log_lines) = (None, 0);
    }

    /// Ends the call of a plugin that does nothing but log.
    pub(super) fn count_log_line(&mut self) -> wasmtime::Result<()> {
        self.log_lines += 1;
        match self.log_lines > LOG_LINES_PER_CALL_MAX {
            true => Err(LogFlood.into()),
            false => Ok(()),
        }
    }

    pub(super) fn end_of_call(&mut self) {
        self.end_lines();
        self.log.end_of_call();
    }

    /// Keep the first reason for a trap that is about to come.
    pub(super) fn keep_panic(&mut self, message: String) {
        self.panic.get_or_insert_with(|| shown(&message));
    }

    /// The message of the panic in this call.
    pub(super) fn panic(&self) -> Option<&str> {
        self.panic.as_deref()
    }
}

/// Log lines of one call after which it is ended, however few are shown.
pub(super) const LOG_LINES_PER_CALL_MAX: u64 = 10_000;

/// The plugin logged without end.
#[derive(Debug)]
pub(super) struct LogFlood;

impl fmt::Display for LogFlood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "more than {LOG_LINES_PER_CALL_MAX} log lines in a call")
    }
}

impl std::error::Error for LogFlood {}

/// The plugin wanted more memory than it may have.
#[derive(Debug)]
pub(super) struct MemoryCap {
    pub wanted_bytes: usize,
}

impl fmt::Display for MemoryCap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of memory wanted", self.wanted_bytes)
    }
}

impl std::error::Error for MemoryCap {}

impl ResourceLimiter for State {
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let wanted_bytes = self.memory_bytes.saturating_add(desired - current);
        if wanted_bytes > self.memory_bytes_max {
            // An error ends the call with the reason; `false` would leave it to the guest to die of its own.
            return Err(MemoryCap { wanted_bytes }.into());
        }
        self.memory_bytes = wanted_bytes;
        Ok(true)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= 1 << 20)
    }

    fn instances(&self) -> usize {
        64
    }

    fn memories(&self) -> usize {
        16
    }

    fn tables(&self) -> usize {
        64
    }
}
