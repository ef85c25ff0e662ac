use super::*;

const NOW_MS: u64 = 1_700_000_000_000;

struct Grant {
    scope: &'static str,
    operator: &'static str,
    /// After now.
    ends_ms: i64,
    uses_left: u32,
    control: &'static str,
}

fn grant(scope: &'static str, ends_ms: i64) -> Grant {
    Grant { scope, operator: "ops", ends_ms, uses_left: 1, control: "" }
}

/// The blockers stand against the corpora `chats` (0) and `mail` (1).
fn case(blockers: &[(u32, &str)], grants: &[Grant]) -> CaseFile {
    CaseFile {
        corpora: vec!["chats".into(), "mail".into()],
        licences: vec![String::new(); 2],
        consents: vec![String::new(); 2],
        blockers: blockers.iter().map(|(_, name)| name.to_string()).collect(),
        blocker_corpora: blockers.iter().map(|&(corpus, _)| corpus).collect(),
        blocker_reasons: vec!["because".into(); blockers.len()],
        grants: (0..grants.len()).map(|at| format!("grant-{at}")).collect(),
        grant_scopes: grants.iter().map(|grant| grant.scope.into()).collect(),
        grant_operators: grants.iter().map(|grant| grant.operator.into()).collect(),
        grant_expiries_ms: grants.iter().map(|grant| NOW_MS.saturating_add_signed(grant.ends_ms)).collect(),
        grant_uses_left: grants.iter().map(|grant| grant.uses_left).collect(),
        grant_controls: grants.iter().map(|grant| grant.control.into()).collect(),
        run: "run-001".into(),
        wall_clock_ms: NOW_MS,
    }
}

fn rule_by(operators: Option<&[&str]>, case: CaseFile) -> Ruling {
    let operators = operators.map(|names| names.iter().map(|name| name.to_string()).collect());
    OneRunGrant::new(Config { operators }).unwrap().rule(case).unwrap()
}

/// Each overridden blocker with its grant.
fn pairs(ruling: &Ruling) -> Vec<(u32, u32)> {
    assert_eq!(ruling.overridden.len(), ruling.by_grant.len());
    ruling.overridden.iter().copied().zip(ruling.by_grant.iter().copied()).collect()
}

fn rule(blockers: &[(u32, &str)], grants: &[Grant]) -> Vec<(u32, u32)> {
    pairs(&rule_by(None, case(blockers, grants)))
}

#[test]
fn a_grant_covers_its_corpus_or_its_blocker_and_nothing_else() {
    let blockers = [(0, "no-consent"), (1, "no-licence")];
    assert_eq!(rule(&blockers, &[grant("chats", 1)]), [(0, 0)]);
    assert_eq!(rule(&blockers, &[grant("mail/no-licence", 1)]), [(1, 0)]);
    for scope in ["mail/no-consent", "chats/no-licence", "chats/", "chat", "no-consent", "", "Chats"] {
        assert_eq!(rule(&blockers, &[grant(scope, 1)]), [], "{scope}");
    }
}

#[test]
fn an_ended_or_spent_grant_does_not_count() {
    let blockers = [(0, "no-consent")];
    assert_eq!(rule(&blockers, &[grant("chats", 0)]), [], "it ends now");
    assert_eq!(rule(&blockers, &[grant("chats", -1)]), []);
    assert_eq!(rule(&blockers, &[Grant { uses_left: 0, ..grant("chats", 1) }]), []);
    assert_eq!(rule(&blockers, &[grant("chats/no-consent", 0), grant("chats", 1)]), [(0, 1)]);
}

#[test]
fn the_narrowest_then_the_first_to_end_then_the_first_is_used() {
    let blockers = [(0, "no-consent")];
    assert_eq!(rule(&blockers, &[grant("chats", 1), grant("chats/no-consent", 9)]), [(0, 1)]);
    assert_eq!(rule(&blockers, &[grant("chats", 9), grant("chats", 1), grant("chats", 5)]), [(0, 1)]);
    assert_eq!(rule(&blockers, &[grant("mail", 3), grant("chats", 3), grant("chats", 3)]), [(0, 1)]);
}

#[test]
fn a_run_uses_up_as_few_grants_as_it_can() {
    let two = [(0, "no-consent"), (0, "no-licence")];
    let narrow = || [grant("chats/no-consent", 1), grant("chats/no-licence", 1)];
    assert_eq!(rule(&two, &narrow()), [(0, 0), (1, 1)]);
    let [first, second] = narrow();
    assert_eq!(rule(&two, &[first, second, grant("chats", 9)]), [(0, 2), (1, 2)]);
    let each_its_own = [(0, "no-consent"), (1, "no-consent")];
    let [first, _] = narrow();
    assert_eq!(rule(&each_its_own, &[grant("mail", 1), first, grant("chats", 1)]), [(0, 1), (1, 0)]);
}

#[test]
fn the_controls_of_the_grants_used_are_named_once() {
    let grants = [
        Grant { control: "review by two", ..grant("chats", 1) },
        Grant { control: "review by two", ..grant("mail/no-consent", 1) },
        Grant { control: "not used", ..grant("mail/no-consent", 2) },
        Grant { control: "delete after the run", ..grant("mail/no-licence", 1) },
    ];
    let blockers = [(0, "no-consent"), (0, "no-licence"), (1, "no-consent"), (1, "no-licence")];
    let ruling = rule_by(None, case(&blockers, &grants));
    assert_eq!(pairs(&ruling), [(0, 0), (1, 0), (2, 1), (3, 3)]);
    assert_eq!(ruling.substitute_controls, ["review by two", "delete after the run"]);
    assert!(rule_by(None, case(&[(0, "x")], &[grant("chats", 1)])).substitute_controls.is_empty());
}

#[test]
fn only_grants_of_the_named_operators_count() {
    let case = || case(&[(0, "no-consent")], &[Grant { operator: "sales", ..grant("chats", 1) }, grant("chats", 2)]);
    assert_eq!(pairs(&rule_by(None, case())), [(0, 0)]);
    assert_eq!(pairs(&rule_by(Some(&["legal", "ops"]), case())), [(0, 1)]);
    assert_eq!(pairs(&rule_by(Some(&["legal"]), case())), []);
    assert!(OneRunGrant::new(Config { operators: Some(Vec::new()) }).err().unwrap().contains("operators must name"));
}
