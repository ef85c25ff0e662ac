use super::*;
use crate::config;
use crate::documented::assert_documented;

/// Provenance of a run over small files in `root`, with `lr` and a corpus text.
pub(in crate::run) fn sample(root: &Path, lr: &str, corpus: &str) -> Provenance {
    let text = "name = \"demo\"\nmodel.base = \"base\"\n[data]\nmax_seq_len = 64\n\
                sources = [{ path = \"a.jsonl\", root = \"a\" }]\n";
    fs::create_dir_all(root).unwrap();
    fs::write(root.join("a.toml"), text).unwrap();
    fs::write(root.join("a.jsonl"), corpus).unwrap();
    let resolved = config::load(&root.join("a.toml"), &[format!("train.lr={lr}")], &[]).unwrap();
    let folder = RunFolder::create(&root.join("runs"), "demo").unwrap();
    let plugin = PluginRecord {
        name: "shuffled".into(),
        version: "0.1.0".into(),
        source: "bundled".into(),
        sha256: sha256(b"wasm"),
        limits: None,
    };
    let corpus = FileHash::of(&root.join("a.jsonl")).unwrap();
    let inputs = Inputs {
        base: [("config.json".to_string(), corpus.clone())].into(),
        tokenizer: Some(corpus.clone()),
        template: None,
        corpus_manifest: None,
        adapter: None,
        corpus: vec![corpus],
        plugins: [("sampler".to_string(), plugin)].into(),
    };
    let flex = Implementation { requested: "auto".into(), resolved: "flex".into() };
    Provenance::new(folder.path(), &resolved, inputs, Machine::cpu(2), [("grouped_mm".to_string(), flex)].into())
}

#[test]
fn it_is_read_back_and_updated() {
    let root = tempfile::tempdir().unwrap();
    let mut provenance = sample(root.path(), "0.5", "{}");
    let run = RunFolder::create(root.path(), "demo").unwrap();
    provenance.write(&run).unwrap();
    provenance.resumed(7, Vec::new());
    provenance.outcome = Some(Outcome {
        status: Status::Finished,
        step: 9,
        ended: utc_now(),
        reason: None,
        held_out: [
            ("a".to_string(), HeldOut { before: 6.5, after: 2.5, standard_error: Some(0.125) }),
            ("one".to_string(), HeldOut { before: 6.5, after: 2.5, standard_error: None }),
        ]
        .into(),
        best: Some(BestEvaluation { step: 6, loss: 2.4375 }),
        exported_step: Some(9),
        exports: BTreeMap::new(),
        files: BTreeMap::new(),
    });
    provenance.write(&run).unwrap();
    assert_eq!(Provenance::read(run.path()).unwrap(), provenance);
    assert_eq!(provenance.config["train.lr"].value.as_deref(), Some("0.5"));
    assert_eq!(provenance.config["train.lr"].origin, "--set train.lr=0.5");
    assert_eq!(provenance.config["train.max_steps"].value, None);
    assert_eq!(provenance.resumes[0].from_step, 7);
}

#[test]
fn every_key_that_is_written_is_documented_and_no_other() {
    let root = tempfile::tempdir().unwrap();
    let plain = sample(root.path(), "0.5", "{}");
    let mut full = plain.clone();
    let found = String::new;
    let file = plain.inputs.tokenizer.clone();
    (full.inputs.template, full.inputs.corpus_manifest, full.inputs.adapter, full.order_manifest) =
        (file.clone(), file.clone(), file.clone(), file.clone());
    full.machine.gpus.push(found());
    full.inputs.plugins.get_mut("sampler").unwrap().limits =
        Some(Limits::configured(crate::plugins::Kind::Sampler, &config::PluginsConfig::default()));
    full.machine.environment.insert("TUNEHOST_ISA".into(), "avx2".into());
    full.jit.autotuned.insert("grouped_mm".into(), "tiles of 64".into());
    full.resumed(3, vec![changes::Change { key: "train.lr".into(), was: None, is: None }]);
    full.verdicts.insert("records dropped by the sampler in epoch 0".into(), "r1".into());
    full.gates.insert("kernels".into(), GateRecord { action: Action::Warn, verdict: Verdict::Warned, found: found() });
    full.eligibility = Some(EligibilityRecord {
        overridden_blockers: vec![Overridden { blocker: found(), reason: found(), grant: found() }],
        substitute_controls: vec![found()],
        grants: vec![GrantUse { id: found(), scope: found(), operator: found(), expires: found(), uses: 1 }],
        ledger: Some(LedgerHead { path: found(), sequence: 1, sha256: found() }),
        ..EligibilityRecord::default()
    });
    full.outcome = Some(Outcome {
        status: Status::Finished,
        step: 9,
        ended: utc_now(),
        reason: None,
        held_out: [("a".to_string(), HeldOut { before: 6.5, after: 2.5, standard_error: None })].into(),
        best: Some(BestEvaluation { step: 6, loss: 2.4375 }),
        exported_step: Some(9),
        exports: [("export/adapter/a".into(), file.clone().unwrap())].into(),
        files: [("metrics.jsonl".into(), file.unwrap())].into(),
    });
    let samples = [&plain, &full].map(|sample| serde_json::to_value(sample).unwrap());
    assert_documented(include_str!("../provenance.md"), &samples);
}

#[test]
fn run_ids_differ_and_an_unknown_schema_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let ids = [new_run_id(root.path()), new_run_id(root.path())];
    assert_ne!(ids[0], ids[1]);
    fs::write(root.path().join(PROVENANCE), "{\"schema\": 99}").unwrap();
    let error = Provenance::read(root.path()).unwrap_err();
    assert_eq!(error.code(), "run::provenance_broken");
    assert!(error.message().contains("schema 99"), "{error}");
}
