use super::*;

const NOW_MS: u64 = 1_700_000_000_000;

fn grant(id: &str, scope: &str, expiry_ms: u64, uses_left: u32) -> Grant {
    let (id, scope, operator) = (id.into(), scope.into(), "operator".into());
    Grant { id, scope, operator, expiry_ms, uses_left, control: "no publication".into() }
}

fn case(grants: &[Grant]) -> CaseFile {
    let corpus = |name: &str| CorpusEntry { name: name.into(), ..Default::default() };
    let blocker = |name: &str| Blocker { corpus: 1, name: name.into(), reason: "nobody was asked".into() };
    CaseFile {
        corpora: ["stage", "talk"].map(corpus).into(),
        blockers: ["no-consent", "no-licence"].map(blocker).into(),
        grants: grants.into(),
        run: "run-1".into(),
        wall_clock_ms: NOW_MS,
    }
}

fn rule(name: &str, case: &CaseFile) -> Ruling {
    Eligibility::load(&bundled(Kind::Eligibility, name), None).unwrap().rule(case).unwrap()
}

#[test]
fn strict_overrides_nothing() {
    assert_eq!(rule("strict", &case(&[grant("g", "talk", u64::MAX, 9)])), Ruling::default());
}

#[test]
fn one_run_grant_rests_on_a_grant_that_serves() {
    let spent = grant("spent", "talk/no-consent", u64::MAX, 0);
    let over = grant("over", "talk/no-consent", NOW_MS, 1);
    let elsewhere = grant("elsewhere", "stage", u64::MAX, 1);
    let good = grant("good", "talk/no-consent", NOW_MS + 1, 1);
    let ruling = rule("one-run-grant", &case(&[spent.clone(), over.clone(), elsewhere.clone(), good]));
    assert_eq!(ruling.overridden, [(0, 3)], "the other blocker stands");
    assert_eq!(ruling.substitute_controls, ["no publication"]);
    assert_eq!(rule("one-run-grant", &case(&[spent, over, elsewhere])), Ruling::default());
}

#[test]
fn a_ruling_against_the_rules_is_refused() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-eligibility.wasm");
    let plugin = PluginRef::resolve(Kind::Eligibility, path, &[]).unwrap();
    let case = case(&[
        grant("good", "talk", NOW_MS + 1, 1),
        grant("spent", "talk", u64::MAX, 0),
        grant("over", "talk", NOW_MS, 1),
        grant("elsewhere", "stage/no-consent", u64::MAX, 1),
    ]);
    for (act, parts) in [
        ("unknown-blocker", &["overridden[0] is blocker 2, of 2"][..]),
        ("same-blocker-twice", &["blocker talk/no-consent is overridden twice"]),
        ("unknown-grant", &["talk/no-consent is overridden by grant 4, of 4", "a grant that exists"]),
        ("too-few-grants", &["1 blockers are overridden, by 0 grants"]),
        ("spent-grant", &["by grant \"spent\", which is spent"]),
        ("ended-grant", &["by grant \"over\", which is over"]),
        ("other-scope", &["by grant \"elsewhere\", which covers \"stage/no-consent\""]),
    ] {
        let error = Eligibility::load(&plugin, Some(&json!({ "act": act }))).unwrap().rule(&case).expect_err(act);
        assert_error(&error, "plugin::invalid_ruling", &["plugin hostile-eligibility 0.1.0", "no grant is used up"]);
        assert_error(&error, "plugin::invalid_ruling", parts);
    }
}

#[test]
fn a_scope_is_a_corpus_or_one_of_its_blockers() {
    let covers = |scope: &str| grant("g", scope, 0, 0).covers("talk", "no-consent");
    assert!(covers("talk") && covers("talk/no-consent"));
    for scope in ["", "/", "talk/", "talks", "talk/no", "talk/no-consent/x", "stage/no-consent", "no-consent"] {
        assert!(!covers(scope), "{scope}");
    }
}
