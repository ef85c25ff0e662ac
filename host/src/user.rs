//! Where the user's own files lie.

use std::path::PathBuf;

/// `$XDG_CACHE_HOME/tunehost`, or the same under `~/.cache`; `None` where the user has neither.
pub fn cache_folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path: &PathBuf| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(caches.join("tunehost"))
}
