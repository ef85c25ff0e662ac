//! Components that break the contract: each must end in one clear error, and none may harm the host.

use std::time::{Duration, Instant};

use super::super::bundled::{BUNDLED, find};
use super::*;

const HOSTILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile");
const LENGTHS: [u32; 6] = [10, 20, 30, 40, 50, 60];

pub(super) fn hostile(name: &str) -> PluginRef {
    PluginRef::resolve(Kind::Sampler, &format!("{HOSTILE}/{name}.wasm"), &[]).unwrap()
}

pub(super) fn limits() -> Limits {
    Limits {
        memory_mib: 64,
        answer_mib: 2,
        log_lines_per_minute: 3,
        start_deadline_ms: 10_000,
        call_deadline_ms: 10_000,
        wasi: false,
    }
}

pub(super) fn load(act: &str, limits: Limits) -> crate::error::Result<Sampler> {
    Sampler::load(&hostile("hostile-sampler").within(limits), Some(&json!({ "act": act })))
}

pub(super) fn small_request() -> PlanRequest<'static> {
    PlanRequest { max_seq_len: 100, ..request(&LENGTHS) }
}

fn plan(act: &str) -> crate::error::Result<Plan> {
    load(act, limits())?.plan(&small_request())
}

/// The error of this act must have `code` and say plugin, version, function and each of `parts`.
#[track_caller]
fn assert_plan_error(act: &str, code: &str, parts: &[&str]) {
    let error = plan(act).expect_err(act);
    println!("{error}\n");
    assert_error(&error, code, &["plugin hostile-sampler 0.1.0", "hostile-sampler.wasm): plan"]);
    assert_error(&error, code, parts);
}

#[test]
fn a_loop_is_stopped_at_the_deadline() {
    let short = Limits { call_deadline_ms: 200, ..limits() };
    let mut sampler = load("loop", short).unwrap();
    let start = Instant::now();
    let error = sampler.plan(&small_request()).unwrap_err();
    assert_error(
        &error,
        "plugin::deadline",
        &[
            "hostile-sampler 0.1.0",
            "plan did not answer in time",
            "200 ms",
            "raise call_deadline_ms in [plugins.limits.sampler]",
        ],
    );
    assert!((Duration::from_millis(190)..Duration::from_secs(5)).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[test]
fn a_loop_while_starting_is_stopped_too() {
    let error = load("loop-in-configure", Limits { start_deadline_ms: 200, ..limits() }).err().expect("stopped");
    assert_error(&error, "plugin::deadline", &["configure did not answer in time", "200 ms", "start_deadline_ms"]);
}

#[test]
fn memory_stays_under_its_cap() {
    assert_plan_error("memory-bomb", "plugin::memory", &["at most 64 MiB", "MiB of memory"]);
}

#[test]
fn recursion_without_end_is_a_trap() {
    assert_plan_error("deep-recursion", "plugin::trapped", &["overflowed its stack", "recurse"]);
}

#[test]
fn a_panic_keeps_its_message_and_its_place() {
    assert_plan_error(
        "panic",
        "plugin::trapped",
        &["record 6 is cursed", "hostile-sampler/src/lib.rs", "bug in the plugin"],
    );
    let error = load("panic-in-configure", limits()).err().expect("panics");
    assert_error(&error, "plugin::trapped", &["hostile-sampler 0.1.0", "configure", "not even started"]);
}

#[test]
fn a_trap_in_describe_ends_the_load() {
    let error = Sampler::load(&hostile("hostile-describe"), None).err().expect("traps");
    assert_error(&error, "plugin::trapped", &["hostile-describe", "describe aborted without saying why"]);
}

#[test]
fn after_a_trap_a_fresh_instance_answers() {
    let mut sampler = load("panic-in-epoch1", limits()).unwrap();
    let before = sampler.plan(&small_request()).unwrap();
    let error = sampler.plan(&PlanRequest { epoch: 1, ..small_request() }).unwrap_err();
    assert_error(&error, "plugin::trapped", &["not this epoch"]);
    assert_eq!(sampler.plan(&small_request()).unwrap(), before);
}

#[test]
fn an_answer_beyond_its_size_is_refused() {
    assert_plan_error("huge-answer", "plugin::answer_too_large", &["at most 2 MiB"]);
}

#[test]
fn an_answer_of_a_gigabyte_is_refused_before_the_host_holds_it() {
    let room = Limits { memory_mib: 1536, call_deadline_ms: 60_000, ..Limits::of(Kind::Sampler) };
    let error = load("gigabyte-answer", room).unwrap().plan(&small_request()).unwrap_err();
    assert_error(&error, "plugin::answer_too_large", &["hostile-sampler 0.1.0", "plan", "at most 256 MiB"]);
    assert_plan_error("gigabyte-answer", "plugin::memory", &["at most 64 MiB"]);
}

#[test]
fn text_that_is_no_text_is_refused() {
    assert_plan_error("invalid-utf8", "plugin::broken_answer", &["utf-8", "bug in the plugin"]);
}

#[test]
fn text_reaches_the_terminal_as_one_bounded_line() {
    let error = plan("rude-text").unwrap_err();
    assert_error(&error, "plugin::refused", &["plan refused: \\u{1b}[2Jgone xxx"]);
    assert!(error.message().len() < 2300 && !error.to_string().contains('\u{1b}'), "{}", error.message().len());
}

#[test]
fn plans_against_the_rules_are_refused_with_their_record() {
    let invalid = "plugin::invalid_plan";
    assert_plan_error("duplicate", invalid, &["records[3] is record 1, which was there before", "each record once"]);
    assert_plan_error("dropped-and-planned", invalid, &["dropped[0] is record 2, which was there before"]);
    assert_plan_error("missing", invalid, &["record 5 is missing (1 of 6 records are)", "declared dropped"]);
    assert_plan_error("out-of-range", invalid, &["records[0] is record 4294967295", "a record below 6"]);
    assert_plan_error("one-long-row", invalid, &["the row of record 0", "210 tokens", "at most 100 tokens"]);
    assert_plan_error("one-wide-batch", invalid, &["from record 0, has 6 rows", "at most 2 rows"]);
    assert_plan_error("empty-row", invalid, &["row-ends[1] is 1", "more than the 1 before it"]);
    assert_plan_error("falling-ends", invalid, &["batch-ends[1] is 2", "more than the 4 before it"]);
    assert_plan_error("ends-too-short", invalid, &["row-ends ends at 5", "6, the length of records"]);
}

#[test]
fn a_token_budget_is_held_with_padding_counted() {
    let request = small_request();
    let plan = sampler("in-order", None).plan(&request).unwrap();
    let identity = bundled(Kind::Sampler, "in-order").identity().clone();
    assert!(plan.check(&PlanRequest { token_budget: Some(120), ..request }, &identity).is_ok());
    let error = plan.check(&PlanRequest { token_budget: Some(119), ..request }, &identity).unwrap_err();
    assert_error(&error, "plugin::invalid_plan", &["micro-batch 2, from record 4, has 120 tokens", "at most 119"]);
}

/// Write these bytes as a file and resolve it.
pub(super) fn resolve_bytes(kind: Kind, bytes: &[u8]) -> crate::error::Result<PluginRef> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.wasm");
    std::fs::write(&path, bytes).unwrap();
    PluginRef::resolve(kind, path.to_str().unwrap(), &[])
}

/// A bundled component with every `from` in its bytes changed into `to`, which must be as long.
pub(super) fn patched(name: &str, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = find(name).unwrap().to_vec();
    let places: Vec<usize> =
        (0..bytes.len() - from.len()).filter(|&at| bytes[at..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty(), "{from} is not in {name}");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

#[test]
fn a_component_of_another_world_is_refused() {
    let path = format!("{HOSTILE}/wrong-world.wasm");
    let error = PluginRef::resolve(Kind::Sampler, &path, &[]).unwrap_err();
    let parts = ["wrong-world.wasm", "no plugin of tunehost's", "it exports example:other/thing", "one of the worlds"];
    assert_error(&error, "plugin::wrong_kind", &parts);
    let error = PluginRef::resolve(Kind::CorpusFilter, &format!("{HOSTILE}/hostile-sampler.wasm"), &[]).unwrap_err();
    assert_error(
        &error,
        "plugin::wrong_kind",
        &["hostile-sampler 0.1.0", "is of the kind sampler", "the kind corpus-filter", "keep-all"],
    );
}

#[test]
fn a_component_of_a_newer_contract_is_refused() {
    let error = PluginRef::resolve(Kind::Sampler, &format!("{HOSTILE}/newer-contract.wasm"), &[]).unwrap_err();
    let parts = ["newer-contract.wasm", "version 0.2.0", "at most 0.1.0", "update tunehost"];
    assert_error(&error, "plugin::contract_too_new", &parts);
}

#[test]
fn a_component_that_imports_sockets_is_refused() {
    let error = PluginRef::resolve(Kind::Sampler, &format!("{HOSTILE}/imports-sockets.wasm"), &[]).unwrap_err();
    assert_error(&error, "plugin::forbidden_import", &["imports-sockets.wasm", "imports wasi:sockets/"]);
}

/// The module inside a component.
fn core_module(component: &[u8]) -> Vec<u8> {
    let module = wasmparser::Parser::new(0).parse_all(component).find_map(|payload| match payload.unwrap() {
        wasmparser::Payload::ModuleSection { unchecked_range, .. } => Some(unchecked_range),
        _ => None,
    });
    component[module.expect("a component holds a module")].to_vec()
}

#[test]
fn what_is_no_component_is_refused() {
    let error = |bytes: &[u8]| resolve_bytes(Kind::Sampler, bytes).unwrap_err();
    assert_error(
        &error(&core_module(find("in-order").unwrap())),
        "plugin::not_a_component",
        &["x.wasm", "core WebAssembly module"],
    );
    assert_error(&error(b"#!/bin/sh\n"), "plugin::not_a_component", &["x.wasm", "at byte 0"]);
    assert_error(&error(b""), "plugin::not_a_component", &["x.wasm"]);
    let empty = b"\0asm\x0d\0\x01\0";
    assert_error(&error(empty), "plugin::wrong_kind", &["no plugin of tunehost's", "it exports nothing"]);
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let whole = find("in-order").unwrap();
    for length in (0..whole.len()).step_by(997) {
        let error = resolve_bytes(Kind::Sampler, &whole[..length]).expect_err("cut off");
        // A cut between two sections leaves a whole component that exports nothing yet.
        let codes = ["plugin::not_a_component", "plugin::wrong_kind"];
        assert!(codes.contains(&error.code()), "{length} of {} bytes: {error}", whole.len());
    }
}

#[test]
fn a_newer_contract_is_refused_and_an_unreleased_one_too() {
    for newer in ["0.1.1", "0.2.0", "1.0.0"] {
        let bytes = patched("in-order", "sampling@0.1.0", &format!("sampling@{newer}"));
        let error = resolve_bytes(Kind::Sampler, &bytes).unwrap_err();
        assert_error(&error, "plugin::contract_too_new", &["x.wasm", newer, "at most 0.1.0", "update tunehost"]);
    }
    let bytes = patched("in-order", "sampling@0.1.0", "sampling@0.0.9");
    assert_error(
        &resolve_bytes(Kind::Sampler, &bytes).unwrap_err(),
        "plugin::contract_unknown",
        &["0.0.9", "never released"],
    );
}

#[test]
fn a_plugin_that_calls_itself_something_else_is_refused() {
    let plugin =
        resolve_bytes(Kind::Sampler, &patched("in-order", r#""name": "in-order""#, r#""name": "shuffled""#)).unwrap();
    let error = Sampler::load(&plugin, None).err().expect("two names");
    assert_error(&error, "plugin::misdescribed", &["plugin shuffled 0.1.0", "describes itself as in-order 0.1.0"]);
}

#[test]
fn a_description_that_cannot_be_read_or_shown_is_refused() {
    for (to, says) in [
        (r#""name": 1234567890"#, "cannot be read"),
        (r#""name": "In order""#, "has the name"),
        (r#""name": "in--orde""#, "has the name"),
    ] {
        let error = resolve_bytes(Kind::Sampler, &patched("in-order", r#""name": "in-order""#, to)).unwrap_err();
        assert_error(&error, "plugin::misdescribed", &["x.wasm", "tunehost-plugin", says]);
    }
    let bytes = patched("in-order", r#""version": "0.1.0""#, r#""version": "a.1.0""#);
    assert_error(&resolve_bytes(Kind::Sampler, &bytes).unwrap_err(), "plugin::misdescribed", &["has the version"]);
}

#[test]
fn what_is_no_file_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe.wasm");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = PluginRef::resolve(Kind::Sampler, path.to_str().unwrap(), &[]).unwrap_err();
    assert_error(&error, "plugin::not_a_component", &["pipe.wasm is no file"]);
    let (listed, errors) = list(&[folder.path().to_path_buf()]);
    assert_eq!((listed.len(), errors.len()), (BUNDLED.len(), 1));
}

#[test]
fn a_search_path_that_is_not_there_is_an_error() {
    let missing = std::path::PathBuf::from("/no/such/folder");
    let error = PluginRef::resolve(Kind::Sampler, "in-order", &[missing]).unwrap_err();
    assert_error(&error, "io::failed", &["look for plugins in /no/such/folder"]);
}

#[test]
fn a_missing_function_is_named() {
    let bytes = patched("every-n-steps", "after-step", "after-stop");
    let plugin = resolve_bytes(Kind::CheckpointScheduler, &bytes).unwrap();
    let error = CheckpointScheduler::load(&plugin, Some(&json!({"n": 1}))).err().expect("no after-step");
    assert_error(&error, "plugin::wrong_contract", &["every-n-steps 0.1.0", "checkpoint-scheduler", "after-step"]);
}
