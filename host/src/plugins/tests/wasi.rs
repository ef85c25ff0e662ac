//! What a component may import, and what the virtual WASI gives where it is allowed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wasmtime::Store;
use wasmtime::component::{Component, Instance, Linker, Resource};

use super::super::check::check;
use super::super::log::Log;
use super::super::runtime::engine;
use super::super::state::State;
use super::super::wasi::{Exit, add_to_linker};
use super::hostile::{hostile, patched, resolve_bytes, small_request};
use super::log::logged;
use super::*;

/// A sampler that imports `import`, of as many letters as the contract's host interface, in its place.
fn importing(import: &str) -> crate::error::Result<PluginRef> {
    resolve_bytes(Kind::Sampler, &patched("in-order", "tunehost:plugin/host@0.1.0", import))
}

fn allowed(plugin: PluginRef) -> PluginRef {
    let limits = Limits { wasi: true, ..plugin.limits().clone() };
    plugin.within(limits)
}

#[test]
fn what_no_plugin_can_have_is_refused_by_name() {
    for import in [
        "wasi:sockets/network@0.2.0",
        "wasi:http/handler@0.2.1000",
        "wasi:random/random@0.3.000",
        "wasi:random/random@0.20.00",
        "wasi:random-random@0.2.000",
        "tunehost:plugin/hose@0.1.0",
    ] {
        let error = importing(import).unwrap_err();
        assert_error(
            &error,
            "plugin::forbidden_import",
            &["x.wasm", &format!("imports {import}"), "no files, network", "build it without that import"],
        );
    }
}

#[test]
fn wasi_is_refused_where_it_is_not_allowed() {
    let plugin = importing("wasi:random/random@0.2.999").unwrap();
    let parts = ["imports wasi:random/random@0.2.999", "WASI is off", "plugins.wasi = [\"sampler\"]", "--wasi"];
    assert_error(&Sampler::load(&plugin, None).err().expect("refused"), "plugin::forbidden_import", &parts);
    assert_error(&Sheet::of(&plugin).unwrap_err(), "plugin::forbidden_import", &parts);
    // Where it is allowed, it is what it is: `report-panic` is not in it.
    let error = Sampler::load(&allowed(plugin), None).err().expect("no such function");
    assert_error(&error, "plugin::wrong_contract", &["wasi:random/random@0.2.999", "report-panic"]);
}

#[test]
fn a_guest_that_needs_wasi_keeps_its_contract_with_the_virtual_one() {
    let plugin = hostile("wasi-guest");
    let error = Sampler::load(&plugin, None).err().expect("refused");
    assert_error(&error, "plugin::forbidden_import", &["imports wasi:", "more interfaces of WASI"]);
    let plugin = allowed(plugin);
    let properties = check(&plugin, None).unwrap();
    assert!(properties.len() >= 6, "{properties:?}");
    // It leaves the order as it is without saying so in its schema; nothing else may fail.
    let failed: Vec<_> = properties.iter().filter(|property| property.failure.is_some()).collect();
    assert!(failed.iter().all(|property| property.name.contains("its own order")), "{failed:?}");
}

#[test]
fn nothing_of_the_machine_is_seen_and_every_start_sees_the_same() {
    let plugin = allowed(hostile("wasi-guest"));
    let start = || Sampler::load(&plugin, Some(&json!({"report": true}))).unwrap();
    let seen = |sampler: &mut Sampler| sampler.plan(&small_request()).unwrap_err().to_string();
    let mut sampler = start();
    let first = seen(&mut sampler);
    for part in ["now=946684800.000000000 ", "monotonic=0 ", "env=[] ", "args=[] ", "preopens=[]"] {
        assert!(first.contains(part), "{part} is not in {first}");
    }
    assert_eq!(first, seen(&mut start()));
    assert_ne!(first, seen(&mut sampler), "random numbers go on from call to call");
}

/// Sleeps an hour, or exits with an error: `sleeper.wat` beside this file.
const SLEEPER: &[u8] = include_bytes!("sleeper.wasm");

fn state() -> State {
    State::new(1 << 20, Arc::new(Log::new(bundled(Kind::Sampler, "in-order").identity(), 60)))
}

fn sleeper() -> (Store<State>, Instance) {
    let engine = engine().unwrap();
    let component = Component::new(engine, SLEEPER).unwrap();
    let mut linker = Linker::new(engine);
    add_to_linker(&mut linker).unwrap();
    let mut store = Store::new(engine, state());
    store.set_epoch_deadline(1000);
    let instance = linker.instantiate(&mut store, &component).unwrap();
    (store, instance)
}

#[test]
fn a_sleep_is_over_at_once() {
    let (mut store, instance) = sleeper();
    let sleep = instance.get_typed_func::<(), (u64,)>(&mut store, "sleep").unwrap();
    let start = Instant::now();
    assert_eq!(sleep.call(&mut store, ()).unwrap(), (0,), "the clock stands still");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn an_exit_ends_the_call() {
    let (mut store, instance) = sleeper();
    let give_up = instance.get_typed_func::<(), ()>(&mut store, "give-up").unwrap();
    let error = give_up.call(&mut store, ()).unwrap_err();
    assert!(!error.downcast_ref::<Exit>().unwrap().success);
}

#[test]
fn output_becomes_lines_of_the_log() {
    let lines = logged(tracing::Level::INFO, || {
        let mut state = state();
        let (output, error) = (Resource::new_own(0), Resource::new_own(1));
        state.write(&output, b"one\n\ntw").unwrap();
        state.write(&error, b"not finished").unwrap();
        state.write(&output, b"o\nthree").unwrap();
        state.write(&output, &[b'x'; 1 << 16]).unwrap();
        state.end_of_call();
        assert!(state.write(&output, &[b'x'; (1 << 16) + 1]).unwrap_err().to_string().contains("65537 bytes"));
    });
    assert_eq!((lines.len(), &lines[..2], &lines[3][..]), (4, &["one".to_string(), "two".into()][..], "not finished"));
    assert!(lines[2].starts_with("threexxx") && lines[2].len() < 2100, "{}", lines[2].len());
}

#[test]
fn random_numbers_are_given_in_measure() {
    let bytes = state().random_bytes(20).unwrap();
    assert_eq!((bytes.len(), &bytes), (20, &state().random_bytes(20).unwrap()));
    assert!(state().random_bytes(u64::MAX).unwrap_err().to_string().contains("at most 1048576"));
}
