//! Properties of an eligibility plugin. The host checks each ruling against the grants as it comes.

use serde_json::Value;

use super::{Outcome, Report};
use crate::plugins::{Blocker, CaseFile, CorpusEntry, Eligibility, Grant, PluginRef, Ruling};

const NOW_MS: u64 = 1_700_000_000_000;

pub fn check(plugin: &PluginRef, config: &Value, report: &mut Report) {
    let subject = Subject { plugin, config };
    report.add("a run that nothing stands against overrides nothing", subject.nothing_to_override());
    report.add("a ruling rests on grants that exist, are good and cover the blocker", subject.rulings().map(drop));
    report.add("two instances rule alike", subject.instances_agree());
    report.add("nothing is remembered from call to call", subject.remembers_nothing());
    report.add("5,000 blockers and 5,000 grants are ruled on within the limits", subject.many());
}

struct Subject<'a> {
    plugin: &'a PluginRef,
    config: &'a Value,
}

impl Subject<'_> {
    fn start(&self) -> Result<Eligibility, String> {
        Eligibility::load(self.plugin, Some(self.config)).map_err(|error| error.to_string())
    }

    fn nothing_to_override(&self) -> Outcome {
        for case in [CaseFile::default(), case(3, 0, &["talk", "verse/no-consent"])] {
            let ruling = rule(&mut self.start()?, &case)?;
            if ruling != Ruling::default() {
                return Err(format!("it answers {ruling:?}"));
            }
        }
        Ok(())
    }

    /// One ruling for each case, whatever it is; a refusal of the plugin's own is an answer too.
    fn rulings(&self) -> Result<Vec<Ruling>, String> {
        let mut eligibility = self.start()?;
        cases().iter().map(|case| rule(&mut eligibility, case)).collect()
    }

    fn instances_agree(&self) -> Outcome {
        same(&self.rulings()?, &self.rulings()?)
    }

    fn remembers_nothing(&self) -> Outcome {
        let mut eligibility = self.start()?;
        let mut forwards = cases().iter().map(|case| rule(&mut eligibility, case)).collect::<Result<Vec<_>, _>>()?;
        let backwards = cases().iter().rev().map(|case| rule(&mut eligibility, case)).collect::<Result<Vec<_>, _>>()?;
        forwards.reverse();
        same(&forwards, &backwards)
    }

    fn many(&self) -> Outcome {
        let scopes: Vec<String> = (0..5000).map(|at| format!("corpus {}", at % 7)).collect();
        let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
        rule(&mut self.start()?, &case(7, 5000, &scopes)).map(drop)
    }
}

fn rule(eligibility: &mut Eligibility, case: &CaseFile) -> Result<Ruling, String> {
    match eligibility.rule(case) {
        Err(error) if error.code() == "plugin::refused" => Ok(Ruling::default()),
        other => other.map_err(|error| error.to_string()),
    }
}

fn same(first: &[Ruling], second: &[Ruling]) -> Outcome {
    match first.iter().zip(second).position(|(first, second)| first != second) {
        None => Ok(()),
        Some(at) => Err(format!("case {at}: {:?} and {:?}", first[at], second[at])),
    }
}

/// Corpora named `corpus N`, blockers spread over them, and a grant for each scope: good, spent, over, in turn.
fn case(corpora: usize, blockers: usize, scopes: &[&str]) -> CaseFile {
    let corpus = |at| CorpusEntry { name: format!("corpus {at}"), licence: "CC-BY-4.0".into(), consent: String::new() };
    let blocker = |at: usize| Blocker {
        corpus: at % corpora.max(1),
        name: format!("blocker-{}", at / corpora.max(1)),
        reason: "the manifest says so".into(),
    };
    let grant = |(at, scope): (usize, &&str)| Grant {
        id: format!("grant-{at}"),
        scope: scope.to_string(),
        operator: ["first", "second"][at % 2].into(),
        expiry_ms: if at % 3 == 1 { NOW_MS } else { NOW_MS + 1 + at as u64 },
        uses_left: if at % 3 == 2 { 0 } else { 1 },
        control: if at % 2 == 0 { format!("control {at}") } else { String::new() },
    };
    CaseFile {
        corpora: (0..corpora).map(corpus).collect(),
        blockers: (0..blockers).map(blocker).collect(),
        grants: scopes.iter().enumerate().map(grant).collect(),
        run: "conformance-1".into(),
        wall_clock_ms: NOW_MS,
    }
}

fn cases() -> Vec<CaseFile> {
    let narrow = "corpus 0/blocker-0";
    vec![
        CaseFile::default(),
        case(1, 1, &[]),
        case(1, 1, &[narrow]),
        case(1, 1, &["corpus 1", narrow, narrow]),
        case(1, 1, &["corpus 0", narrow, "corpus 0", narrow]),
        case(2, 5, &["corpus 0", "corpus 1", narrow, "corpus 1/blocker-0", "", "/", "corpus 0/"]),
        case(3, 9, &["corpus 2/blocker-2", "corpus 9", "corpus 0/blocker-9", "corpus 1"]),
    ]
}
