//! Nothing is overridden: what stands against a corpus stops the run, whatever grants there are.

use serde::Deserialize;
use tunehost_plugin_sdk::{CaseFile, Eligibility, Plugin, Ruling};

/// There is nothing to set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {}

struct Strict;

impl Plugin for Strict {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "properties": {}}"#;

    fn new(Config {}: Config) -> Result<Self, String> {
        Ok(Self)
    }
}

impl Eligibility for Strict {
    fn rule(&mut self, _: CaseFile) -> Result<Ruling, String> {
        Ok(Ruling { overridden: Vec::new(), by_grant: Vec::new(), substitute_controls: Vec::new() })
    }
}

tunehost_plugin_sdk::export_eligibility!(Strict);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_grant_changes_nothing() {
        let case = CaseFile {
            corpora: vec!["chats".into()],
            licences: vec![String::new()],
            consents: vec![String::new()],
            blockers: vec!["no-consent".into()],
            blocker_corpora: vec![0],
            blocker_reasons: vec!["nobody was asked".into()],
            grants: vec!["g1".into()],
            grant_scopes: vec!["chats".into()],
            grant_operators: vec!["ops".into()],
            grant_expiries_ms: vec![u64::MAX],
            grant_uses_left: vec![1],
            grant_controls: vec!["review".into()],
            run: "run-001".into(),
            wall_clock_ms: 0,
        };
        let ruling = Strict.rule(case).unwrap();
        assert!(ruling.overridden.is_empty() && ruling.by_grant.is_empty() && ruling.substitute_controls.is_empty());
    }
}
