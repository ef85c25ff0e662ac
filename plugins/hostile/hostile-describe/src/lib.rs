//! A sampler that dies while it says who it is.

use tunehost_plugin_sdk::macro_support::{common, sampler};
use tunehost_plugin_sdk::{Plan, PlanRequest};

struct Exported;

impl common::exports::tunehost::plugin::plugin::Guest for Exported {
    fn describe() -> common::exports::tunehost::plugin::plugin::Info {
        panic!("no hook is set yet, so nobody hears this")
    }

    fn configure(_: String) -> Result<(), String> {
        Ok(())
    }
}

impl sampler::exports::tunehost::plugin::sampling::Guest for Exported {
    fn plan(_: PlanRequest) -> Result<Plan, String> {
        Err("never reached".into())
    }
}

common::export_common!(Exported);
sampler::export_sampling!(Exported);
