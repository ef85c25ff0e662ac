//! Grants: a TOML file in which operators permit what stands against a corpus, each for a number of runs and until a time.

use super::ledger::Ledger;
use super::{line_of, name_problem, parse};
use crate::error::{Error, Result};
use crate::plugins::Grant;
use crate::run::clock::unix_ms;
use serde::Deserialize;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use toml::Spanned;
use toml::value::Datetime;

const INVALID: &str = "gate::invalid_grants";

/// One permission as its operator wrote it.
#[derive(Debug, Clone, PartialEq)]
pub struct GrantEntry {
    /// Unique in the file.
    pub id: String,
    /// What it covers: `corpus` or `corpus/blocker`.
    pub scope: String,
    /// Who gave it.
    pub operator: String,
    /// When it ends, as it was written.
    pub expires: String,
    /// When it ends, milliseconds since 1970-01-01 UTC.
    pub expiry_ms: u64,
    /// Runs that it is good for.
    pub uses: u32,
    /// What must be done in place of what it overrides; empty where nothing.
    pub control: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    grant: Vec<Spanned<Written>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    id: String,
    scope: String,
    operator: String,
    expires: Datetime,
    #[serde(default = "one")]
    uses: u32,
    #[serde(default)]
    control: String,
}

fn one() -> u32 {
    1
}

/// Reads the grants at `path`; a file without any is one.
///
/// # Errors
/// `gate::invalid_grants`, naming file, line and grant; class `io`.
pub fn read(path: &Path) -> Result<Vec<GrantEntry>> {
    let text = fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let File { grant: written } = parse(path, &text, INVALID)?;
    let mut grants: Vec<GrantEntry> = Vec::new();
    for entry in written {
        let line = line_of(&text, entry.span().start);
        let Written { id, scope, operator, expires, uses, control } = entry.into_inner();
        let wrong = |what: String, expected: &str| {
            Err(Error::new(INVALID, format!("{}:{line}: grant {id:?}{what}", path.display())).expected(expected))
        };
        if id.is_empty() {
            return wrong(" has no name".into(), "an id of its own");
        }
        if grants.iter().any(|earlier| earlier.id == id) {
            return wrong(" is given a second time".into(), "each id once, also long after it was used");
        }
        let (corpus, blocker) = scope.split_once('/').map_or((scope.as_str(), None), |(c, b)| (c, Some(b)));
        if name_problem(corpus).is_some() || blocker.is_some_and(|blocker| name_problem(blocker).is_some()) {
            return wrong(format!(": `scope` is {scope:?}"), "\"corpus\" or \"corpus/blocker\"");
        }
        if operator.is_empty() {
            return wrong(": `operator` is empty".into(), "who gives it");
        }
        if uses == 0 {
            return wrong(": `uses` is 0".into(), "1 run or more");
        }
        let Some(expiry_ms) = unix_ms(&expires.to_string()) else {
            let expected = "a date and time with its offset from UTC, such as 2026-12-31T18:00:00Z";
            return wrong(format!(": `expires` is {expires}"), expected);
        };
        grants.push(GrantEntry { id, scope, operator, expires: expires.to_string(), expiry_ms, uses, control });
    }
    Ok(grants)
}

impl GrantEntry {
    /// The grant as a plugin sees it. What the run `own` has used counts as not used.
    pub fn left_by(&self, ledger: &Ledger, own: Option<&str>) -> Grant {
        let used = ledger.uses_of(&self.id).filter(|entry| Some(entry.run.as_str()) != own).count();
        let Self { id, scope, operator, expiry_ms, uses, control, .. } = self.clone();
        let uses_left = uses.saturating_sub(used as u32);
        Grant { id, scope, operator, expiry_ms, uses_left, control }
    }
}

/// The grants as aligned columns with a heading, each with the runs that used it.
pub fn table(grants: &[GrantEntry], ledger: &Ledger) -> String {
    let heading = ["GRANT", "SCOPE", "OPERATOR", "EXPIRES", "LEFT", "USED BY"].map(String::from);
    let row = |grant: &GrantEntry| {
        let runs: Vec<&str> = ledger.uses_of(&grant.id).map(|entry| entry.run.as_str()).collect();
        let left = format!("{} of {}", grant.left_by(ledger, None).uses_left, grant.uses);
        let runs = if runs.is_empty() { "-".into() } else { runs.join(", ") };
        let GrantEntry { id, scope, operator, expires, .. } = grant.clone();
        [id, scope, operator, expires, left, runs]
    };
    let rows: Vec<_> = std::iter::once(heading).chain(grants.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        for (cell, width) in row.iter().zip(widths) {
            write!(text, "{cell:width$}  ").expect("writing to a String");
        }
        text += &row[5];
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[[grant]]
id = "g1"
scope = "chats/no-consent"
operator = "ops"
expires = 2026-12-31T18:00:00+01:30

[[grant]]
id = "g2"
scope = "chats"
operator = "legal"
expires = 1969-01-01 00:00:00.25Z
uses = 3
control = "a person reads every tenth record"
"#;

    fn read_text(text: &str) -> Result<Vec<GrantEntry>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grants.toml");
        fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn a_grant_is_good_for_one_run_unless_it_says_more() {
        let grants = read_text(TEXT).unwrap();
        assert_eq!((grants[0].uses, grants[1].uses), (1, 3));
        assert_eq!((grants[0].control.as_str(), grants[0].expires.as_str()), ("", "2026-12-31T18:00:00+01:30"));
        assert_eq!((grants[0].expiry_ms, grants[1].expiry_ms), (1_798_734_600_000, 0));
        assert_eq!(read_text("").unwrap(), []);
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_grant() {
        for (was, is, says) in [
            ("uses = 3", "uses = 0", "grants.toml:8: grant \"g2\": `uses` is 0"),
            ("uses = 3", "use = 3", "grants.toml:13: unknown field `use`"),
            ("id = \"g2\"", "id = \"g1\"", "grants.toml:8: grant \"g1\" is given a second time"),
            ("id = \"g2\"", "id = \"\"", "grants.toml:8: grant \"\" has no name"),
            ("operator = \"ops\"", "operator = \"\"", "grants.toml:2: grant \"g1\": `operator` is empty"),
            ("operator = \"ops\"\n", "", "grants.toml:2: missing field `operator`"),
            ("\"chats/no-consent\"", "\"chats/\"", "grants.toml:2: grant \"g1\": `scope` is \"chats/\""),
            ("\"chats/no-consent\"", "\"a/b/c\"", "grants.toml:2: grant \"g1\": `scope` is \"a/b/c\""),
            ("+01:30", "", "grants.toml:2: grant \"g1\": `expires` is 2026-12-31T18:00:00"),
            ("2026-12-31T18:00:00+01:30", "\"tomorrow\"", "grants.toml:6: "),
        ] {
            assert!(TEXT.contains(was));
            let error = read_text(&TEXT.replacen(was, is, 1)).unwrap_err();
            assert_eq!(error.code(), INVALID);
            assert!(error.message().contains(says), "{says}: {error}");
        }
    }

    #[test]
    fn the_table_says_what_is_left_and_who_used_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grants.ledger.jsonl");
        Ledger::create(&path).unwrap();
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.append("run-1", &[("g1", vec!["chats/no-consent".into()]), ("g2", vec!["chats/x".into()])]).unwrap();
        let grants = read_text(TEXT).unwrap();
        let table = table(&grants, &ledger);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "GRANT  SCOPE             OPERATOR  EXPIRES                    LEFT    USED BY");
        assert_eq!(lines[1], "g1     chats/no-consent  ops       2026-12-31T18:00:00+01:30  0 of 1  run-1");
        assert!(lines[2].ends_with("2 of 3  run-1"), "{table}");
        assert_eq!(grants[0].left_by(&ledger, Some("run-1")).uses_left, 1);
        assert_eq!(grants[0].left_by(&ledger, Some("run-2")).uses_left, 0);
    }
}
