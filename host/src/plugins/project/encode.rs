//! From a core module to a component, and the section that a listing reads.

use wit_component::ComponentEncoder;

use crate::error::{Error, Result};
use crate::plugins::metadata;

/// The component of a core module whose bindings wrote down its world.
pub fn component(module: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = ComponentEncoder::default();
    encoder.validate(true).module(module).and_then(ComponentEncoder::encode).map_err(|error| {
        Error::new("plugin::build_failed", format!("the module makes no component: {error:#}"))
            .expected("a module with the exports of its world, and no import but the contract's")
    })
}

/// Add the custom section with name and version.
pub fn stamp(component: &mut Vec<u8>, name: &str, version: &str) {
    let content = serde_json::json!({"name": name, "version": version}).to_string();
    let mut section = leb128(metadata::SECTION.len());
    section.extend(metadata::SECTION.bytes());
    section.extend(content.bytes());
    component.push(0); // the id of custom sections
    component.extend(leb128(section.len()));
    component.extend(section);
}

/// A length as WebAssembly writes it: seven bits a byte, lowest first.
fn leb128(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}
