//! A sampler in the corpus's order that asks for the network first.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler};

#[allow(missing_docs)] // generated
mod wasi {
    wit_bindgen::generate!({
        inline: "
            package tunehost:imports-sockets;
            world imports-sockets { import wasi:sockets/instance-network@0.2.0; }
            package wasi:sockets@0.2.0 {
                interface network { resource network; }
                interface instance-network {
                    use network.{network};
                    instance-network: func() -> network;
                }
            }
        ",
        generate_all,
    });
}

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct ImportsSockets;

impl Plugin for ImportsSockets {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Sampler for ImportsSockets {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let _network = wasi::wasi::sockets::instance_network::instance_network();
        let (records, dropped) = request.split_by_fit();
        let mut batch_ends = Vec::new();
        request.cut(&records, &mut batch_ends)?;
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

tunehost_plugin_sdk::export_sampler!(ImportsSockets);
