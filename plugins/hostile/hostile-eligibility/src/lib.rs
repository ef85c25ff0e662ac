//! An eligibility policy that misbehaves as its setting `act` says. Where it can, it starts from the first blocker resting
//! on the first grant and spoils one thing; where nothing stands against a corpus it overrides nothing.

use serde::Deserialize;
use tunehost_plugin_sdk::{CaseFile, Eligibility, Plugin, Ruling};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    act: Act,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum Act {
    // Columns.
    UnknownBlocker,
    SameBlockerTwice,
    UnknownGrant,
    TooFewGrants,
    // A grant that does not bear it, where the case file has one.
    SpentGrant,
    EndedGrant,
    OtherScope,
}

struct Hostile {
    act: Act,
}

impl Plugin for Hostile {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "required": ["act"], "properties": {"act": {"type": "string"}}}"#;

    fn new(Config { act }: Config) -> Result<Self, String> {
        Ok(Self { act })
    }
}

impl Eligibility for Hostile {
    fn rule(&mut self, case: CaseFile) -> Result<Ruling, String> {
        let mut ruling = Ruling { overridden: vec![0], by_grant: vec![0], substitute_controls: Vec::new() };
        if case.blockers.is_empty() {
            ruling.overridden.clear();
            ruling.by_grant.clear();
            return Ok(ruling);
        }
        match self.act {
            Act::UnknownBlocker => ruling.overridden[0] = case.blockers.len() as u32,
            Act::SameBlockerTwice => {
                ruling.overridden.push(0);
                ruling.by_grant.push(0);
            }
            Act::UnknownGrant => ruling.by_grant[0] = case.grants.len() as u32,
            Act::TooFewGrants => ruling.by_grant.clear(),
            Act::SpentGrant => ruling.by_grant[0] = find(&case, |grant| case.grant_uses_left[grant] == 0)?,
            Act::EndedGrant => {
                ruling.by_grant[0] = find(&case, |grant| case.grant_expiries_ms[grant] <= case.wall_clock_ms)?;
            }
            Act::OtherScope => {
                let corpus = &case.corpora[case.blocker_corpora[0] as usize];
                let scopes = [corpus.clone(), format!("{corpus}/{}", case.blockers[0])];
                ruling.by_grant[0] = find(&case, |grant| !scopes.contains(&case.grant_scopes[grant]))?;
            }
        }
        Ok(ruling)
    }
}

fn find(case: &CaseFile, is_meant: impl Fn(usize) -> bool) -> Result<u32, String> {
    let found = (0..case.grants.len()).find(|&grant| is_meant(grant));
    found.map(|grant| grant as u32).ok_or_else(|| "no grant to misuse".into())
}

tunehost_plugin_sdk::export_eligibility!(Hostile);
