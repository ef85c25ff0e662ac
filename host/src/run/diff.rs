//! In what two runs differ, a line for each thing: what follows from one that is named stands beside it, and run id, clocks,
//! paths and results are left out.

use super::changes::{Change, fingerprint, said};
use super::machine::Machine;
use super::provenance::Provenance;
use crate::config::{PLUGIN_KINDS, holds_path};
use crate::hash::FileHash;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Longest pair of values, in bytes, that is printed of what follows from a difference.
const SHOWN_BYTES: usize = 60;

/// One thing in which two runs differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The thing, with its value in either run.
    #[serde(flatten)]
    pub change: Change,
    /// What else differs because this does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub follows: Vec<Change>,
}

/// Every difference between the runs, by key.
pub fn differences(a: &Provenance, b: &Provenance) -> Vec<Difference> {
    let (of_a, of_b) = (asked_and_used(a), asked_and_used(b));
    let keys: BTreeSet<&String> = of_a.keys().chain(of_b.keys()).collect();
    let differs = keys.into_iter().filter(|key| of_a.get(*key) != of_b.get(*key));
    let change = |key: &String| Change { key: key.clone(), was: of_a.get(key).cloned(), is: of_b.get(key).cloned() };
    let all: Vec<Change> =
        differs.map(change).chain(sources_apart(a, b)).chain(another_base(a, b)).chain(files_apart(a, b)).collect();
    let named: BTreeSet<&str> = all.iter().map(|change| change.key.as_str()).collect();
    let root = |key: &str| {
        let mut root = key.to_string();
        while let Some(cause) = cause(&root, &named, a, b) {
            root = cause;
        }
        root
    };
    let (causes, effects): (Vec<&Change>, Vec<&Change>) =
        all.iter().partition(|change| root(&change.key) == change.key);
    let follows = |key: &str| effects.iter().filter(|effect| root(&effect.key) == key).map(|e| (*e).clone()).collect();
    causes.into_iter().map(|change| Difference { change: change.clone(), follows: follows(&change.key) }).collect()
}

/// One line a difference: `key: value of A | value of B`, and what follows from it.
pub fn text(differences: &[Difference]) -> String {
    if differences.is_empty() {
        return "no difference".into();
    }
    let line = |Difference { change, follows }: &Difference| match follows.len() {
        0 => format!("{}: {}\n", change.key, values(change)),
        _ => format!("{}: {}; with it {}\n", change.key, values(change), named(follows)),
    };
    differences.iter().map(line).collect()
}

fn values(change: &Change) -> String {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".into());
    format!("{} | {}", value(&change.was), value(&change.is))
}

/// Kernels are counted, the others named.
fn named(follows: &[Change]) -> String {
    let (kernels, others): (Vec<&Change>, Vec<&Change>) = follows.iter().partition(|c| c.key.starts_with("kernel/"));
    let mut words = Vec::new();
    if let Some(first) = kernels.first() {
        let alike = kernels.iter().all(|kernel| values(kernel) == values(first));
        let shown = if alike { values(first) } else { "in --json".into() };
        words.push(format!("{} resolved kernels ({shown})", kernels.len()));
    }
    words.extend(others.iter().map(|other| match values(other) {
        values if values.len() <= SHOWN_BYTES => format!("{} ({values})", other.key),
        _ => other.key.clone(),
    }));
    words.join(", ")
}

/// What was asked for and what it was computed with. A plugin is known by its bytes, a file by its hash.
fn asked_and_used(run: &Provenance) -> BTreeMap<String, String> {
    let mut out = fingerprint(run);
    out.retain(|key, _| key != "name" && !key.starts_with("corpus["));
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

/// The difference that is named from which another follows, where one is known.
fn cause(key: &str, named: &BTreeSet<&str>, a: &Provenance, b: &Provenance) -> Option<String> {
    let first_named = |keys: &[&str]| keys.iter().find(|key| named.contains(*key)).map(|key| key.to_string());
    let part = |prefix: &str| key.strip_prefix(prefix)?.split('.').next();
    // Another processor has other vector extensions, and mostly another number of cores.
    let other_processor = a.machine.cpu != b.machine.cpu;
    if let Some(kernel) = key.strip_prefix("kernel/") {
        let requested = |run: &Provenance| run.kernels.get(kernel).map(|kernel| kernel.requested.clone());
        return match requested(a) == requested(b) {
            true => first_named(&["device", "instruction-sets", "environment TUNEHOST_ISA"]),
            false => first_named(&["model.device", "model.weights"]),
        };
    }
    if let Some(kind) = part("plugins.config.") {
        return first_named(&[&format!("plugin/{kind}")]);
    }
    match key {
        "device" => first_named(&["model.device"]),
        "driver" => first_named(&["device", "model.device"]),
        "instruction-sets" | "processors" if other_processor => first_named(&["device"]),
        "threads" => first_named(&["environment RAYON_NUM_THREADS", "processors"]),
        "git revision" => first_named(&["version"]),
        "tokenizer" => first_named(&["model.base"]),
        "template" if of_base(a) && of_base(b) => first_named(&["model.base"]),
        _ if key.starts_with("base/") => first_named(&["model.base"]),
        _ if key.starts_with("corpus") && key != "corpus-manifest" => {
            sources_apart(a, b).into_iter().next().map(|source| source.key)
        }
        _ if key.starts_with("data.sources[") => {
            source_apart(key, a, b).filter(|source| *source != key).map(String::from)
        }
        _ => None,
    }
}

/// Whether a run's chat template is the one beside its tokenizer.
fn of_base(run: &Provenance) -> bool {
    let folder = |file: &Option<FileHash>| Some(file.as_ref()?.path.parent()?.to_path_buf());
    run.inputs.template.is_none() || folder(&run.inputs.template) == folder(&run.inputs.tokenizer)
}

/// The base, where the runs name two and read other files there.
fn another_base(a: &Provenance, b: &Provenance) -> Option<Change> {
    let path = |run: &Provenance| run.config.get("model.base").and_then(|entry| entry.value.clone());
    let hashes =
        |run: &Provenance| run.inputs.base.iter().map(|(name, f)| (name.clone(), f.sha256.clone())).collect::<Vec<_>>();
    let differs = path(a) != path(b) && hashes(a) != hashes(b);
    differs.then(|| Change { key: "model.base".into(), was: path(a), is: path(b) })
}

/// The elements of `data.sources`, by the prefix of their keys, with their paths.
fn sources(run: &Provenance) -> BTreeMap<&str, &str> {
    let paths = run.config.iter().filter_map(|(key, entry)| {
        let source = key.strip_suffix(".path").filter(|source| source.starts_with("data.sources["))?;
        Some((source, entry.value.as_deref()?))
    });
    paths.collect()
}

/// The files of the corpus that one run alone read: in pairs where each read as many that the other did not. Another order of the
/// same files is one difference.
fn files_apart(a: &Provenance, b: &Provenance) -> Vec<Change> {
    let hashes = |run: &Provenance| run.inputs.corpus.iter().map(|file| file.sha256.clone()).collect::<Vec<_>>();
    let names = |run: &Provenance| run.inputs.corpus.iter().map(file_name).collect::<Vec<_>>().join(", ");
    let (of_a, of_b) = (alone(a, b), alone(b, a));
    if of_a.is_empty() && of_b.is_empty() {
        let reordered = hashes(a) != hashes(b);
        let order = || Change { key: "corpus order".into(), was: Some(names(a)), is: Some(names(b)) };
        return reordered.then(order).into_iter().collect();
    }
    if of_a.len() == of_b.len() {
        let pair = |((i, was), (_, is)): ((usize, &FileHash), (usize, &FileHash))| Change {
            key: format!("corpus[{i}] {}", file_name(was)),
            was: Some(was.sha256.clone()),
            is: Some(is.sha256.clone()),
        };
        return of_a.into_iter().zip(of_b).map(pair).collect();
    }
    let key = |file: &FileHash| format!("corpus {}", file_name(file));
    let of_a = of_a.into_iter().map(|(_, f)| Change { key: key(f), was: Some(f.sha256.clone()), is: None });
    of_a.chain(of_b.into_iter().map(|(_, f)| Change { key: key(f), was: None, is: Some(f.sha256.clone()) })).collect()
}

/// The files of a run's corpus, with their places, of which `other` read no copy.
fn alone<'a>(run: &'a Provenance, other: &Provenance) -> Vec<(usize, &'a FileHash)> {
    let mut copies = BTreeMap::<&str, usize>::new();
    other.inputs.corpus.iter().for_each(|file| *copies.entry(&file.sha256).or_default() += 1);
    let mut is_alone = |file: &FileHash| match copies.get_mut(file.sha256.as_str()) {
        Some(left) if *left > 0 => {
            *left -= 1;
            false
        }
        _ => true,
    };
    run.inputs.corpus.iter().enumerate().filter(|(_, file)| is_alone(file)).collect()
}

fn file_name(file: &FileHash) -> String {
    file.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The element of `data.sources` that a key is of, where one run alone has it.
fn source_apart<'a>(key: &'a str, a: &Provenance, b: &Provenance) -> Option<&'a str> {
    let source = key.rsplit_once("].").map_or(key, |(array, _)| &key[..array.len() + 1]);
    (sources(a).contains_key(source) != sources(b).contains_key(source)).then_some(source)
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
    use super::super::provenance::{ConfigValue, Implementation, PluginRecord};
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
        let portable = |p: &mut Provenance| {
            p.machine.environment.insert("TUNEHOST_ISA".into(), "portable".into());
            let rope = Implementation { requested: "auto".into(), resolved: "portable".into() };
            p.kernels.insert("grouped_mm".into(), rope);
        };
        let scheduler = |p: &mut Provenance| {
            let plugin = PluginRecord { name: "plateau".into(), ..p.inputs.plugins["sampler"].clone() };
            p.inputs.plugins.insert("checkpoint_scheduler".into(), plugin);
            let entry = ConfigValue { value: Some("3".into()), origin: "default".into() };
            p.config.insert("plugins.config.checkpoint_scheduler.n".into(), entry);
        };
        let base = |p: &mut Provenance| {
            p.config.get_mut("model.base").unwrap().value = Some("\"/models/b\"".into());
            for file in p.inputs.base.values_mut().chain(&mut p.inputs.tokenizer) {
                file.sha256 = "0".repeat(64);
            }
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
        let edits: [(&str, Edit); 16] = [
            ("model.weights: \"f32\" | \"bf16\"; with it 1 resolved kernels (flex | cpu-bf16-avx512-bf16)\n", bf16),
            ("environment TUNEHOST_ISA: absent | portable; with it 1 resolved kernels (flex | portable)\n", portable),
            ("plugin/checkpoint_scheduler: absent | plateau 0.1.0 ", scheduler),
            ("model.base: ", base),
            // A file of it, in its place: no other thing is named.
            ("base/config.json: ", |p| p.inputs.base.get_mut("config.json").unwrap().sha256 = "0".repeat(64)),
            ("plugin/sampler: shuffled 0.1.0", sampler),
            ("device: ", machine),
            ("data.sources[1]: absent | b.jsonl; with it ", source),
            ("corpus[0] a.jsonl: ", |p| p.inputs.corpus[0].sha256 = "0".repeat(64)),
            // One more in a folder of them, before the others.
            ("corpus new.jsonl: absent | 0000", |p| {
                let new = FileHash { path: "new.jsonl".into(), sha256: "0".repeat(64), ..p.inputs.corpus[0].clone() };
                p.inputs.corpus.insert(0, new);
            }),
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
