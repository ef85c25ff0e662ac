//! A sampler in the corpus's order that uses what the runtimes of other languages ask of WASI: clocks, random numbers,
//! environment, folders. With the setting `report` it refuses every plan with what it saw.

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler};

#[allow(missing_docs)] // generated
mod bindings {
    wit_bindgen::generate!({
        inline: "
            package tunehost:wasi-guest;
            world wasi-guest {
                import wasi:clocks/wall-clock@0.2.0;
                import wasi:clocks/monotonic-clock@0.2.0;
                import wasi:random/random@0.2.0;
                import wasi:random/insecure-seed@0.2.0;
                import wasi:cli/environment@0.2.0;
                import wasi:filesystem/preopens@0.2.0;
            }
            package wasi:clocks@0.2.0 {
                interface wall-clock {
                    record datetime { seconds: u64, nanoseconds: u32 }
                    now: func() -> datetime;
                }
                interface monotonic-clock {
                    type instant = u64;
                    now: func() -> instant;
                }
            }
            package wasi:random@0.2.0 {
                interface random {
                    get-random-bytes: func(len: u64) -> list<u8>;
                    get-random-u64: func() -> u64;
                }
                interface insecure-seed {
                    insecure-seed: func() -> tuple<u64, u64>;
                }
            }
            package wasi:cli@0.2.0 {
                interface environment {
                    get-environment: func() -> list<tuple<string, string>>;
                    get-arguments: func() -> list<string>;
                }
            }
            package wasi:filesystem@0.2.0 {
                interface types { resource descriptor; }
                interface preopens {
                    use types.{descriptor};
                    get-directories: func() -> list<tuple<descriptor, string>>;
                }
            }
        ",
        generate_all,
    });
}

use bindings::wasi::cli::environment::{get_arguments, get_environment};
use bindings::wasi::clocks::{monotonic_clock, wall_clock};
use bindings::wasi::filesystem::preopens::get_directories;
use bindings::wasi::random::insecure_seed::insecure_seed;
use bindings::wasi::random::random::{get_random_bytes, get_random_u64};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    report: bool,
}

struct WasiGuest {
    report: bool,
}

impl Plugin for WasiGuest {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": { "report": { "type": "boolean", "default": false, "description": "Refuse and say what was seen" } }
}"#;

    fn new(Config { report }: Config) -> Result<Self, String> {
        Ok(Self { report })
    }
}

impl Sampler for WasiGuest {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let seen = what_is_seen();
        if self.report {
            return Err(seen);
        }
        let (records, dropped) = request.split_by_fit();
        let mut batch_ends = Vec::new();
        request.cut(&records, &mut batch_ends)?;
        Ok(Plan::one_record_per_row(records, batch_ends, dropped))
    }
}

/// Every function called, one after the other; lists as Rust writes them.
fn what_is_seen() -> String {
    let now = wall_clock::now();
    let folders: Vec<String> = get_directories().into_iter().map(|(_, path)| path).collect();
    format!(
        "now={}.{:09} monotonic={} random={:016x} bytes={:02x?} seed={:x?} env={:?} args={:?} preopens={folders:?}",
        now.seconds,
        now.nanoseconds,
        monotonic_clock::now(),
        get_random_u64(),
        get_random_bytes(8),
        insecure_seed(),
        get_environment(),
        get_arguments(),
    )
}

tunehost_plugin_sdk::export_sampler!(WasiGuest);
