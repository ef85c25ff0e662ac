//! A path in a file is relative to that file, a path on the command line to the current directory.

use super::{Config, EligibilityConfig, Origin, PLUGIN_KINDS, keys};
use std::path::{Component, Path, PathBuf};

/// Whether a plugin is named by a path, not by the name of a bundled or installed one.
pub fn is_plugin_path(plugin: &str) -> bool {
    let plugin = plugin.split_once("@sha256:").map_or(plugin, |(plugin, _)| plugin);
    plugin.contains(std::path::is_separator) || plugin.ends_with(".wasm")
}

/// Whether the key (as [`entries`](super::entries) spells it) says only where something lies, so that its value may
/// change while what lies there stays the same.
pub fn holds_path(key: &str) -> bool {
    let source = key.starts_with("data.sources[") && key.ends_with("].path");
    let keys = [
        "model.base",
        "data.template",
        "data.cache",
        "lora.init",
        "plugins.search_path",
        "eligibility.manifest",
        "eligibility.grants",
        "run.root",
    ];
    source || keys.contains(&key)
}

/// Joins every path with the folder of the file that it was written in.
pub(super) fn resolve(config: &mut Config, origin: &dyn Fn(&str) -> Origin) {
    for_each_path(config, &mut |key, path| {
        if let Origin::File { path: file, .. } = origin(key) {
            tidy(&file.parent().unwrap_or(Path::new("")).join(path))
        } else {
            path.into()
        }
    });
}

/// Makes every path absolute, so that the configuration means the same wherever it is read.
///
/// # Errors
/// When the current directory is gone.
pub(super) fn make_absolute(config: &mut Config) -> std::io::Result<()> {
    let here = std::env::current_dir()?;
    for_each_path(config, &mut |_, path| tidy(&here.join(path)));
    Ok(())
}

fn for_each_path(config: &mut Config, change: &mut dyn FnMut(&str, &Path) -> PathBuf) {
    config.model.base = change("model.base", &config.model.base);
    for (i, source) in config.data.sources.iter_mut().enumerate() {
        source.path = change(&format!("{}.path", keys::index("data.sources", i)), &source.path);
    }
    if let Some(template) = config.data.template.as_mut().filter(|template| *template != "base") {
        *template = into_string(change("data.template", Path::new(template)));
    }
    if let Some(cache) = config.data.cache.as_mut().filter(|cache| *cache != "off") {
        *cache = into_string(change("data.cache", Path::new(cache)));
    }
    if let Some(init) = &mut config.lora.init {
        *init = change("lora.init", init);
    }
    for (kind, plugin) in PLUGIN_KINDS.into_iter().zip(config.plugins.named_mut()) {
        if is_plugin_path(plugin) {
            *plugin = into_string(change(&keys::join("plugins", kind), Path::new(plugin)));
        }
    }
    for (i, folder) in config.plugins.search_path.iter_mut().enumerate() {
        *folder = change(&keys::index("plugins.search_path", i), folder);
    }
    let EligibilityConfig { manifest, grants } = &mut config.eligibility;
    for (key, path) in [("eligibility.manifest", manifest), ("eligibility.grants", grants)] {
        if let Some(path) = path {
            *path = change(key, path);
        }
    }
    config.run.root = change("run.root", &config.run.root);
}

/// The parts joined here are text: one from TOML, one a path that the user typed.
fn into_string(path: PathBuf) -> String {
    path.into_os_string().into_string().unwrap_or_else(|path| path.to_string_lossy().into_owned())
}

/// `configs/../corpus` as `corpus`. A component is dropped only where it is no symbolic link, since `..` then leads
/// elsewhere.
fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        let droppable = matches!(out.components().next_back(), Some(Component::Normal(_))) && !out.is_symlink();
        match component {
            Component::ParentDir if droppable => _ = out.pop(),
            Component::CurDir => {}
            component => out.push(component),
        }
    }
    if out.as_os_str().is_empty() { ".".into() } else { out }
}
