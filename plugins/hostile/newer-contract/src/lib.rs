//! A sampler for version 0.2.0 of the contract, which has the interfaces of 0.1.0.

mod bindings {
    #![allow(missing_docs)] // generated

    wit_bindgen::generate!({
        inline: "
            package tunehost:newer-contract;
            world newer-contract {
                import tunehost:plugin/host@0.2.0;
                export tunehost:plugin/plugin@0.2.0;
                export tunehost:plugin/sampling@0.2.0;
            }
            package tunehost:plugin@0.2.0 {
                interface host {
                    report-panic: func(message: string);
                }
                interface plugin {
                    record info { name: string, version: string, description: string, config-schema: string }
                    describe: func() -> info;
                    configure: func(json: string) -> result<_, string>;
                }
                interface sampling {
                    record plan-request {
                        lengths: list<u32>,
                        roots: list<u32>,
                        epoch: u32,
                        seed: u64,
                        max-seq-len: u32,
                        rows-per-batch: u32,
                        accumulation: u32,
                        token-budget: option<u32>,
                    }
                    record epoch-plan {
                        records: list<u32>,
                        row-ends: list<u32>,
                        batch-ends: list<u32>,
                        dropped: list<u32>,
                    }
                    plan: func(request: plan-request) -> result<epoch-plan, string>;
                }
            }
        ",
        generate_all,
    });
}

use bindings::exports::tunehost::plugin::{plugin, sampling};
use bindings::tunehost::plugin::host;

struct Exported;

impl plugin::Guest for Exported {
    fn describe() -> plugin::Info {
        plugin::Info {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: env!("CARGO_PKG_DESCRIPTION").into(),
            config_schema: r#"{"type": "object"}"#.into(),
        }
    }

    fn configure(_: String) -> Result<(), String> {
        Ok(())
    }
}

impl sampling::Guest for Exported {
    fn plan(_: sampling::PlanRequest) -> Result<sampling::EpochPlan, String> {
        host::report_panic("no host of 0.1.0 comes this far");
        Err("never reached".into())
    }
}

bindings::export!(Exported with_types_in bindings);
