//! Overrides what stands against a corpus where a grant covers it that has not ended and has uses left. A run uses up as
//! few grants as it can: where several things stand against a corpus and a grant covers all of it, they rest on that
//! one. Otherwise a grant for the one blocker comes before one for the whole corpus. Of grants alike, the one that ends
//! first is used, then the first of the list.

use serde::Deserialize;
use tunehost_plugin_sdk::{CaseFile, Eligibility, Plugin, Ruling};

/// The plugin's settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    operators: Option<Vec<String>>,
}

struct OneRunGrant {
    /// Only grants of these count; all do where there is no list.
    operators: Option<Vec<String>>,
}

impl Plugin for OneRunGrant {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "operators": {
      "type": "array", "items": { "type": "string" }, "minItems": 1,
      "description": "Only grants of these operators count; of anyone where it is not given"
    }
  }
}"#;

    fn new(Config { operators }: Config) -> Result<Self, String> {
        match operators {
            Some(operators) if operators.is_empty() => Err("operators must name somebody; leave it out for all".into()),
            operators => Ok(Self { operators }),
        }
    }
}

impl Eligibility for OneRunGrant {
    fn rule(&mut self, case: CaseFile) -> Result<Ruling, String> {
        let mut ruling = Ruling { overridden: Vec::new(), by_grant: Vec::new(), substitute_controls: Vec::new() };
        for (blocker, name) in case.blockers.iter().enumerate() {
            let at = case.blocker_corpora[blocker];
            let corpus = &case.corpora[at as usize];
            let one = self.first_to_end(&case, &format!("{corpus}/{name}"));
            let whole = self.first_to_end(&case, corpus);
            let several = case.blockers.iter().zip(&case.blocker_corpora).any(|(n, &a)| a == at && n != name);
            let Some(grant) = (if several { whole.or(one) } else { one.or(whole) }) else { continue };
            ruling.overridden.push(blocker as u32);
            ruling.by_grant.push(grant as u32);
            let control = &case.grant_controls[grant];
            if !control.is_empty() && !ruling.substitute_controls.contains(control) {
                ruling.substitute_controls.push(control.clone());
            }
        }
        Ok(ruling)
    }
}

impl OneRunGrant {
    /// Of the grants for this scope that are still good, the one that ends first.
    fn first_to_end(&self, case: &CaseFile, scope: &str) -> Option<usize> {
        let counts = |operator| self.operators.as_ref().is_none_or(|operators| operators.contains(operator));
        (0..case.grants.len())
            .filter(|&grant| case.grant_scopes[grant] == scope && counts(&case.grant_operators[grant]))
            .filter(|&grant| case.grant_expiries_ms[grant] > case.wall_clock_ms && case.grant_uses_left[grant] > 0)
            .min_by_key(|&grant| case.grant_expiries_ms[grant])
    }
}

tunehost_plugin_sdk::export_eligibility!(OneRunGrant);

#[cfg(test)]
mod tests;
