//! What must be as it was for a run to go on: a resumed run ends with the bytes of one that never stopped, or is
//! refused.

use super::folder::CONFIG;
use super::provenance::{ConfigValue, Provenance};
use crate::config::{self, Config, Entry, PLUGIN_KINDS, Resolved, entries, holds_path};
use crate::error::{Error, Result};
use crate::hash::{FileHash, sha256};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// One thing that is not as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// What changed: a configuration key, or `base/<file>`, `tokenizer`, `template`, `corpus-manifest`, `adapter`, `corpus[i]`,
    /// `plugin/<kind>`, `kernel/<name>`, `device`, `instruction-sets`, `version`.
    pub key: String,
    /// Its value or hash when the run was started, or as the last resume that let it change accepted it; nothing where it was not
    /// there.
    pub was: Option<String>,
    /// Its value or hash now.
    pub is: Option<String>,
}

/// SHA-256 of every configuration value that decides what a run computes, in hexadecimal. Where files lie does not:
/// they are hashed themselves.
pub fn config_sha256(config: &Config) -> String {
    let lines = entries(config).into_iter().filter(|entry| decides(&entry.key));
    sha256(
        lines
            .map(|entry| format!("{} = {}\n", entry.key, entry.text().unwrap_or_default()))
            .collect::<String>()
            .as_bytes(),
    )
}

/// Everything in which a run differs from what it was last accepted as. Not compared: where files lie, `run.root`, threads, clocks.
pub fn changes(stored: &Provenance, now: &Provenance) -> Vec<Change> {
    let (stored, now) = (accepted(stored), fingerprint(now));
    let keys: BTreeSet<&String> = stored.keys().chain(now.keys()).collect();
    // A kernel that the run's program had no name for: it computed the same without saying so.
    let named_since = |key: &str| key.starts_with("kernel/") && !stored.contains_key(key);
    let differs = keys.into_iter().filter(|key| stored.get(*key) != now.get(*key) && !named_since(key));
    let change = |key: &String| Change { key: key.clone(), was: stored.get(key).cloned(), is: now.get(key).cloned() };
    differs.map(change).collect()
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".into());
        write!(f, "{}: was {}, is {}", self.key, value(&self.was), value(&self.is))
    }
}

/// What the run was when it started, with everything that a resume let change since.
pub(super) fn accepted(stored: &Provenance) -> BTreeMap<String, String> {
    let mut out = fingerprint(stored);
    for Change { key, is, .. } in stored.resumes.iter().flat_map(|resume| &resume.allowed) {
        match is {
            Some(value) => _ = out.insert(key.clone(), value.clone()),
            None => _ = out.remove(key),
        }
    }
    out
}

/// The configuration with which the run in the folder `run` goes on: that of its file, with what resumes let change and `sets` over
/// it. Beside it, what resumes let change.
///
/// # Errors
/// Those of [`config::load`].
pub fn configuration(run: &Path, stored: &Provenance, sets: &[String]) -> Result<(Resolved, Vec<String>)> {
    let file = run.join(CONFIG);
    let accepted = accepted_sets(stored, &config::load(&file, &[], &[])?.config, sets);
    Ok((config::load(&file, &[&accepted[..], sets].concat(), &[])?, accepted))
}

/// The configuration keys that resumes let change, as `KEY=VALUE` with the value last accepted: a run goes on with it. Left out is
/// a key that one of `sets` gives, and one for which the run's file, `written`, no longer has what the run started with: somebody
/// changed it there, and that is compared.
fn accepted_sets(stored: &Provenance, written: &Config, sets: &[String]) -> Vec<String> {
    let of = |entry: &Entry| said(&ConfigValue { value: entry.text(), origin: String::new() });
    let written: BTreeMap<String, Option<String>> =
        entries(written).into_iter().map(|entry| (entry.key.clone(), of(&entry))).collect();
    let (first, last) = (fingerprint(stored), accepted(stored));
    let given = |key: &str| {
        let within = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let mut keys = sets.iter().filter_map(|set| Some(set.split_once('=')?.0.trim()));
        keys.any(|given| within(given, key) || within(key, given))
    };
    let kept = last.iter().filter(|(key, value)| {
        let settable = !KINDS.iter().any(|kind| names(&[kind.to_string()], key)) && !key.contains('[');
        let as_started = written.get(*key).and_then(Option::as_ref) == first.get(*key);
        settable && first.get(*key) != Some(value) && as_started && !given(key)
    });
    kept.map(|(key, value)| format!("{key}={value}")).collect()
}

/// Refuses a run that [`changes`] finds changed, but for the keys in `allow`. Those changes are returned: the exceptions with which
/// the run goes on.
///
/// # Errors
/// `run::changed`, naming each change with both values, and why one of `allow` is none that can be allowed; `usage::allow` for
/// one that names nothing.
pub fn refuse_changes(stored: &Provenance, now: &Provenance, allow: &[String]) -> Result<Vec<Change>> {
    refuse_changes_beside(stored, now, allow, None)
}

/// As [`refuse_changes`], beside what says that other records would be trained on than are written down, which nothing can allow.
///
/// # Errors
/// Those of [`refuse_changes`].
pub fn refuse_changes_beside(
    stored: &Provenance,
    now: &Provenance,
    allow: &[String],
    other_order: Option<&Error>,
) -> Result<Vec<Change>> {
    refuse_unknown(stored, now, allow)?;
    let changes = changes(stored, now);
    let allowed = |change: &Change| fixed(&change.key).is_none() && names(allow, &change.key);
    let (allowed, refused): (Vec<Change>, Vec<Change>) = changes.into_iter().partition(allowed);
    if refused.is_empty() {
        return Ok(allowed);
    }
    let first = fingerprint(stored);
    let line = |change: &Change| {
        let started = match first.get(&change.key) {
            value if value == change.was.as_ref() => String::new(),
            value => format!(" ({} when the run was started)", value.map_or("absent", String::as_str)),
        };
        let fixed = fixed(&change.key).filter(|_| names(allow, &change.key));
        let fixed = fixed.map(|why| format!(" (--allow cannot help: {why})")).unwrap_or_default();
        let files =
            now.inputs.corpus.iter().chain(&stored.inputs.corpus).zip(corpus_keys(now).chain(corpus_keys(stored)));
        let file = files.into_iter().find(|(_, key)| *key == change.key);
        let file = file.map(|(file, _)| format!(" ({})", file.path.display())).unwrap_or_default();
        format!("\n  {change}{file}{started}{fixed}")
    };
    let lines: String = refused.iter().map(line).collect();
    let message = format!("run {} is not what it was:{lines}", stored.run_id);
    let error = Error::new("run::changed", message).help("undo the change, or start a new run");
    Err(match (refused.iter().find(|change| fixed(&change.key).is_none()), other_order) {
        (_, Some(order)) => error.help(format!("--allow cannot help: {}", order.message())),
        (Some(change), None) => error.help(format!(
            "to go on all the same, without the promise of the same bytes and with a note in provenance: --allow '{}'",
            change.key
        )),
        (None, None) => error,
    })
}

/// The keys of a run's corpus files, in their order.
fn corpus_keys(run: &Provenance) -> impl Iterator<Item = String> {
    (0..run.inputs.corpus.len()).map(|i| format!("corpus[{i}]"))
}

/// Whether `allow` has the key, or what stands before its `/` or `[`: `kernel` names every kernel.
fn names(allow: &[String], key: &str) -> bool {
    let covers = |name: &String| {
        key.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '[']))
    };
    allow.iter().any(covers)
}

/// Why a key stays as it was in any case: what is saved would mean something else under another value.
fn fixed(key: &str) -> Option<&'static str> {
    match key {
        "lora.rank" | "lora.targets" => Some("the saved adapters have their shapes from it"),
        "train.seed" => Some("adapters, dropout and the order of the records come from it"),
        "train.epochs" | "train.max_steps" | "train.micro_batch" | "train.accumulation" => {
            Some("the steps that are written down would be others")
        }
        "corpus-manifest" => Some("what stands against the corpora was ruled on by it"),
        _ if key.starts_with("data.sources[") && key.ends_with(".root") => {
            Some("what stands against the corpora was ruled on by their names")
        }
        _ => None,
    }
}

/// Kinds of things that may have changed, beside keys of the configuration.
const KINDS: [&str; 10] =
    ["base", "tokenizer", "template", "corpus", "adapter", "plugin", "kernel", "device", "instruction-sets", "version"];

/// Refuses a name among `allow` that nothing is called.
fn refuse_unknown(stored: &Provenance, now: &Provenance, allow: &[String]) -> Result<()> {
    let (was, is) = (fingerprint(stored), fingerprint(now));
    let known = KINDS.into_iter().chain(was.keys().chain(is.keys()).chain(now.config.keys()).map(String::as_str));
    let unknown = allow.iter().find(|name| !known.clone().any(|key| names(std::slice::from_ref(name), key)));
    match unknown {
        None => Ok(()),
        Some(name) => Err(Error::new("usage::allow", format!("`--allow {name}` names nothing that can change"))
            .expected(format!("one of {}, or a key of the configuration such as train.lr", KINDS.join(", ")))
            .help("without it, the error names what changed")),
    }
}

/// The value of a configuration key; of an empty table, which is there only while it has no keys, nothing.
pub(super) fn said(entry: &ConfigValue) -> Option<String> {
    entry.value.clone().filter(|value| value != "{}")
}

pub(super) fn fingerprint(provenance: &Provenance) -> BTreeMap<String, String> {
    let Provenance { program, config, inputs, machine, kernels, .. } = provenance;
    let mut out = BTreeMap::new();
    for (key, entry) in config.iter().filter(|(key, _)| decides(key)) {
        out.extend(said(entry).map(|value| (key.clone(), value)));
    }
    let mut add = |key: String, value: &str| _ = out.insert(key, value.to_string());
    let named = |name: &str, file: &Option<FileHash>| file.as_ref().map(|file| (name.to_string(), file.sha256.clone()));
    inputs.base.iter().for_each(|(name, file)| add(format!("base/{name}"), &file.sha256));
    inputs.corpus.iter().enumerate().for_each(|(i, file)| add(format!("corpus[{i}]"), &file.sha256));
    let single = [
        named("tokenizer", &inputs.tokenizer),
        named("template", &inputs.template),
        named("corpus-manifest", &inputs.corpus_manifest),
        named("adapter", &inputs.adapter),
    ];
    single.into_iter().flatten().for_each(|(name, hash)| add(name, &hash));
    for (kind, plugin) in &inputs.plugins {
        add(format!("plugin/{kind}"), &format!("{} {} {}", plugin.name, plugin.version, plugin.sha256));
    }
    kernels.iter().for_each(|(name, kernel)| add(format!("kernel/{name}"), &kernel.resolved));
    add("device".into(), &machine.device_name);
    add("instruction-sets".into(), &machine.instruction_sets.join(" "));
    add("version".into(), &program.version);
    out
}

/// Whether a configuration key decides by itself what is computed. Plugins are known by their hashes, not by the name
/// or the path that leads to them. A limit cannot change an answer, only whether there is one; `plugins.wasi` can, since a
/// plugin sees what it was given.
fn decides(key: &str) -> bool {
    let plugins = key.strip_prefix("plugins.");
    let elsewhere =
        plugins.is_some_and(|key| PLUGIN_KINDS.contains(&key) || key == "limits" || key.starts_with("limits."));
    // When a run is saved, what stays of it and whether it stops changes nothing of what it computes: a window may be moved.
    let when = key.starts_with("checkpoint.")
        || key.starts_with("window.")
        || key.starts_with("gates.")
        || key == "model.allow_shared"
        || plugins.is_some_and(|key| key.starts_with("config.checkpoint_scheduler"));
    !holds_path(key) && !elsewhere && !when
}

#[cfg(test)]
mod tests {
    use super::super::provenance::tests::sample;
    use super::*;

    fn keys(stored: &Provenance, now: &Provenance) -> Vec<String> {
        changes(stored, now).into_iter().map(|change| change.key).collect()
    }

    #[test]
    fn a_moved_run_on_other_threads_is_the_same() {
        let root = tempfile::tempdir().unwrap();
        let stored = sample(&root.path().join("here"), "0.5", "{}");
        let mut now = sample(&root.path().join("there"), "0.5", "{}");
        now.machine.threads += 5;
        now.machine.cpus += 5;
        now.config.get_mut("run.root").unwrap().value = Some("elsewhere".into());
        now.config.get_mut("plugins.sampler").unwrap().value = Some("own/shuffled.wasm".into());
        now.config.get_mut("window.open").unwrap().value = Some("[[\"true\"]]".into());
        now.config.get_mut("checkpoint.keep_last").unwrap().value = Some("3".into());
        let (key, value) = ("plugins.limits.sampler.call_deadline_ms", Some("90000".into()));
        now.config.insert(key.into(), ConfigValue { value, origin: "default".into() });
        now.resumed(3, Vec::new());
        assert_ne!(stored.inputs.corpus[0].path, now.inputs.corpus[0].path);
        assert_eq!(changes(&stored, &now), []);
        assert_eq!(stored.config_sha256, now.config_sha256);
        assert_eq!(refuse_changes(&stored, &now, &[]).unwrap(), []);
    }

    #[test]
    fn each_change_is_refused_naming_both_values() {
        let root = tempfile::tempdir().unwrap();
        let stored = sample(&root.path().join("a"), "0.5", "{}");
        let now = sample(&root.path().join("b"), "0.25", "{}");
        assert_ne!(stored.config_sha256, now.config_sha256);
        let error = refuse_changes(&stored, &now, &[]).unwrap_err();
        assert_eq!(error.code(), "run::changed");
        assert!(error.message().ends_with("\n  train.lr: was 0.5, is 0.25"), "{error}");

        let now = sample(&root.path().join("c"), "0.5", "{ }");
        assert_eq!(keys(&stored, &now), ["base/config.json", "corpus[0]", "tokenizer"]);

        type Edit = fn(&mut Provenance);
        let edits: [(&str, Edit); 12] = [
            ("adapter", |p| p.inputs.adapter = p.inputs.tokenizer.clone()),
            ("plugins.wasi", |p| p.config.get_mut("plugins.wasi").unwrap().value = Some("[\"sampler\"]".into())),
            ("train.max_steps", |p| p.config.get_mut("train.max_steps").unwrap().value = Some("5".into())),
            ("train.epochs", |p| p.config.get_mut("train.epochs").unwrap().value = Some("2".into())),
            ("train.micro_batch", |p| p.config.get_mut("train.micro_batch").unwrap().value = Some("1".into())),
            ("template", |p| p.inputs.template = p.inputs.tokenizer.clone()),
            ("corpus-manifest", |p| p.inputs.corpus_manifest = p.inputs.tokenizer.clone()),
            ("plugin/sampler", |p| p.inputs.plugins.get_mut("sampler").unwrap().sha256 = "0".into()),
            ("kernel/grouped_mm", |p| p.kernels.get_mut("grouped_mm").unwrap().resolved = "cube".into()),
            ("instruction-sets", |p| p.machine.instruction_sets = vec!["mmx".into()]),
            ("device", |p| p.machine.device_name = "another".into()),
            ("version", |p| p.program.version = "9.9.9".into()),
        ];
        for (key, edit) in edits {
            let mut now = stored.clone();
            edit(&mut now);
            assert_eq!(keys(&stored, &now), [key]);
        }
    }

    #[test]
    fn a_kernel_that_the_run_had_no_name_for_is_no_change() {
        let root = tempfile::tempdir().unwrap();
        let stored = sample(root.path(), "0.5", "{}");
        let mut now = stored.clone();
        let named = now.kernels["grouped_mm"].clone();
        now.kernels.insert("named_since".into(), named);
        assert!(keys(&stored, &now).is_empty());
        assert_eq!(keys(&now, &stored), ["kernel/named_since"], "one that is gone is");
    }

    #[test]
    fn what_was_not_there_is_absent() {
        let root = tempfile::tempdir().unwrap();
        let stored = sample(root.path(), "0.5", "{}");
        let mut now = stored.clone();
        now.config.get_mut("train.max_steps").unwrap().value = Some("5".into());
        let error = refuse_changes(&stored, &now, &[]).unwrap_err();
        assert!(error.message().ends_with("train.max_steps: was absent, is 5"), "{error}");
    }

    #[test]
    fn what_is_allowed_is_returned_and_stays_allowed() {
        let root = tempfile::tempdir().unwrap();
        let mut stored = sample(root.path(), "0.5", "{}");
        let mut now = stored.clone();
        now.config.get_mut("train.lr").unwrap().value = Some("0.25".into());
        now.machine.device_name = "another".into();
        let allow = |keys: &[&str]| keys.iter().map(|key| key.to_string()).collect::<Vec<_>>();

        let error = refuse_changes(&stored, &now, &allow(&["train.lr"])).unwrap_err();
        assert!(!error.message().contains("train.lr") && error.message().contains("device: was "), "{error}");
        assert!(error.to_string().ends_with("--allow 'device'"), "{error}");
        now.kernels.get_mut("grouped_mm").unwrap().resolved = "cube".into();
        let exceptions = refuse_changes(&stored, &now, &allow(&["train.lr", "device", "kernel", "template"])).unwrap();
        assert_eq!(
            exceptions.iter().map(|c| c.key.as_str()).collect::<Vec<_>>(),
            ["device", "kernel/grouped_mm", "train.lr"]
        );

        // Written down, they are what the run is from then on: another value is a change, also the one that it started with.
        stored.resumed(3, exceptions.clone());
        assert_eq!(refuse_changes(&stored, &now, &[]).unwrap(), []);
        for value in ["0.125", "0.5"] {
            now.config.get_mut("train.lr").unwrap().value = Some(value.into());
            let error = refuse_changes(&stored, &now, &[]).unwrap_err();
            let line = format!("\n  train.lr: was 0.25, is {value} (0.5 when the run was started)");
            assert!(error.message().ends_with(&line), "{error}");
        }
        let back = refuse_changes(&stored, &now, &allow(&["train.lr"])).unwrap();
        stored.resumed(4, back);
        assert_eq!(refuse_changes(&stored, &now, &[]).unwrap(), []);
    }

    #[test]
    fn a_run_goes_on_with_the_values_that_were_accepted_last() {
        let root = tempfile::tempdir().unwrap();
        let mut stored = sample(root.path(), "0.5", "{}");
        let change = |key: &str, is: &str| Change { key: key.into(), was: None, is: Some(is.into()) };
        let setting = "plugins.config.sampler.bucket";
        let allowed = [("train.lr", "0.25"), (setting, "4"), ("kernel/grouped_mm", "cube"), ("base/config.json", "x")];
        stored.resumed(3, allowed.map(|(key, is)| change(key, is)).into());
        stored.resumed(4, vec![change("train.lr", "0.125")]);
        let written = |lr: &str| {
            let sets = [format!("train.lr={lr}")];
            crate::config::load(&root.path().join("a.toml"), &sets, &[]).unwrap().config
        };
        let sets = |lr: &str, given: &[&str]| {
            accepted_sets(&stored, &written(lr), &given.iter().map(|set| set.to_string()).collect::<Vec<_>>())
        };
        let bucket = format!("{setting}=4");
        assert_eq!(sets("0.5", &[]), [bucket.as_str(), "train.lr=0.125"]);
        assert_eq!(sets("0.5", &["train.lr=7", "plugins.config.sampler={}"]), [""; 0]);
        // Written over in the run's file since: that is compared, and not hidden.
        assert_eq!(sets("0.75", &[]), [bucket.as_str()]);
    }

    #[test]
    fn what_the_saved_work_hangs_on_is_never_allowed() {
        let root = tempfile::tempdir().unwrap();
        let stored = sample(root.path(), "0.5", "{}");
        for key in ["lora.rank", "lora.targets", "train.seed", "train.epochs", "train.max_steps", "train.accumulation"]
        {
            let mut now = stored.clone();
            now.config.get_mut(key).expect(key).value = Some("7".into());
            let error = refuse_changes(&stored, &now, &[key.to_string()]).unwrap_err();
            assert!(error.message().contains(&format!("{key}: was ")), "{error}");
            assert!(error.message().contains("is 7 (--allow cannot help: "), "{error}");
            assert!(!error.to_string().contains("--allow '"), "{error}");
        }
        let mut now = stored.clone();
        now.inputs.corpus_manifest = now.inputs.tokenizer.clone();
        let error = refuse_changes(&stored, &now, &["corpus-manifest".to_string()]).unwrap_err();
        assert!(error.message().contains("(--allow cannot help: what stands against the corpora"), "{error}");
        for unknown in ["nosuch", "train", "kernel/nosuch"] {
            let error = refuse_changes(&stored, &stored, &[unknown.to_string()]).unwrap_err();
            assert_eq!(error.code(), "usage::allow");
            assert!(error.to_string().contains("one of base, tokenizer, "), "{error}");
        }
    }
}
