//! In what two runs differ, a line for each thing: what follows from one that is named already is left out, and so are run id,
//! clocks, paths and results.

use super::changes::{Change, fingerprint, said};
use super::machine::Machine;
use super::provenance::Provenance;
use crate::config::{PLUGIN_KINDS, holds_path};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Every difference between the runs, by key.
pub fn differences(a: &Provenance, b: &Provenance) -> Vec<Change> {
    let (of_a, of_b) = (asked_and_used(a), asked_and_used(b));
    let keys: BTreeSet<&String> = of_a.keys().chain(of_b.keys()).collect();
    let differs = keys.into_iter().filter(|key| of_a.get(*key) != of_b.get(*key));
    let change = |key: &String| Change { key: key.clone(), was: of_a.get(key).cloned(), is: of_b.get(key).cloned() };
    let all: Vec<Change> = differs.map(change).collect();
    let named: BTreeSet<&str> = all.iter().map(|change| change.key.as_str()).collect();
    let follows = |change: &Change| follows(&change.key, &named, a, b);
    let mut out: Vec<Change> = all.iter().filter(|change| !follows(change)).cloned().collect();
    out.extend(sources_apart(a, b));
    out
}

/// One line a difference: `key: value of A | value of B`.
pub fn text(differences: &[Change]) -> String {
    if differences.is_empty() {
        return "no difference".into();
    }
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".into());
    differences.iter().map(|c| format!("{}: {} | {}\n", c.key, value(&c.was), value(&c.is))).collect()
}

/// What was asked for and what it was computed with. A plugin is known by its bytes, a file by its hash.
fn asked_and_used(run: &Provenance) -> BTreeMap<String, String> {
    let mut out = fingerprint(run);
    out.remove("name");
    let named_by_hash = |key: &str| {
        let plugin = key.strip_prefix("plugins.").is_some_and(|kind| PLUGIN_KINDS.contains(&kind));
        holds_path(key) || plugin || key == "name"
    };
    for (key, entry) in run.config.iter().filter(|(key, _)| !named_by_hash(key)) {
        out.extend(said(entry).map(|value| (key.clone(), value)));
    }
    let Machine { threads, cpus, environment, driver, .. } = &run.machine;
    out.insert("threads".into(), threads.to_string());
    out.insert("processors".into(), cpus.to_string());
    out.extend(driver.clone().map(|driver| ("driver".into(), driver)));
    out.extend(environment.iter().map(|(name, value)| (format!("environment {name}"), value.clone())));
    out.extend(run.program.git_revision.clone().map(|revision| ("git revision".into(), revision)));
    let mut allowed = BTreeMap::<&str, Vec<&str>>::new();
    for change in run.resumes.iter().flat_map(|resume| &resume.allowed) {
        let (values, is) = (allowed.entry(&change.key).or_default(), change.is.as_deref().unwrap_or("absent"));
        if !values.contains(&is) {
            values.push(is);
        }
    }
    out.extend(allowed.into_iter().map(|(key, values)| (format!("resumed with {key}"), values.join(", "))));
    out
}

/// Whether a difference follows from another that is named.
fn follows(key: &str, named: &BTreeSet<&str>, a: &Provenance, b: &Provenance) -> bool {
    let names = |key: &str| named.contains(key);
    if let Some(kernel) = key.strip_prefix("kernel/") {
        let requested = |run: &Provenance| run.kernels.get(kernel).map(|kernel| kernel.requested.clone());
        return requested(a) != requested(b) || names("instruction-sets") || names("device");
    }
    match key {
        "device" => names("model.device"),
        "driver" => names("device") || names("model.device"),
        // Another processor has other vector extensions, and mostly another number of cores.
        "instruction-sets" => names("device") || a.machine.cpu != b.machine.cpu,
        "threads" => names("processors") || names("environment RAYON_NUM_THREADS"),
        "git revision" => names("version"),
        _ if key.starts_with("corpus[") => sources(a).len() != sources(b).len(),
        _ => key.starts_with("data.sources[") && source_apart(key, a, b),
    }
}

/// The elements of `data.sources`, by the prefix of their keys, with their paths.
fn sources(run: &Provenance) -> BTreeMap<&str, &str> {
    let paths = run.config.iter().filter_map(|(key, entry)| {
        let source = key.strip_suffix(".path").filter(|source| source.starts_with("data.sources["))?;
        Some((source, entry.value.as_deref()?))
    });
    paths.collect()
}

fn source_apart(key: &str, a: &Provenance, b: &Provenance) -> bool {
    let source = key.rsplit_once("].").map_or(key, |(array, _)| &key[..array.len() + 1]);
    sources(a).contains_key(source) != sources(b).contains_key(source)
}

/// A source that one run alone has, in one line.
fn sources_apart(a: &Provenance, b: &Provenance) -> Vec<Change> {
    let (of_a, of_b) = (sources(a), sources(b));
    let keys: BTreeSet<&&str> =
        of_a.keys().chain(of_b.keys()).filter(|k| of_a.contains_key(*k) != of_b.contains_key(*k)).collect();
    let name = |path: Option<&&str>| {
        let path = path?.trim_matches('"');
        Some(Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy().into_owned()))
    };
    let change = |key: &&str| Change { key: key.to_string(), was: name(of_a.get(key)), is: name(of_b.get(key)) };
    keys.into_iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::super::provenance::tests::sample;
    use super::super::provenance::{ConfigValue, Implementation};
    use super::*;

    #[test]
    fn runs_that_differ_in_one_thing_differ_in_one_line() {
        let root = tempfile::tempdir().unwrap();
        let a = sample(&root.path().join("a"), "0.5", "{}");
        let mut same = sample(&root.path().join("b"), "0.5", "{}");
        same.command_line.push("--quiet".into());
        same.config.get_mut("name").unwrap().value = Some("\"another\"".into());
        same.config.get_mut("train.lr").unwrap().origin = "b.toml:9".into();
        same.resumed(4, Vec::new());
        assert_eq!(text(&differences(&a, &same)), "no difference");
        let other = sample(&root.path().join("c"), "0.25", "{}");
        assert_eq!(text(&differences(&a, &other)), "train.lr: 0.5 | 0.25\n");

        type Edit = fn(&mut Provenance);
        let bf16 = |p: &mut Provenance| {
            p.config.get_mut("model.weights").unwrap().value = Some("\"bf16\"".into());
            let both = Implementation { requested: "cpu bf16".into(), resolved: "cpu-bf16-avx512-bf16".into() };
            p.kernels.insert("grouped_mm".into(), both);
        };
        let sampler = |p: &mut Provenance| {
            p.config.get_mut("plugins.sampler").unwrap().value = Some("\"packed\"".into());
            let plugin = p.inputs.plugins.get_mut("sampler").unwrap();
            (plugin.name, plugin.sha256) = ("packed".into(), "0".repeat(64));
        };
        let machine = |p: &mut Provenance| {
            p.machine.cpu = "another".into();
            p.machine.device_name = "another".into();
            p.machine.instruction_sets = vec!["mmx".into()];
            p.kernels.get_mut("grouped_mm").unwrap().resolved = "cpu-f32-portable".into();
        };
        let source = |p: &mut Provenance| {
            for (field, value) in [("path", "\"/data/b.jsonl\""), ("root", "\"b\""), ("weight", "1.0")] {
                let entry = ConfigValue { value: Some(value.into()), origin: "default".into() };
                p.config.insert(format!("data.sources[1].{field}"), entry);
            }
            p.inputs.corpus.push(p.inputs.corpus[0].clone());
        };
        let edits: [(&str, Edit); 10] = [
            ("model.weights: \"f32\" | \"bf16\"\n", bf16),
            ("plugin/sampler: shuffled 0.1.0", sampler),
            ("device: ", machine),
            ("data.sources[1]: absent | b.jsonl\n", source),
            ("gates.single_root: \"stop\" | \"warn\"\n", |p| {
                p.config.get_mut("gates.single_root").unwrap().value = Some("\"warn\"".into());
            }),
            ("kernel/grouped_mm: flex | another\n", |p| {
                p.kernels.get_mut("grouped_mm").unwrap().resolved = "another".into();
            }),
            ("threads: 2 | 7\n", |p| p.machine.threads = 7),
            ("environment TUNEHOST_ISA: absent | avx2\n", |p| {
                p.machine.environment.insert("TUNEHOST_ISA".into(), "avx2".into());
            }),
            ("resumed with train.lr: absent | 0.25\n", |p| {
                let lr = || vec![Change { key: "train.lr".into(), was: Some("0.5".into()), is: Some("0.25".into()) }];
                p.resumed(3, lr());
                p.resumed(4, lr());
            }),
            ("template: absent | ", |p| p.inputs.template = p.inputs.tokenizer.clone()),
        ];
        for (says, edit) in edits {
            let mut b = a.clone();
            edit(&mut b);
            let lines = text(&differences(&a, &b));
            assert!(lines.starts_with(says) && lines.lines().count() == 1, "{says}: {lines}");
        }
    }
}
