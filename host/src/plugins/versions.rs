//! The published versions of the contract, and the adapter module that serves each.
//!
//! A component says its version in the names of what it exports (`tunehost:plugin/plugin@0.1.0`), which are read without
//! compiling it. Versions are semantic: a later one of the same line (before 1.0 the minor version, from then on the major
//! one) only adds, so it serves a component of an earlier one. A line that is no longer the newest keeps its module, so
//! that a component built for 0.1.0 still runs on a host that has 0.1.0 and 0.2.0.

use wasmtime::component::Linker;

use super::since_v0_1_0;
use super::state::State;
use crate::error::{Error, Result};

/// What one version's module gives to a component of that version.
pub type AddToLinker = fn(&mut Linker<State>) -> wasmtime::Result<()>;

/// Every published version, oldest first.
pub const PUBLISHED: [(&str, AddToLinker); 1] = [(since_v0_1_0::VERSION, since_v0_1_0::add_to_linker)];

/// The adapter of `published` (oldest first) for a component of `version`; `label` is what errors call the component.
///
/// # Errors
/// `plugin::contract_too_new`, `plugin::contract_unknown`.
pub fn resolve<'a, A>(version: &str, published: &'a [(&str, A)], label: &str) -> Result<&'a A> {
    let error = |code, what: &str| {
        let known: Vec<&str> = published.iter().map(|(version, _)| *version).collect();
        Error::new(code, format!("{label} is built for version {version} of the plugin contract{what}"))
            .expected(format!("at most {}, which this tunehost has", known.join(" or ")))
    };
    let unknown = || {
        error("plugin::contract_unknown", ", which was never released")
            .help("rebuild the plugin with this repository's wit/ folder")
    };
    let wanted = Number::parse(version).ok_or_else(unknown)?;
    let known = || published.iter().filter_map(|(version, adapter)| Some((Number::parse(version)?, adapter)));
    let mut line = known().filter(|(number, _)| number.line() == wanted.line()).peekable();
    let has_line = line.peek().is_some();
    if let Some((_, adapter)) = line.find(|(number, _)| *number >= wanted) {
        return Ok(adapter);
    }
    if has_line || known().all(|(number, _)| number < wanted) {
        return Err(error("plugin::contract_too_new", "")
            .help("update tunehost, or take a build of the plugin for the older contract"));
    }
    Err(unknown())
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Number([u32; 3]);

impl Number {
    fn parse(version: &str) -> Option<Self> {
        let parts: Vec<u32> = version.split('.').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        parts.try_into().ok().map(Self)
    }

    /// What versions that can stand in for each other share.
    fn line(self) -> [u32; 2] {
        match self.0 {
            [0, minor, _] => [0, minor],
            [major, ..] => [major, 0],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: [(&str, &str); 2] = [("0.1.0", "since_v0_1_0"), ("0.2.0", "since_v0_2_0")];

    fn code(version: &str, published: &[(&str, &str)]) -> &'static str {
        let error = resolve(version, published, "plugin x").unwrap_err();
        assert!(error.message().starts_with(&format!("plugin x is built for version {version} ")), "{error}");
        error.code()
    }

    #[test]
    fn an_older_minor_keeps_its_own_adapter() {
        assert_eq!(*resolve("0.1.0", &TWO, "plugin x").unwrap(), "since_v0_1_0");
        assert_eq!(*resolve("0.2.0", &TWO, "plugin x").unwrap(), "since_v0_2_0");
    }

    #[test]
    fn a_later_version_of_a_line_serves_an_earlier_one() {
        let published = [("0.1.2", "since_v0_1_2"), ("1.4.0", "since_v1_4_0"), ("2.0.0", "since_v2_0_0")];
        assert_eq!(*resolve("0.1.0", &published, "plugin x").unwrap(), "since_v0_1_2");
        assert_eq!(*resolve("1.3.7", &published, "plugin x").unwrap(), "since_v1_4_0");
        assert_eq!(code("1.5.0", &published), "plugin::contract_too_new");
    }

    #[test]
    fn what_is_newer_is_refused_with_what_to_do() {
        for newer in ["0.1.1", "0.2.1", "0.3.0", "1.0.0"] {
            assert_eq!(code(newer, &TWO), "plugin::contract_too_new", "{newer}");
        }
        let text = resolve("0.3.0", &TWO, "plugin x").unwrap_err().to_string();
        assert!(text.contains("at most 0.1.0 or 0.2.0") && text.contains("update tunehost"), "{text}");
    }

    #[test]
    fn what_was_never_released_is_unknown() {
        for never in ["0.0.9", "0.1", "0.1.0.0", "0.1.0-rc.1", "new", ""] {
            assert_eq!(code(never, &TWO), "plugin::contract_unknown", "{never}");
        }
    }
}
