use std::fs;
use std::time::Instant;

use super::super::cache::component_in;
use super::super::runtime::engine;
use super::*;

fn is_cached(folder: &Path, plugin: &PluginRef) -> bool {
    component_in(folder, engine().unwrap(), plugin).unwrap().1
}

fn code_file(folder: &Path, plugin: &PluginRef) -> PathBuf {
    let of_plugin = |path: &PathBuf| path.to_string_lossy().contains(&plugin.identity().sha256);
    let mut files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(of_plugin);
    let file = files.next().expect("the compiled plugin");
    assert_eq!(files.next(), None, "nothing lies beside it");
    file
}

#[test]
fn the_second_load_takes_the_compiled_code() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = bundled(Kind::Sampler, "in-order");
    let start = Instant::now();
    assert!(!is_cached(folder.path(), &plugin));
    let compiled = start.elapsed();
    let start = Instant::now();
    assert!(is_cached(folder.path(), &plugin));
    println!("a plugin is compiled in {compiled:?}, taken from the cache in {:?}", start.elapsed());
    assert!(!is_cached(folder.path(), &bundled(Kind::Sampler, "shuffled")), "another plugin has its own entry");
}

/// Whoever can put a key into the folder could sign code with it.
#[test]
fn a_folder_that_others_can_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let plugin = bundled(Kind::Sampler, "in-order");
    assert!(!is_cached(folder.path(), &plugin));
    assert!(is_cached(folder.path(), &plugin));
    for mode in [0o777, 0o720, 0o702] {
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        assert!(!is_cached(folder.path(), &plugin), "{mode:o}");
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert!(is_cached(folder.path(), &plugin));
}

#[test]
fn a_changed_entry_is_built_again() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = bundled(Kind::Sampler, "in-order");
    assert!(!is_cached(folder.path(), &plugin));
    let file = code_file(folder.path(), &plugin);
    let whole = fs::read(&file).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let damaged = [flipped(0), flipped(20), flipped(48), flipped(whole.len() / 2), whole[..100].to_vec(), Vec::new()];
    for bytes in damaged {
        fs::write(&file, bytes).unwrap();
        assert!(!is_cached(folder.path(), &plugin), "never trusted");
        assert!(is_cached(folder.path(), &plugin), "and written over");
    }
}

#[test]
fn an_entry_signed_elsewhere_or_for_another_plugin_is_built_again() {
    let (here, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (plugin, other) = (bundled(Kind::Sampler, "in-order"), bundled(Kind::Sampler, "shuffled"));
    for folder in [&here, &elsewhere] {
        assert!(!is_cached(folder.path(), &plugin));
    }
    let file = code_file(here.path(), &plugin);
    fs::copy(code_file(elsewhere.path(), &plugin), &file).unwrap();
    assert!(!is_cached(here.path(), &plugin), "signed with another user's key");

    assert!(!is_cached(here.path(), &other));
    fs::copy(code_file(here.path(), &other), &file).unwrap();
    assert!(!is_cached(here.path(), &plugin), "signed here, but for another component");
}

#[cfg(unix)]
#[test]
fn a_key_that_others_could_read_is_replaced() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let plugin = bundled(Kind::Sampler, "in-order");
    assert!(!is_cached(folder.path(), &plugin));
    let key = folder.path().join("key");
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(!is_cached(folder.path(), &plugin));
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(is_cached(folder.path(), &plugin));
}

#[test]
fn a_cache_that_cannot_be_written_costs_only_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a-file");
    fs::write(&file, "").unwrap();
    assert!(!is_cached(&file, &bundled(Kind::Sampler, "in-order")));
}

#[test]
fn a_cached_plugin_is_ready_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = bundled(Kind::Sampler, "bucket-to-pair");
    assert!(!is_cached(folder.path(), &plugin));
    let start = Instant::now();
    let plugin = PluginRef::resolve(Kind::Sampler, "bucket-to-pair", &[]).unwrap();
    assert!(is_cached(folder.path(), &plugin));
    let found = start.elapsed();
    sampler("bucket-to-pair", None);
    let start = Instant::now();
    sampler("bucket-to-pair", None);
    println!("found and read from the cache in {found:?}; ready to plan in {:?}", start.elapsed());
}
