//! Plugins of the kind `eligibility`.

use super::reference::{Identity, PluginRef};
use super::runtime::{Plugin, shown};
use super::since_v0_1_0::ruling;
use crate::error::{Error, Result};

/// What a run asks to train on, what stands against it, and what was granted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CaseFile {
    /// The corpora of the run.
    pub corpora: Vec<CorpusEntry>,
    /// What stands against them.
    pub blockers: Vec<Blocker>,
    /// The grants that exist.
    pub grants: Vec<Grant>,
    /// The run that asks.
    pub run: String,
    /// Milliseconds since 1970-01-01 UTC.
    pub wall_clock_ms: u64,
}

/// A corpus as its manifest describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CorpusEntry {
    /// Unique in the case file.
    pub name: String,
    /// Empty where the manifest says none.
    pub licence: String,
    /// Empty where the manifest says none.
    pub consent: String,
}

/// Something that stands against training on a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// Index into [`CaseFile::corpora`].
    pub corpus: usize,
    /// A short name such as `no-consent`, unique for its corpus.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// A permission that somebody gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Unique.
    pub id: String,
    /// `corpus` or `corpus/blocker`.
    pub scope: String,
    /// Who gave it.
    pub operator: String,
    /// When it ends, milliseconds since 1970-01-01 UTC.
    pub expiry_ms: u64,
    /// Runs that it is still good for.
    pub uses_left: u32,
    /// What must be done in place of what it overrides; empty where nothing.
    pub control: String,
}

impl Grant {
    /// Whether its scope holds the blocker `blocker` of the corpus `corpus`.
    pub fn covers(&self, corpus: &str, blocker: &str) -> bool {
        self.scope == corpus || self.scope.split_once('/') == Some((corpus, blocker))
    }
}

/// A plugin's decision. A blocker that is not overridden stops the run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ruling {
    /// Each overridden blocker and the grant it rests on, as indices into the case file.
    pub overridden: Vec<(usize, usize)>,
    /// What is done in place of what was overridden.
    pub substitute_controls: Vec<String>,
}

/// A running eligibility plugin.
pub struct Eligibility {
    plugin: Plugin<ruling::Guest>,
}

impl Eligibility {
    /// Start the plugin with its settings, `[plugins.config.eligibility]`.
    ///
    /// # Errors
    /// `plugin::config_refused`, `plugin::wrong_contract`, and those of a failed call.
    pub fn load(reference: &PluginRef, config: Option<&serde_json::Value>) -> Result<Self> {
        let plugin = Plugin::load(reference, config, |component, store, instance| {
            ruling::GuestIndices::new(component)?.load(store, instance)
        })?;
        Ok(Self { plugin })
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        self.plugin.identity()
    }

    /// Rule on a run. The ruling that comes back rests on grants that exist, are good and cover what they override.
    ///
    /// # Errors
    /// `plugin::refused`, `plugin::invalid_ruling` naming the blocker and the grant, and those of a failed call.
    pub fn rule(&mut self, case: &CaseFile) -> Result<Ruling> {
        fn texts<T>(items: &[T], of: impl Fn(&T) -> &str) -> Vec<&str> {
            items.iter().map(of).collect()
        }
        let CaseFile { corpora, blockers, grants, run, wall_clock_ms } = case;
        let columns = ruling::CaseFile {
            corpora: &texts(corpora, |c| &c.name),
            licences: &texts(corpora, |c| &c.licence),
            consents: &texts(corpora, |c| &c.consent),
            blockers: &texts(blockers, |b| &b.name),
            blocker_corpora: &blockers.iter().map(|b| b.corpus as u32).collect::<Vec<_>>(),
            blocker_reasons: &texts(blockers, |b| &b.reason),
            grants: &texts(grants, |g| &g.id),
            grant_scopes: &texts(grants, |g| &g.scope),
            grant_operators: &texts(grants, |g| &g.operator),
            grant_expiries_ms: &grants.iter().map(|g| g.expiry_ms).collect::<Vec<_>>(),
            grant_uses_left: &grants.iter().map(|g| g.uses_left).collect::<Vec<_>>(),
            grant_controls: &texts(grants, |g| &g.control),
            run,
            wall_clock_ms: *wall_clock_ms,
        };
        let answer = self.plugin.call("rule", |functions, store| functions.call_rule(store, columns))?;
        checked(answer, case, self.plugin.identity())
    }
}

fn checked(answer: ruling::Decision, case: &CaseFile, identity: &Identity) -> Result<Ruling> {
    let invalid = |what: String, expected: &str| {
        Error::new("plugin::invalid_ruling", format!("{identity}: rule: {what}"))
            .expected(expected)
            .help("nothing is overridden and no grant is used up; this is a bug in the plugin: tell its author")
    };
    let ruling::Decision { overridden, by_grant, substitute_controls } = answer;
    if overridden.len() != by_grant.len() {
        let what = format!("{} blockers are overridden, by {} grants", overridden.len(), by_grant.len());
        return Err(invalid(what, "one grant for each of them"));
    }
    let mut seen = vec![false; case.blockers.len()];
    let mut pairs = Vec::with_capacity(overridden.len());
    for (at, (&blocker, &grant)) in overridden.iter().zip(&by_grant).enumerate() {
        let Some(Blocker { corpus, name, .. }) = case.blockers.get(blocker as usize) else {
            let what = format!("overridden[{at}] is blocker {blocker}, of {}", case.blockers.len());
            return Err(invalid(what, "a blocker of the case file"));
        };
        let corpus = &case.corpora[*corpus].name;
        if std::mem::replace(&mut seen[blocker as usize], true) {
            return Err(invalid(format!("blocker {corpus}/{name} is overridden twice"), "each blocker at most once"));
        }
        let Some(granted) = case.grants.get(grant as usize) else {
            let what = format!("blocker {corpus}/{name} is overridden by grant {grant}, of {}", case.grants.len());
            return Err(invalid(what, "a grant that exists"));
        };
        let wrong = |what: String, expected: &str| {
            invalid(format!("blocker {corpus}/{name} is overridden by grant {:?}, {what}", granted.id), expected)
        };
        if granted.uses_left == 0 {
            return Err(wrong("which is spent".into(), "a grant with a use left"));
        }
        if granted.expiry_ms <= case.wall_clock_ms {
            return Err(wrong("which is over".into(), "a grant that has not expired"));
        }
        if !granted.covers(corpus, name) {
            return Err(wrong(format!("which covers {:?}", granted.scope), "a grant that covers the blocker"));
        }
        pairs.push((blocker as usize, grant as usize));
    }
    let substitute_controls = substitute_controls.iter().map(|control| shown(control)).collect();
    Ok(Ruling { overridden: pairs, substitute_controls })
}
