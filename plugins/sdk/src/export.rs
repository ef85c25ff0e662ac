//! From a plain Rust type to a component: the traits an author implements and the macros that export them.

use serde::de::DeserializeOwned;
use std::cell::RefCell;
use std::sync::Once;
use std::thread::LocalKey;

use crate::bindings::common::tunehost::plugin::host;
use crate::{CaseFile, Chunk, Decision, ExportPlan, Plan, PlanRequest, Ruling, StepInfo, Tuned, Verdicts};

/// What every plugin has.
pub trait Plugin: Sized {
    /// The settings. `{}` must be accepted where the plugin works without any.
    type Config: DeserializeOwned;

    /// JSON Schema of [`Plugin::Config`].
    const CONFIG_SCHEMA: &str;

    /// Start with these settings, or say which setting is wrong and what it may be.
    fn new(config: Self::Config) -> Result<Self, String>;
}

/// Decides which records share a micro-batch, and the order.
pub trait Sampler: Plugin {
    /// Lay out one epoch; the rules stand in `wit/sampler.wit`.
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String>;
}

/// Decides when a run is saved, and whether it stops.
pub trait CheckpointScheduler: Plugin {
    /// Called after every optimiser step.
    fn after_step(&mut self, info: StepInfo) -> Result<Decision, String>;
}

/// Decides which records a run trains on.
pub trait CorpusFilter: Plugin {
    /// Judge one chunk; the rules stand in `wit/corpus-filter.wit`.
    fn filter(&mut self, chunk: Chunk) -> Result<Verdicts, String>;
}

/// Decides whether a run may train on corpora that something stands against.
pub trait Eligibility: Plugin {
    /// Rule on the run; the rules stand in `wit/eligibility.wit`.
    fn rule(&mut self, case: CaseFile) -> Result<Ruling, String>;
}

/// Decides what is written when a tuned model leaves tunehost.
pub trait Exporter: Plugin {
    /// Lay out the export; the rules stand in `wit/exporter.wit`.
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String>;
}

/// What a plugin remembers from call to call; exported with `export_checkpoint_scheduler!(Type, with memory)`.
pub trait Memory: Plugin {
    /// Everything remembered, at most 65,536 bytes.
    fn save(&mut self) -> Result<Vec<u8>, String>;

    /// Take up what [`Memory::save`] gave.
    fn restore(&mut self, state: Vec<u8>) -> Result<(), String>;
}

/// The one instance of a component.
pub type Slot<P> = LocalKey<RefCell<Option<P>>>;

/// The body of every `configure` export: installs the panic hook, reads the settings, starts the plugin.
pub fn configure<P: Plugin>(slot: &'static Slot<P>, json: &str) -> Result<(), String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(|panic| host::report_panic(&panic.to_string()))));
    let config = serde_json::from_str(json).map_err(|error| error.to_string())?;
    slot.set(Some(P::new(config)?));
    Ok(())
}

/// The body of every other export of a world.
pub fn with_plugin<P, T>(slot: &'static Slot<P>, call: impl FnOnce(&mut P) -> Result<T, String>) -> Result<T, String> {
    slot.with_borrow_mut(|plugin| call(plugin.as_mut().ok_or("called before configure")?))
}

/// Export a type as a component of the world `sampler`.
#[macro_export]
macro_rules! export_sampler {
    ($plugin:ty) => {
        $crate::__export_plugin!($plugin);

        impl $crate::macro_support::sampler::exports::tunehost::plugin::sampling::Guest for __Exported {
            fn plan(request: $crate::PlanRequest) -> Result<$crate::Plan, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::Sampler::plan(plugin, request))
            }
        }

        $crate::macro_support::sampler::export_sampling!(__Exported);
    };
}

/// Export a type as a component of the world `checkpoint-scheduler`; one that implements [`Memory`] with
/// `export_checkpoint_scheduler!(Type, with memory)`.
#[macro_export]
macro_rules! export_checkpoint_scheduler {
    ($plugin:ty, with memory) => {
        $crate::export_checkpoint_scheduler!($plugin);

        impl $crate::macro_support::memory::exports::tunehost::plugin::memory::Guest for __Exported {
            fn save() -> Result<Vec<u8>, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::Memory::save(plugin))
            }

            fn restore(state: Vec<u8>) -> Result<(), String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::Memory::restore(plugin, state))
            }
        }

        $crate::macro_support::memory::export_memory!(__Exported);
    };
    ($plugin:ty) => {
        $crate::__export_plugin!($plugin);

        impl $crate::macro_support::checkpoint_scheduler::exports::tunehost::plugin::scheduling::Guest for __Exported {
            fn after_step(info: $crate::StepInfo) -> Result<$crate::Decision, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| {
                    $crate::CheckpointScheduler::after_step(plugin, info)
                })
            }
        }

        $crate::macro_support::checkpoint_scheduler::export_scheduling!(__Exported);
    };
}

/// Export a type as a component of the world `corpus-filter`.
#[macro_export]
macro_rules! export_corpus_filter {
    ($plugin:ty) => {
        $crate::__export_plugin!($plugin);

        impl $crate::macro_support::corpus_filter::exports::tunehost::plugin::filtering::Guest for __Exported {
            fn filter(chunk: $crate::Chunk) -> Result<$crate::Verdicts, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::CorpusFilter::filter(plugin, chunk))
            }
        }

        $crate::macro_support::corpus_filter::export_filtering!(__Exported);
    };
}

/// Export a type as a component of the world `eligibility`.
#[macro_export]
macro_rules! export_eligibility {
    ($plugin:ty) => {
        $crate::__export_plugin!($plugin);

        impl $crate::macro_support::eligibility::exports::tunehost::plugin::ruling::Guest for __Exported {
            fn rule(case: $crate::CaseFile) -> Result<$crate::Ruling, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::Eligibility::rule(plugin, case))
            }
        }

        $crate::macro_support::eligibility::export_ruling!(__Exported);
    };
}

/// Export a type as a component of the world `exporter`.
#[macro_export]
macro_rules! export_exporter {
    ($plugin:ty) => {
        $crate::__export_plugin!($plugin);

        impl $crate::macro_support::exporter::exports::tunehost::plugin::exporting::Guest for __Exported {
            fn plan(tuned: $crate::Tuned) -> Result<$crate::ExportPlan, String> {
                $crate::macro_support::with_plugin(&__PLUGIN, |plugin| $crate::Exporter::plan(plugin, tuned))
            }
        }

        $crate::macro_support::exporter::export_exporting!(__Exported);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export_plugin {
    ($plugin:ty) => {
        struct __Exported;

        thread_local! {
            static __PLUGIN: ::std::cell::RefCell<Option<$plugin>> = const { ::std::cell::RefCell::new(None) };
        }

        const __METADATA: &str =
            concat!(r#"{"name": ""#, env!("CARGO_PKG_NAME"), r#"", "version": ""#, env!("CARGO_PKG_VERSION"), r#""}"#);

        // SAFETY: on wasm this becomes a custom section, which is never loaded into memory.
        #[cfg(target_arch = "wasm32")]
        #[used]
        #[unsafe(link_section = "tunehost-plugin")]
        static __METADATA_SECTION: [u8; __METADATA.len()] = *__METADATA.as_bytes().first_chunk().unwrap();

        impl $crate::macro_support::common::exports::tunehost::plugin::plugin::Guest for __Exported {
            fn describe() -> $crate::macro_support::common::exports::tunehost::plugin::plugin::Info {
                $crate::macro_support::common::exports::tunehost::plugin::plugin::Info {
                    name: env!("CARGO_PKG_NAME").into(),
                    version: env!("CARGO_PKG_VERSION").into(),
                    description: env!("CARGO_PKG_DESCRIPTION").into(),
                    config_schema: <$plugin as $crate::Plugin>::CONFIG_SCHEMA.into(),
                }
            }

            fn configure(json: String) -> Result<(), String> {
                $crate::macro_support::configure::<$plugin>(&__PLUGIN, &json)
            }
        }

        $crate::macro_support::common::export_common!(__Exported);
    };
}
