//! A version of the contract that is out never changes: its files are pinned beside them.

use super::super::contract;
use super::super::since_v0_1_0::VERSION;
use super::*;

#[test]
fn the_contract_is_the_one_that_was_pinned() {
    let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit");
    let pins = std::fs::read_to_string(wit.join(format!("{VERSION}.sha256"))).unwrap();
    let mut pinned: Vec<(&str, &str)> = pins.lines().map(|line| line.split_once("  ").unwrap()).collect();
    let mut files: Vec<(String, &str)> =
        contract::FILES.iter().map(|(name, text)| (crate::hash::sha256(text.as_bytes()), *name)).collect();
    pinned.sort_by_key(|&(_, name)| name);
    files.sort_by_key(|&(_, name)| name);
    for ((expected, pinned), (sha256, file)) in pinned.iter().zip(&files) {
        assert_eq!(pinned, file);
        assert_eq!(expected, sha256, "wit/{file} changed: give the contract a new version and a module of its own");
    }
    let on_disk = std::fs::read_dir(&wit)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "wit"));
    assert_eq!([pinned.len(), files.len()], [on_disk.count(); 2], "every file of wit/ is printed and pinned");
}

#[test]
fn the_printed_contract_names_its_package_once() {
    let document = contract::document();
    assert_eq!(document.matches("package tunehost:plugin@0.1.0;").count(), 1);
    assert!(document.starts_with("package "));
    for kind in Kind::ALL {
        assert!(document.contains(&format!("world {kind} {{")), "{kind}");
    }
}
