//! A bounded run of what `fuzz/` fuzzes: the same bodies on the committed seeds and on mutations of them, the same in every run.

#[path = "../fuzz/bodies.rs"]
mod bodies;
#[path = "../fuzz/mutations.rs"]
mod mutations;

use bodies::Bench;
use std::fs;
use std::path::Path;

fn run(target: &str, count: usize, body: impl Fn(&Bench, &[u8])) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let bench = Bench::open(&root);
    let entries = fs::read_dir(root.join("fuzz/seeds").join(target)).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(seeds.len() >= 4, "{paths:?}");
    seeds.iter().for_each(|seed| body(&bench, seed));
    mutations::mutations(&seeds.iter().map(Vec::as_slice).collect::<Vec<_>>(), count, |bytes| body(&bench, bytes));
}

#[test]
fn any_file_is_read_or_refused() {
    run("file", 3000, Bench::file);
}

#[test]
fn any_conversation_is_rendered_and_encoded_or_refused_by_every_template() {
    run("conversation", 1000, Bench::conversation);
}

#[test]
fn any_template_is_trained_with_or_refused() {
    run("template", 300, Bench::template);
}
