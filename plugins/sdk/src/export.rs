//! From a plain Rust type to a component: the traits an author implements and the macros that export them.

use serde::de::DeserializeOwned;
use std::cell::RefCell;
use std::sync::Once;
use std::thread::LocalKey;

use crate::bindings::common::tunehost::plugin::host;
use crate::{Decision, Plan, PlanRequest, StepInfo};

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

/// Export a type as a component of the world `checkpoint-scheduler`.
#[macro_export]
macro_rules! export_checkpoint_scheduler {
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
