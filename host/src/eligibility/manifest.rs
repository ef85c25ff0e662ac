//! The corpus manifest: the licence and consent of each corpus, and what stands against training on it.

use super::{line_of, name_problem, parse};
use crate::error::{Error, Result};
use crate::hash::{FileHash, sha256};
use crate::plugins::{Blocker, CorpusEntry};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use toml::Spanned;

const INVALID: &str = "corpus::invalid_manifest";

/// A corpus manifest that was read and checked.
#[derive(Debug)]
pub struct Manifest {
    /// The file as it was read.
    pub file: FileHash,
    corpora: Vec<Corpus>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    corpus: Vec<Spanned<Corpus>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Corpus {
    name: String,
    #[serde(default)]
    licence: String,
    #[serde(default)]
    consent: String,
    #[serde(default)]
    blocker: Vec<Spanned<Against>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Against {
    name: String,
    reason: String,
}

impl Manifest {
    /// Reads the manifest at `path`.
    ///
    /// # Errors
    /// `corpus::invalid_manifest`, naming file and line; class `io`.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        let File { corpus: corpora } = parse(path, &text, INVALID)?;
        let at = |start: usize| format!("{}:{}", path.display(), line_of(&text, start));
        let mut lines: HashMap<&str, usize> = HashMap::new();
        for entry in &corpora {
            let (place, corpus) = (at(entry.span().start), entry.get_ref());
            if let Some(problem) = name_problem(&corpus.name) {
                return Err(Error::new(INVALID, format!("{place}: the name of a corpus is {:?}", corpus.name))
                    .expected(format!("the root of a source, {problem}")));
            }
            if let Some(first) = lines.insert(&corpus.name, line_of(&text, entry.span().start)) {
                let message =
                    format!("{place}: corpus {:?} is listed a second time, first in line {first}", corpus.name);
                return Err(Error::new(INVALID, message).expected("each corpus once"));
            }
            let mut names = Vec::new();
            for entry in &corpus.blocker {
                let (place, Against { name, reason }) = (at(entry.span().start), entry.get_ref());
                let blocker = format!("{place}: blocker {name:?} of corpus {:?}", corpus.name);
                if let Some(problem) = name_problem(name) {
                    return Err(Error::new(INVALID, blocker)
                        .expected(format!("a short name such as \"no-consent\", {problem}")));
                }
                if reason.is_empty() {
                    return Err(Error::new(INVALID, format!("{blocker} has no reason")).expected("why it stands there"));
                }
                if names.contains(&name) {
                    return Err(Error::new(INVALID, format!("{blocker} is listed a second time"))
                        .expected("each blocker of a corpus once"));
                }
                names.push(name);
            }
        }
        let file = FileHash { path: path.into(), bytes: text.len() as u64, sha256: sha256(text.as_bytes()) };
        Ok(Self { file, corpora: corpora.into_iter().map(Spanned::into_inner).collect() })
    }

    /// What the manifest says about the corpora `roots`, in that order, and what stands against them. Other corpora are
    /// no part of the case.
    ///
    /// # Errors
    /// `corpus::unlisted` for a root that the manifest does not list.
    pub fn about(&self, roots: &[&str]) -> Result<(Vec<CorpusEntry>, Vec<Blocker>)> {
        let (mut entries, mut blockers) = (Vec::new(), Vec::new());
        for (index, root) in roots.iter().enumerate() {
            let Some(corpus) = self.corpora.iter().find(|corpus| corpus.name == *root) else {
                let manifest = self.file.path.display();
                return Err(Error::new("corpus::unlisted", format!("{manifest}: corpus {root:?} is not listed"))
                    .expected("a [[corpus]] for each root of data.sources")
                    .help("say there what its licence and consent are and what stands against training on it"));
            };
            let Corpus { name, licence, consent, blocker } = corpus;
            entries.push(CorpusEntry { name: name.clone(), licence: licence.clone(), consent: consent.clone() });
            blockers.extend(blocker.iter().map(|entry| {
                let Against { name, reason } = entry.get_ref();
                Blocker { corpus: index, name: name.clone(), reason: reason.clone() }
            }));
        }
        Ok((entries, blockers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[[corpus]]
name = "chats"
licence = "CC-BY-4.0"
consent = "asked in 2026"

[[corpus.blocker]]
name = "no-consent"
reason = "a participant took it back"

[[corpus]]
name = "verse"
"#;

    fn read(text: &str) -> Result<Manifest> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corpora.toml");
        fs::write(&path, text).unwrap();
        Manifest::read(&path)
    }

    #[test]
    fn the_case_holds_the_corpora_of_the_run_alone() {
        let manifest = read(TEXT).unwrap();
        assert_eq!(manifest.file.sha256, sha256(TEXT.as_bytes()));
        let (corpora, blockers) = manifest.about(&["verse", "chats"]).unwrap();
        assert_eq!(corpora[0], CorpusEntry { name: "verse".into(), ..Default::default() });
        assert_eq!((corpora[1].licence.as_str(), corpora[1].consent.as_str()), ("CC-BY-4.0", "asked in 2026"));
        assert_eq!((blockers.len(), blockers[0].corpus, blockers[0].name.as_str()), (1, 1, "no-consent"));
        assert_eq!(blockers[0].reason, "a participant took it back");
        let (corpora, blockers) = manifest.about(&["verse"]).unwrap();
        assert_eq!((corpora.len(), blockers.len()), (1, 0));
        let error = manifest.about(&["verse", "stage"]).unwrap_err();
        assert_eq!(error.code(), "corpus::unlisted");
        assert!(error.message().ends_with("corpora.toml: corpus \"stage\" is not listed"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (more, says) in [
            ("license = \"MIT\"\n", "corpora.toml:13: unknown field `license`"),
            (
                "[[corpus]]\nname = \"chats\"\n",
                "corpora.toml:13: corpus \"chats\" is listed a second time, first in line 2",
            ),
            ("[[corpus]]\nname = \"a/b\"\n", "corpora.toml:13: the name of a corpus is \"a/b\""),
            ("[[corpus]]\nlicence = \"MIT\"\n", "corpora.toml:13: missing field `name`"),
            (
                "blocker = [{ name = \"x\", reason = \"\" }]\n",
                "corpora.toml:13: blocker \"x\" of corpus \"verse\" has no reason",
            ),
            (
                "[[corpus.blocker]]\nname = \"x/y\"\nreason = \"z\"\n",
                "corpora.toml:13: blocker \"x/y\" of corpus \"verse\"",
            ),
            (
                "blocker = [{ name = \"x\", reason = \"y\" }, { name = \"x\", reason = \"z\" }]\n",
                "corpora.toml:13: blocker \"x\" of corpus \"verse\" is listed a second time",
            ),
            ("name = \n", "corpora.toml:13: "),
        ] {
            let error = read(&format!("{TEXT}{more}")).unwrap_err();
            assert_eq!(error.code(), INVALID);
            assert!(error.message().contains(says), "{says}: {error}");
        }
    }
}
