use super::super::bundled::BUNDLED;
use super::super::check::{Property, check, verdict};
use super::*;

const HOSTILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-sampler.wasm");

fn failures(properties: &[Property]) -> Vec<&str> {
    properties.iter().filter(|property| property.failure.is_some()).map(|property| property.name.as_str()).collect()
}

#[test]
fn every_bundled_plugin_keeps_its_contract() {
    for (name, _) in BUNDLED {
        let plugin = PluginRef::resolve_any(name, &[]).unwrap();
        let properties = check(&plugin, None).unwrap();
        assert!(properties.len() >= 6, "{name}: {properties:?}");
        assert_eq!(failures(&properties), [""; 0], "{name}: {properties:?}");
        assert!(verdict(&plugin, &properties).is_none());
    }
}

#[test]
fn a_plugin_that_breaks_its_contract_fails_by_name_and_reason() {
    let plugin = PluginRef::resolve_any(HOSTILE, &[]).unwrap();
    let properties = check(&plugin, Some(&json!({"act": "duplicate"}))).unwrap();
    let failed = failures(&properties);
    assert!(failed.contains(&"corpora of every shape and size are planned by the rules"), "{properties:?}");
    let why = properties.iter().find_map(|property| property.failure.as_ref()).unwrap();
    assert!(!why.is_empty());
    let verdict = verdict(&plugin, &properties).unwrap();
    assert_error(&verdict, "plugin::nonconforming", &["hostile-sampler 0.1.0", &format!("fails {} of", failed.len())]);
    assert_eq!(verdict.exit_code(), 5);
}

#[test]
fn a_plugin_that_cannot_start_is_an_error_not_a_report() {
    let plugin = PluginRef::resolve_any(HOSTILE, &[]).unwrap();
    let error = check(&plugin, Some(&json!({"act": "panic-in-configure"}))).unwrap_err();
    assert_eq!(error.code(), "plugin::trapped");
}

#[test]
fn a_sheet_shows_settings_limits_and_imports_of_a_plugin_that_needs_settings() {
    let sheet = Sheet::of(&bundled(Kind::CheckpointScheduler, "every-n-steps")).unwrap();
    let text = sheet.text();
    for part in ["every-n-steps 0.1.0", "integer, at least 1, must be given", "256 MiB", "tunehost:plugin/host@0.1.0"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert_eq!(sheet.json()["config_schema"]["required"], json!(["n"]));
}
