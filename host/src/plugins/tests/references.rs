use std::fs;
use std::time::Instant;

use super::super::bundled::BUNDLED;
use super::*;

fn bytes(name: &str) -> Vec<u8> {
    super::super::bundled::find(name).unwrap().to_vec()
}

/// A folder holding the bundled `shuffled` under each of these file names.
fn folder(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        fs::write(folder.path().join(name), bytes("shuffled")).unwrap();
    }
    folder
}

#[test]
fn every_bundled_plugin_says_what_it_is() {
    for (name, _) in BUNDLED {
        let plugin = PluginRef::resolve_any(name, &[]).unwrap();
        let identity = plugin.identity();
        assert_eq!((identity.name.as_str(), identity.version.as_str()), (name, "0.1.0"));
        assert_eq!((identity.contract.as_str(), &identity.origin), ("0.1.0", &Origin::Bundled));
        let imports = Metadata::read(plugin.bytes(), name).unwrap().imports;
        assert_eq!(imports, ["tunehost:plugin/host@0.1.0"]);
    }
    let count = |kind| list(&[]).0.iter().filter(|listed| listed.kind == kind).count();
    assert_eq!(Kind::ALL.map(count), [5, 4, 3, 2, 4]);
}

#[test]
fn the_search_path_comes_before_the_bundled_ones() {
    let (first, second) = (folder(&["mine.wasm"]), folder(&["mine.wasm", "in-order.wasm"]));
    let path = [first.path().to_path_buf(), second.path().to_path_buf()];
    let origin = |name| PluginRef::resolve(Kind::Sampler, name, &path).unwrap().identity().origin.clone();
    assert_eq!(origin("mine"), Origin::File(first.path().join("mine.wasm")));
    assert_eq!(origin("in-order"), Origin::File(second.path().join("in-order.wasm")));
    assert_eq!(origin("bucket-to-pair"), Origin::Bundled);
    let by_path = second.path().join("mine.wasm");
    assert_eq!(origin(by_path.to_str().unwrap()), Origin::File(by_path));
}

#[test]
fn a_name_that_is_nowhere_shows_the_names_there_are() {
    let folder = folder(&["mine.wasm"]);
    let error = PluginRef::resolve(Kind::Sampler, "bucket-to-pear", &[folder.path().to_path_buf()]).unwrap_err();
    let parts =
        ["\"bucket-to-pear\"", "mine, bucket-to-pair, in-order, packed, shuffled", folder.path().to_str().unwrap()];
    assert_error(&error, "plugin::not_found", &parts);
    assert!(!error.to_string().contains("wall-clock"), "only samplers: {error}");
    assert_error(
        &PluginRef::resolve(Kind::Sampler, "no/such.wasm", &[]).unwrap_err(),
        "plugin::not_found",
        &["no/such.wasm"],
    );
}

#[test]
fn a_pin_must_be_the_bytes_own_hash() {
    let sha256 = bundled(Kind::Sampler, "shuffled").identity().sha256.clone();
    let resolve = |pin: &str| PluginRef::resolve(Kind::Sampler, &format!("shuffled@sha256:{pin}"), &[]);
    assert_eq!(resolve(&sha256.to_uppercase()).unwrap().identity().sha256, sha256);
    let other = "0".repeat(64);
    assert_error(&resolve(&other).unwrap_err(), "plugin::hash_mismatch", &["plugin shuffled 0.1.0", &sha256, &other]);
    assert_error(&resolve("abc").unwrap_err(), "usage::bad_plugin_pin", &["abc", "64 hex digits"]);
}

#[test]
fn a_plugin_of_another_kind_is_refused_before_it_is_compiled() {
    let error = PluginRef::resolve(Kind::Sampler, "wall-clock", &[]).unwrap_err();
    assert_error(
        &error,
        "plugin::wrong_kind",
        &["wall-clock 0.1.0 is of the kind checkpoint-scheduler", "the kind sampler"],
    );
}

#[test]
fn kinds_are_known_in_both_spellings() {
    assert_eq!(Kind::parse("checkpoint-scheduler").unwrap(), Kind::CheckpointScheduler);
    assert_eq!(Kind::parse("checkpoint_scheduler").unwrap(), Kind::CheckpointScheduler);
    assert_eq!(Kind::parse("sampler").unwrap(), Kind::Sampler);
    assert_error(
        &Kind::parse("samplers").unwrap_err(),
        "usage::unknown_plugin_kind",
        &["samplers", "checkpoint-scheduler"],
    );
}

#[test]
fn a_listing_shows_what_is_used_what_is_shadowed_and_what_is_broken() {
    let folder = folder(&["mine.wasm", "in-order.wasm"]);
    fs::write(folder.path().join("broken.wasm"), "no wasm").unwrap();
    fs::write(folder.path().join("notes.txt"), "not looked at").unwrap();
    let missing = folder.path().join("missing");
    let (listed, errors) = list(&[folder.path().to_path_buf(), missing.clone()]);

    let names: Vec<(&str, bool)> = listed.iter().map(|l| (l.name.as_str(), l.shadowed)).collect();
    assert_eq!(names[..2], [("in-order", false), ("mine", false)]);
    assert!(names.contains(&("in-order", true)), "the bundled one is shown as shadowed");
    assert_eq!(listed.len(), 2 + BUNDLED.len());
    assert_error(&errors[0], "plugin::not_a_component", &["broken.wasm"]);
    assert_error(&errors[1], "io::failed", &[missing.to_str().unwrap()]);

    let table = table(&listed);
    println!("{table}");
    assert_eq!(table.lines().count(), 1 + listed.len());
    assert!(table.lines().any(|line| line.starts_with("in-order") && line.ends_with("taken above)")), "{table}");
    assert_eq!(json(&listed)[1]["name"], "mine");
    assert_eq!(json(&listed)[1]["sha256"], listed[1].sha256.as_str());
}

#[test]
fn twenty_plugins_are_listed_without_being_compiled() {
    let names: Vec<String> = (BUNDLED.len()..20).map(|i| format!("plugin-{i}.wasm")).collect();
    let folder = folder(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let start = Instant::now();
    let (listed, errors) = list(&[folder.path().to_path_buf()]);
    let elapsed = start.elapsed();
    println!("20 plugins are listed in {elapsed:?}");
    assert_eq!((listed.len(), errors.len()), (20, 0));
    // Measured at 2 ms on a quiet machine; compiling a single one takes tens of milliseconds.
    assert!(elapsed.as_millis() < 100, "{elapsed:?}");
}
