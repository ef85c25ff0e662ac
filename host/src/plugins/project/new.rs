//! A new project: a template under a name of its own.

use std::path::{Path, PathBuf};

use super::templates::{self, File};
use super::{Language, check_name};
use crate::error::{Error, Result};
use crate::plugins::Kind;
use crate::run::atomic::{self, Existing};

/// Write the project of a new plugin into the folder `name` of `parent`; the folder's path.
///
/// # Errors
/// `usage::invalid_value` for a name that is none, `usage::no_template` with those that exist, `run::exists`, class `io`.
pub fn new(parent: &Path, name: &str, kind: Kind, language: Language) -> Result<PathBuf> {
    check_name(name)?;
    let files = templates::files(name, kind, language).ok_or_else(|| no_template(kind, language))?;
    let folder = parent.join(name);
    if std::fs::symlink_metadata(&folder).is_ok() {
        return Err(Error::new("run::exists", format!("{} exists already and is not overwritten", folder.display()))
            .help("take another name"));
    }
    for File { path, text } in files {
        let path = folder.join(path);
        let parent = path.parent().unwrap_or(&folder);
        std::fs::create_dir_all(parent).map_err(|error| Error::io("create", parent, error))?;
        atomic::write(&path, text.as_bytes(), Existing::Refuse)?;
    }
    Ok(folder)
}

fn no_template(kind: Kind, language: Language) -> Error {
    let of = |language: Language| {
        let kinds: Vec<&str> = templates::kinds(language).into_iter().map(Kind::name).collect();
        format!("{language}: {}", kinds.join(", "))
    };
    Error::new("usage::no_template", format!("there is no template for the kind {kind} in {language}"))
        .expected(Language::ALL.map(of).join("; "))
        .help("`tunehost plugins build` builds every kind in every language: start from a template of another kind")
}
