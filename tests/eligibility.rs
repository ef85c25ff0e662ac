//! What stands against a corpus stops a run, a grant lets one run through, and the ledger remembers it.

mod common;

use common::{fails, ok, root};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const GRANT: &str = r#"
[[grant]]
id = "g1"
scope = "chats/no-consent"
operator = "ops"
expires = 2999-01-01T00:00:00Z
control = "names are replaced"
"#;

/// A run of two steps on a corpus that something stands against.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap() };
        let fixtures = root().join("tests/fixtures");
        let fixtures = fixtures.display();
        let records: Vec<String> =
            (0..12).map(|i| format!(r#"{{"id": "r{i}", "text": "Record {i} of a dozen."}}"#)).collect();
        case.write("chats.jsonl", &records.join("\n"));
        let manifest = "[[corpus]]\nname = \"chats\"\nlicence = \"own\"\nconsent = \"none\"\n\
                        [[corpus.blocker]]\nname = \"no-consent\"\nreason = \"nobody was asked\"\n";
        case.write("corpora.toml", manifest);
        case.write("grants.toml", "");
        let text = format!(
            r#"
name = "demo"
model.base = "{fixtures}/tiny-base"
run.root = "runs"
[data]
max_seq_len = 64
sources = [{{ path = "chats.jsonl", root = "chats" }}]
[train]
max_steps = 2
micro_batch = 1
accumulation = 2
[plugins]
eligibility = "one-run-grant"
[eligibility]
manifest = "corpora.toml"
grants = "grants.toml"
[eval]
max_records_per_root = 0
[export]
merged = false
"#
        );
        case.write("demo.toml", &text);
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().into()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn run_ok(&self) -> String {
        ok(&["run", &self.text("demo.toml")])
    }

    fn run_fails(&self, exit: i32, code: &str) -> String {
        let said = fails(&["run", &self.text("demo.toml")], exit);
        assert!(said.contains(code), "{code}: {said}");
        said
    }

    fn resume_fails(&self, exit: i32, code: &str) {
        let said = fails(&["resume", &self.text("runs/demo-001")], exit);
        assert!(said.contains(code), "{code}: {said}");
    }

    fn runs(&self) -> usize {
        fs::read_dir(self.path("runs")).map_or(0, Iterator::count)
    }
}

fn provenance(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("provenance.json")).unwrap()).unwrap()
}

#[test]
fn a_grant_lets_one_run_through() {
    let case = Case::new();
    let grants = case.text("grants.toml");
    case.run_fails(7, "gate::ledger_missing");
    ok(&["grants", "open", &grants]);
    let said = fails(&["grants", "open", &grants], 7);
    assert!(said.contains("gate::ledger_exists"), "{said}");

    // Nothing is loaded: the base need not even be there.
    let elsewhere = "model.base=no-such-base";
    let said = fails(&["run", &case.text("demo.toml"), "--set", elsewhere], 7);
    assert!(said.contains("gate::ineligible") && said.contains("there is no grant"), "{said}");
    let said = case.run_fails(7, "gate::ineligible");
    assert!(said.contains("chats/no-consent: nobody was asked"), "{said}");
    assert_eq!(case.runs(), 0, "a blocked run leaves no folder");
    for command in [&["probe", "adapters"][..], &["probe", "determinism"], &["profile"], &["bench"]] {
        let said = fails(&[command, &[&case.text("demo.toml")[..]]].concat(), 7);
        assert!(said.contains("gate::ineligible"), "{command:?}: {said}");
    }

    case.write("grants.toml", GRANT);
    // What is measured and not kept uses no grant.
    ok(&["probe", "adapters", &case.text("demo.toml")]);
    // As a crash left it: no run trained on that.
    let torn = "{\"sequence\":1,\"prev";
    case.write("grants.ledger.jsonl", torn);
    let said = case.run_ok();
    assert!(said.contains("eligibility one-run-grant 0.1.0: 1 of 1 blockers overridden"), "{said}");
    let run = case.path("runs/demo-001");
    let stands = provenance(&run);
    let eligibility = &stands["eligibility"];
    assert_eq!(eligibility["training_eligibility_override"], true);
    assert_eq!(eligibility["overridden_blockers"][0]["blocker"], "chats/no-consent");
    assert_eq!(eligibility["substitute_controls"], serde_json::json!(["names are replaced"]));
    assert_eq!(eligibility["grants"][0]["id"], "g1");
    assert_eq!(fs::read_to_string(case.path("grants.ledger.torn")).unwrap(), torn);
    let ledger = fs::read_to_string(case.path("grants.ledger.jsonl")).unwrap();
    let line: Value = serde_json::from_str(&ledger).unwrap();
    assert_eq!((&line["run"], &line["grant"]), (&stands["run_id"], &Value::from("g1")));
    assert_eq!((&line["sha256"], &line["sequence"]), (&eligibility["ledger"]["sha256"], &Value::from(1)));
    assert_eq!(stands["inputs"]["corpus_manifest"]["sha256"].as_str().unwrap().len(), 64);

    // Spent: not for another run, but for its own.
    let said = case.run_fails(7, "gate::ineligible");
    assert!(said.contains("grant g1 of ops is spent, by demo-001-"), "{said}");
    let shown = ok(&["grants", "show", &grants]);
    assert!(shown.contains("0 of 1") && shown.contains("demo-001-"), "{shown}");
    ok(&["resume", run.to_str().unwrap()]);
    assert_eq!(fs::read_to_string(case.path("grants.ledger.jsonl")).unwrap(), ledger, "a resume uses nothing");
    assert_eq!(&provenance(&run)["eligibility"], eligibility);
    assert_eq!(case.runs(), 1);
}

#[test]
fn a_ledger_that_is_not_what_the_run_left_is_refused() {
    let case = Case::new();
    case.write("grants.toml", &GRANT.replace("control", "uses = 5\ncontrol"));
    ok(&["grants", "open", &case.text("grants.toml")]);
    case.run_ok();
    let ledger = fs::read_to_string(case.path("grants.ledger.jsonl")).unwrap();
    for (text, code) in [
        (ledger.replace("demo-001", "demo-002"), "gate::ledger_broken"),
        // A line that a run saw whole is no half-written one.
        (ledger.trim_end().into(), "gate::ledger_behind"),
        (String::new(), "gate::ledger_behind"),
    ] {
        case.write("grants.ledger.jsonl", &text);
        case.run_fails(7, code);
        case.resume_fails(7, code);
    }
    fs::remove_file(case.path("grants.ledger.jsonl")).unwrap();
    case.run_fails(7, "gate::ledger_missing");
    case.resume_fails(7, "gate::ledger_missing");
    assert_eq!(case.runs(), 1);
    case.write("grants.ledger.jsonl", &ledger);

    // The manifest is an input; the grants are not.
    case.write("grants.toml", "");
    ok(&["resume", &case.text("runs/demo-001")]);
    let manifest = fs::read_to_string(case.path("corpora.toml")).unwrap();
    case.write("corpora.toml", &manifest.replace("nobody was asked", "somebody said no"));
    case.resume_fails(6, "corpus-manifest: was ");
    let said = fails(&["resume", &case.text("runs/demo-001"), "--allow", "corpus-manifest"], 6);
    assert!(said.contains("(--allow cannot help: what stands against the corpora was ruled on by it)"), "{said}");
    case.write("corpora.toml", &manifest.replace("\"chats\"", "\"chat\""));
    let said = case.run_fails(3, "corpus::unlisted");
    assert!(said.contains("corpus \"chats\" is not listed"), "{said}");
}

#[test]
fn without_a_manifest_nothing_is_asked_and_nothing_stands_unused() {
    let case = Case::new();
    let text = fs::read_to_string(case.path("demo.toml")).unwrap();
    let unasked = text.replace("manifest = \"corpora.toml\"\n", "");
    let ungranted = unasked.replace("grants = \"grants.toml\"\n", "");
    case.write("demo.toml", &ungranted);
    let said = case.run_fails(2, "config::invalid_value");
    assert!(said.contains("`plugins.eligibility`") && said.contains("eligibility.manifest"), "{said}");
    case.write("demo.toml", &unasked.replace("one-run-grant", "strict"));
    let said = case.run_fails(2, "config::invalid_value");
    assert!(said.contains("`eligibility.grants`"), "{said}");

    case.write("demo.toml", &ungranted.replace("one-run-grant", "strict"));
    case.run_ok();
    let stands = &provenance(&case.path("runs/demo-001"))["eligibility"];
    assert_eq!(stands["verdict"], "not asked: no eligibility.manifest");
    assert_eq!(stands["training_eligibility_override"], false);

    // The default plugin overrides nothing, whatever is granted.
    case.write("demo.toml", &text.replace("one-run-grant", "strict"));
    case.write("grants.toml", GRANT);
    ok(&["grants", "open", &case.text("grants.toml")]);
    let said = case.run_fails(7, "gate::ineligible");
    assert!(said.contains("grant g1 of ops is good, and strict 0.1.0 does not use it"), "{said}");
    assert!(ok(&["grants", "show", &case.text("grants.toml")]).contains("1 of 1"));
}
