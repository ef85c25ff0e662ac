#![no_main]

#[path = "../bodies.rs"]
mod bodies;

use bodies::Bench;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

thread_local! {
    static BENCH: Bench = Bench::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
}

fuzz_target!(|bytes: &[u8]| BENCH.with(|bench| bench.template(bytes)));
