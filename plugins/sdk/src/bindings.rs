//! The contract in `wit/` as Rust types. The part that every world shares is bound once; an export macro joins it with
//! the interface of its own world.

#![allow(missing_docs)] // generated

pub mod common {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-common;
            world common {
                import tunehost:plugin/host@0.1.0;
                export tunehost:plugin/plugin@0.1.0;
            }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::common",
        export_macro_name: "export_common",
    });
}

pub mod sampler {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-sampler;
            world sampler { export tunehost:plugin/sampling@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::sampler",
        export_macro_name: "export_sampling",
    });
}

pub mod checkpoint_scheduler {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-checkpoint-scheduler;
            world checkpoint-scheduler { export tunehost:plugin/scheduling@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::checkpoint_scheduler",
        export_macro_name: "export_scheduling",
    });
}

pub mod corpus_filter {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-corpus-filter;
            world corpus-filter { export tunehost:plugin/filtering@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::corpus_filter",
        export_macro_name: "export_filtering",
    });
}

pub mod eligibility {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-eligibility;
            world eligibility { export tunehost:plugin/ruling@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::eligibility",
        export_macro_name: "export_ruling",
    });
}

pub mod exporter {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-exporter;
            world exporter { export tunehost:plugin/exporting@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::exporter",
        export_macro_name: "export_exporting",
    });
}

pub mod memory {
    wit_bindgen::generate!({
        path: "../../wit",
        inline: "
            package tunehost:sdk-memory;
            world memory { export tunehost:plugin/memory@0.1.0; }
        ",
        generate_all,
        pub_export_macro: true,
        default_bindings_module: "tunehost_plugin_sdk::macro_support::memory",
        export_macro_name: "export_memory",
    });
}

pub use checkpoint_scheduler::exports::tunehost::plugin::scheduling::{Decision, StepInfo};
pub use corpus_filter::exports::tunehost::plugin::filtering::{Action, Chunk, Verdicts};
pub use eligibility::exports::tunehost::plugin::ruling::{CaseFile, Decision as Ruling};
pub use exporter::exports::tunehost::plugin::exporting::{
    Dtype, ExportPlan, GgufEntry, GgufValue, QuantizedModule, Scheme, Source, Tuned,
};
pub use sampler::exports::tunehost::plugin::sampling::{EpochPlan as Plan, PlanRequest};
