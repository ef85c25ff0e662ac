//! The contract's version 0.1.0 as the host calls it. Once 0.1.0 is released this module and the files in `wit/` that
//! it reads stay as they are; a newer version gets a module of its own beside it.

use wasmtime::component::{HasSelf, Linker};

use self::tunehost::plugin::host::{Host, Level};
use super::state::State;

/// The version as it stands in the names of a component's imports and exports.
pub const VERSION: &str = "0.1.0";

// One world with everything, so that shared types exist once. A component has the exports of its own kind alone, and
// each export is looked up by itself.
wasmtime::component::bindgen!({
    path: "../wit",
    inline: "
        package tunehost:host-side;
        world every-kind {
            include tunehost:plugin/sampler@0.1.0;
            include tunehost:plugin/checkpoint-scheduler-with-memory@0.1.0;
            include tunehost:plugin/corpus-filter@0.1.0;
            include tunehost:plugin/eligibility@0.1.0;
            include tunehost:plugin/exporter@0.1.0;
        }
    ",
    ownership: Borrowing { duplicate_if_necessary: false },
    imports: { default: trappable },
});

pub use exports::tunehost::plugin::{exporting, filtering, memory, plugin, ruling, sampling, scheduling};

impl Host for State {
    fn log(&mut self, level: Level, message: String) -> wasmtime::Result<()> {
        self.count_log_line()?;
        let level = match level {
            Level::Debug => tracing::Level::DEBUG,
            Level::Info => tracing::Level::INFO,
            Level::Warn => tracing::Level::WARN,
            Level::Error => tracing::Level::ERROR,
        };
        self.log.line(level, &message);
        Ok(())
    }

    fn report_panic(&mut self, message: String) -> wasmtime::Result<()> {
        self.keep_panic(message);
        Ok(())
    }
}

/// Everything a component of this version may import.
pub fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    self::tunehost::plugin::host::add_to_linker::<_, HasSelf<State>>(linker, |state| state)
}
