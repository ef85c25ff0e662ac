use super::*;
use crate::config;
use crate::plugins::{Kind, PluginRef};
use crate::run::provenance::LedgerHead;
use tempfile::TempDir;

const MANIFEST: &str = r#"
[[corpus]]
name = "chats"
licence = "CC-BY-4.0"

[[corpus.blocker]]
name = "no-consent"
reason = "a participant took it back"

[[corpus]]
name = "unused"
blocker = [{ name = "x", reason = "y" }]
"#;

const GRANTS: &str = r#"
[[grant]]
id = "g1"
scope = "chats/no-consent"
operator = "ops"
expires = 2999-01-01T00:00:00Z
control = "names are replaced"
"#;

/// A folder with a configuration, a manifest, grants and an open ledger.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new(manifest: &str, grants: &str) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        let text = "name = \"demo\"\nmodel.base = \"base\"\nrun.root = \"runs\"\n[data]\nmax_seq_len = 64\n\
                    sources = [{ path = \"a.jsonl\", root = \"chats\" }, { path = \"b.jsonl\", root = \"chats\" }]\n\
                    [eligibility]\nmanifest = \"corpora.toml\"\ngrants = \"grants.toml\"\n";
        place.write("demo.toml", text);
        place.write("corpora.toml", manifest);
        place.write("grants.toml", grants);
        Ledger::create(&place.ledger()).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        std::fs::write(self.path(name), text).unwrap();
    }

    fn ledger(&self) -> PathBuf {
        Ledger::path_for(&self.path("grants.toml"))
    }

    fn config(&self) -> Config {
        config::load(&self.path("demo.toml"), &[], &[]).unwrap().config
    }

    fn ask(&self, plugin: &str, own: Option<&str>) -> Result<EligibilityRecord> {
        let config = self.config();
        let manifest = Manifest::read(config.eligibility.manifest.as_ref().unwrap())?;
        ask(&config, Some(&manifest), &mut load(plugin), Some(&self.path("elsewhere/new")), own)
    }

    fn consume(&self, record: &mut EligibilityRecord, run: &str) -> Result<()> {
        consume(&self.config(), record, &self.path("elsewhere/new"), run).map(|aside| assert_eq!(aside, None))
    }

    /// Asks and consumes.
    fn start(&self, run: &str) -> Result<EligibilityRecord> {
        let mut record = self.ask("one-run-grant", None)?;
        self.consume(&mut record, run)?;
        Ok(record)
    }

    /// Without the plugin `strict` letting anything through: what goes on was not asked anew.
    fn resume(&self, stored: &EligibilityRecord, run: &str) -> Result<EligibilityRecord> {
        let config = self.config();
        let manifest = Manifest::read(config.eligibility.manifest.as_ref().unwrap())?;
        resume(&config, Some(&manifest), &mut load("strict"), Some(stored.clone()), &self.path("elsewhere/new"), run)
    }

    /// The provenance of a run, as far as it matters here.
    fn record(&self, run: &str, record: &EligibilityRecord) {
        let text = serde_json::json!({"schema": 99, "run_id": run, "eligibility": record}).to_string();
        self.write(&format!("runs/{run}/provenance.json"), &text);
    }
}

fn load(plugin: &str) -> Eligibility {
    Eligibility::load(&PluginRef::resolve(Kind::Eligibility, plugin, &[]).unwrap(), None).unwrap()
}

#[test]
fn without_a_manifest_nothing_is_asked_and_the_record_says_so() {
    let place = Place::new(MANIFEST, GRANTS);
    let record = ask(&place.config(), None, &mut load("strict"), None, None).unwrap();
    let verdict = "not asked: no eligibility.manifest".to_string();
    assert_eq!(record, EligibilityRecord { verdict, ..Default::default() });
}

#[test]
fn a_grant_overrides_once_and_the_record_says_what() {
    let place = Place::new(MANIFEST, GRANTS);
    let record = place.start("run-1").unwrap();
    assert!(record.training_eligibility_override);
    assert_eq!(record.verdict, "one-run-grant 0.1.0: 1 of 1 blockers overridden");
    assert_eq!(record.substitute_controls, ["names are replaced"]);
    assert_eq!(record.overridden_blockers[0].blocker, "chats/no-consent");
    assert_eq!((record.overridden_blockers[0].grant.as_str(), record.grants[0].operator.as_str()), ("g1", "ops"));
    assert_eq!(record.ledger.as_ref().unwrap().sequence, 1);
    let error = place.start("run-2").unwrap_err();
    assert_eq!(error.code(), "gate::ineligible");
    let says = "chats/no-consent: a participant took it back\n    grant g1 of ops is spent, by run-1";
    assert!(error.message().contains(says), "{error}");
    assert_eq!(Ledger::read(&place.ledger()).unwrap().head().sequence, 1);
}

#[test]
fn with_nothing_against_it_a_run_uses_nothing() {
    let place = Place::new("[[corpus]]\nname = \"chats\"\n", GRANTS);
    let record = place.start("run-1").unwrap();
    assert!(!record.training_eligibility_override && record.grants.is_empty());
    assert_eq!(record.verdict, "one-run-grant 0.1.0: nothing stands against the corpora");
    assert_eq!(record.ledger.unwrap().sequence, 0);
}

#[test]
fn every_grant_for_the_corpus_is_named_with_why_it_does_not_help() {
    let grant = |id: &str, scope: &str, expires: &str| {
        format!("[[grant]]\nid = \"{id}\"\nscope = \"{scope}\"\noperator = \"ops\"\nexpires = {expires}\n")
    };
    let late = "2999-01-01T00:00:00Z";
    let grants = [
        grant("old", "chats", "2020-01-01T00:00:00Z"),
        grant("other", "chats/no-licence", late),
        grant("far", "verse", late),
    ];
    let place = Place::new(MANIFEST, &grants.concat());
    let error = place.ask("one-run-grant", None).unwrap_err();
    for says in [
        "one-run-grant 0.1.0 does not let this run train:\n  chats/no-consent: a participant took it back\n",
        "    grant old of ops expired at 2020-01-01T00:00:00Z\n",
        "    grant other of ops covers chats/no-licence alone\n",
        "    1 of the grants are for other corpora",
    ] {
        assert!(error.message().contains(says), "{says}: {error}");
    }
    place.write("grants.toml", GRANTS);
    let error = place.ask("strict", None).unwrap_err();
    assert!(error.message().ends_with("grant g1 of ops is good, and strict 0.1.0 does not use it"), "{error}");
    place.write("grants.toml", "");
    let error = place.ask("one-run-grant", None).unwrap_err();
    assert!(error.message().ends_with("a participant took it back\n    there is no grant"), "{error}");
}

#[test]
fn of_two_runs_that_were_both_let_through_one_gets_the_use() {
    let place = Place::new(MANIFEST, GRANTS);
    let mut first = place.ask("one-run-grant", None).unwrap();
    let mut second = first.clone();
    place.consume(&mut first, "run-1").unwrap();
    let error = place.consume(&mut second, "run-2").unwrap_err();
    assert_eq!(error.code(), "gate::grant_spent");
    assert!(error.message().contains("grant g1 was used by run-1"), "{error}");
    assert_eq!(second.ledger, None);
    assert_eq!(Ledger::read(&place.ledger()).unwrap().head().sequence, 1);
}

#[test]
fn a_resumed_run_keeps_its_grant_and_uses_it_once() {
    let place = Place::new(MANIFEST, GRANTS);
    let mut record = place.start("run-1").unwrap();
    place.write("grants.toml", &GRANTS.replace("2999", "2020"));
    assert_eq!(place.resume(&record, "run-1").unwrap(), record);
    let before = record.clone();
    place.consume(&mut record, "run-1").unwrap();
    assert_eq!(record, before);
    // Another run cannot go on with it.
    assert_eq!(place.resume(&record, "run-2").unwrap_err().code(), "gate::ledger_behind");
    std::fs::write(place.ledger(), "").unwrap();
    let error = place.resume(&record, "run-1").unwrap_err();
    assert_eq!(error.code(), "gate::ledger_behind");
    assert!(error.message().contains("run run-1 left: its line 1 was "), "{error}");
    std::fs::remove_file(place.ledger()).unwrap();
    assert_eq!(place.resume(&record, "run-1").unwrap_err().code(), "gate::ledger_missing");
}

#[test]
fn a_run_killed_before_it_wrote_the_head_asks_again_for_its_own() {
    let place = Place::new(MANIFEST, GRANTS);
    let mut record = place.ask("one-run-grant", None).unwrap();
    // Before anything was in the ledger, and with its line there but not in provenance.
    for in_ledger in [0, 1] {
        assert_eq!(Ledger::read(&place.ledger()).unwrap().head().sequence, in_ledger);
        assert_eq!(place.resume(&record, "run-1").unwrap_err().code(), "gate::ineligible", "strict is asked");
        let mut again = place.ask("one-run-grant", Some("run-1")).unwrap();
        assert_eq!(again, record);
        place.consume(&mut again, "run-1").unwrap();
        assert_eq!(again.ledger.unwrap().sequence, 1);
    }
    record.ledger = None;
    assert_eq!(place.ask("one-run-grant", Some("run-2")).unwrap_err().code(), "gate::ineligible");
}

#[test]
fn a_ledger_that_lost_what_any_run_saw_is_refused() {
    let place = Place::new(MANIFEST, &GRANTS.replace("2999-01-01T00:00:00Z\n", "2999-01-01T00:00:00Z\nuses = 9\n"));
    place.record("run-1", &place.start("run-1").unwrap());
    place.record("run-2", &place.start("run-2").unwrap());
    place.write("runs/notes.txt", "no run");
    place.write("runs/old/provenance.json", "{\"run_id\": \"old\"}");
    let elsewhere = LedgerHead { path: "/elsewhere".into(), sequence: 7, sha256: "0".into() };
    place.record("run-3", &EligibilityRecord { ledger: Some(elsewhere), ..Default::default() });
    place.ask("one-run-grant", None).unwrap();

    let text = std::fs::read_to_string(place.ledger()).unwrap();
    std::fs::write(place.ledger(), text.split_inclusive('\n').next().unwrap()).unwrap();
    let refused = || {
        let error = place.ask("one-run-grant", None).unwrap_err();
        assert_eq!(error.code(), "gate::ledger_behind");
        assert!(error.message().contains("run run-2 left: its line 2 was "), "{error}");
    };
    refused();
    // Also where the runs lie beside the new one and not under `run.root`.
    std::fs::rename(place.path("runs/run-2"), place.path("run-2")).unwrap();
    place.ask("one-run-grant", None).unwrap();
    std::fs::create_dir(place.path("elsewhere")).unwrap();
    std::fs::rename(place.path("run-2"), place.path("elsewhere/run-2")).unwrap();
    refused();
    // One made anew is not the one that was lost.
    std::fs::remove_file(place.ledger()).unwrap();
    Ledger::create(&place.ledger()).unwrap();
    assert_eq!(place.ask("one-run-grant", None).unwrap_err().code(), "gate::ledger_behind");
    std::fs::write(place.ledger(), text).unwrap();
    place.write("runs/run-1/provenance.json", "{");
    assert_eq!(place.ask("one-run-grant", None).unwrap_err().code(), "run::provenance_broken");
}
