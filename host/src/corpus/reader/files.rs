//! Which files a source's path stands for.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Extensions of files that are read from a folder, without those of a compression.
const FORMATS: [&str; 4] = ["jsonl", "ndjson", "json", "parquet"];
const COMPRESSIONS: [&str; 2] = ["gz", "zst"];

/// The files that `path` stands for, in the order of their names: itself, the readable ones directly in a folder, or what a
/// glob (`*`, `?`, `[...]`, `**`) matches.
///
/// # Errors
/// `corpus::no_files` where there are none, `corpus::bad_glob`, class `io`.
pub fn expand(path: &Path) -> Result<Vec<PathBuf>> {
    let text = path.to_string_lossy();
    if path.is_dir() {
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(|e| Error::io("list", path, e))?;
        let files = entries.into_iter().map(|entry| entry.path()).filter(|file| file.is_file() && is_readable(file));
        let known: Vec<String> = FORMATS.iter().map(|format| format!(".{format}")).collect();
        let expected = format!("files that end in {}, or that and .gz or .zst", known.join(", "));
        return sorted(files, || {
            Error::new("corpus::no_files", format!("{text}: the folder has no file that can be read"))
                .expected(expected)
        });
    }
    if path.exists() || !text.contains(['*', '?', '[']) {
        return Ok(vec![path.into()]);
    }
    let matches = glob::glob(&text)
        .map_err(|e| Error::new("corpus::bad_glob", format!("{text}: column {}: {}", e.pos + 1, e.msg)))?;
    let unreadable = |e: glob::GlobError| {
        let path = e.path().to_path_buf();
        Error::io("list", &path, e.into())
    };
    let matches = matches.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    sorted(matches.into_iter().filter(|file| file.is_file()), || {
        Error::new("corpus::no_files", format!("{text}: no file matches")).expected("one file or more")
    })
}

fn sorted(files: impl Iterator<Item = PathBuf>, none: impl FnOnce() -> Error) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    if files.is_empty() { Err(none()) } else { Ok(files) }
}

/// The file's name without the extensions of a format and of a compression.
pub fn stem(path: &Path) -> String {
    let (name, _) = without_compression(path);
    let name = Path::new(&name);
    name.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether the name says that the file is one JSON document.
pub fn is_json(path: &Path) -> bool {
    let (_, format) = without_compression(path);
    format == "json"
}

/// Whether the name says that the file is Parquet.
pub fn is_parquet(path: &Path) -> bool {
    let (_, format) = without_compression(path);
    format == "parquet"
}

fn is_readable(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    !hidden && FORMATS.contains(&without_compression(path).1.as_str())
}

/// Name and extension, once that of a compression is taken off.
fn without_compression(path: &Path) -> (String, String) {
    let extension = |path: &Path| path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let compressed = COMPRESSIONS.contains(&extension(path).as_str());
    let name = if compressed { path.file_stem() } else { path.file_name() };
    let name = name.unwrap_or_default().to_string_lossy().into_owned();
    let format = extension(Path::new(&name));
    (name, format)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Result<Vec<String>> {
        expand(path).map(|files| files.iter().map(|f| f.file_name().unwrap().to_string_lossy().into_owned()).collect())
    }

    #[test]
    fn folders_and_globs_give_their_files_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.jsonl", "a.jsonl.gz", "c.json.zst", "notes.md", ".hidden.jsonl", "d.txt.gz"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("inner.jsonl")).unwrap();
        assert_eq!(names(folder.path()).unwrap(), ["a.jsonl.gz", "b.jsonl", "c.json.zst"]);
        assert_eq!(names(&folder.path().join("*.jsonl*")).unwrap(), [".hidden.jsonl", "a.jsonl.gz", "b.jsonl"]);
        let code = |path: PathBuf| names(&path).unwrap_err().code();
        assert_eq!(code(folder.path().join("x*.jsonl")), "corpus::no_files");
        assert_eq!(code(folder.path().join("inner.jsonl")), "corpus::no_files");
        assert_eq!(code(folder.path().join("a***.jsonl")), "corpus::bad_glob");
        let missing = folder.path().join("missing.jsonl");
        assert_eq!(expand(&missing).unwrap(), std::slice::from_ref(&missing));
    }

    #[test]
    fn a_stem_is_the_name_without_format_and_compression() {
        for (name, expected) in [("a.jsonl", "a"), ("x/a.b.json.gz", "a.b"), ("a.JSONL.ZST", "a"), ("a", "a")] {
            assert_eq!(stem(Path::new(name)), expected);
        }
    }
}
