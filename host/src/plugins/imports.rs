//! What a component may import: the contract's host interface, and the virtual WASI where it was allowed.

use super::reference::PluginRef;
use super::versions::{self, PUBLISHED};
use super::wasi;
use crate::error::{Error, Result};

const HOST: &str = "tunehost:plugin/host";

/// Refuse a component that imports what no plugin can have. Whether it may have WASI is [asked](check_granted) when it is
/// started.
///
/// # Errors
/// `plugin::forbidden_import`, and those of [`versions::resolve`].
pub fn check(imports: &[String], label: &str) -> Result<()> {
    for import in imports {
        match import.split_once('@') {
            Some((HOST, version)) => drop(versions::resolve(version, &PUBLISHED, label)?),
            _ if wasi::offers(import) => {}
            _ => return Err(forbidden(import, label)),
        }
    }
    Ok(())
}

/// Refuse a component that imports WASI where it was not allowed.
///
/// # Errors
/// `plugin::forbidden_import`.
pub fn check_granted(plugin: &PluginRef) -> Result<()> {
    let mut wasi = plugin.imports().iter().filter(|import| import.starts_with("wasi:"));
    match wasi.next() {
        Some(first) if !plugin.limits().wasi => {
            let (identity, others) = (plugin.identity(), wasi.count());
            let others = if others == 0 { String::new() } else { format!(" and {others} more interfaces of WASI") };
            let key = identity.kind.config_key();
            Err(Error::new(
                "plugin::forbidden_import",
                format!("{identity} imports {first}{others}, but WASI is off for this plugin"),
            )
            .expected(format!("no import but {HOST}@{}", identity.contract))
            .help(format!(
                "build it without WASI, or allow the virtual one (fixed clocks, seeded random numbers; no files, \
                 network or environment): plugins.wasi = [\"{key}\"] in the configuration, --wasi for `tunehost plugins`"
            )))
        }
        _ => Ok(()),
    }
}

fn forbidden(import: &str, label: &str) -> Error {
    let error = Error::new("plugin::forbidden_import", format!("{label} imports {import}"))
        .expected(format!("no import but {HOST}@{}: plugins have no files, network or clock", PUBLISHED[0].0));
    match import.starts_with("wasi:") {
        true => error.help(format!(
            "build it without that import. Where it is allowed, a plugin may import of WASI {}.x: {}",
            wasi::MINOR,
            wasi::PACKAGES.join(", ")
        )),
        false => error.help("build it without that import"),
    }
}
