//! A part of a corpus whose lengths stand for all of it: every row is read, and few are encoded.

use super::load::expand_sources;
use super::reader::Rows;
use super::{Corpus, Record};
use crate::config::DataConfig;
use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use tempfile::TempDir;

/// Rows of the sources of a configuration, spread evenly over them.
#[derive(Debug)]
pub struct Sample {
    /// The same configuration with the sampled rows as its sources, and caps as many times smaller.
    pub config: DataConfig,
    /// Rows in the sample.
    pub rows: u64,
    /// Rows of the sources.
    pub of_rows: u64,
    /// Where the sampled rows lie.
    _folder: TempDir,
}

impl Sample {
    /// About `bytes` of the sources of `config`, as they lie on disk; nothing where they have no more than four times as many. Every
    /// file has a row in it.
    ///
    /// # Errors
    /// Those of reading the files; class `io`.
    pub fn take(config: &DataConfig, bytes: u64) -> Result<Option<Self>> {
        let files_of = expand_sources(config)?;
        let size = |path: &std::path::PathBuf| fs::metadata(path).map_or(0, |file| file.len());
        let all_bytes: u64 = files_of.iter().flatten().map(size).sum();
        if all_bytes <= 4 * bytes {
            return Ok(None);
        }
        let stride = all_bytes.div_ceil(bytes);
        let folder = TempDir::new().map_err(|e| Error::io("create", &std::env::temp_dir(), e))?;
        let (mut sampled, mut rows, mut of_rows) = (config.clone(), 0, 0);
        for (number, (source, paths)) in sampled.sources.iter_mut().zip(files_of).enumerate() {
            let out = folder.path().join(format!("{number}.jsonl"));
            let failed = |e| Error::io("write", &out, e);
            let mut file = BufWriter::new(File::create(&out).map_err(failed)?);
            for path in paths {
                let (taken, read) = each_nth(&path, source, stride, &mut |line| {
                    file.write_all(line).and_then(|()| file.write_all(b"\n")).map_err(failed)
                })?;
                (rows, of_rows) = (rows + taken, of_rows + read);
            }
            file.flush().map_err(failed)?;
            source.path = out;
            source.cap = source.cap.map(|cap| (cap as f64 / stride as f64).ceil() as usize);
        }
        Ok(Some(Self { config: sampled, rows, of_rows, _folder: folder }))
    }

    /// What was loaded of the sample, as many times as rows stand for one of it: records that are the same ones again.
    pub fn spread(&self, mut corpus: Corpus) -> Corpus {
        let factor = self.of_rows as f64 / self.rows.max(1) as f64;
        let spread = |records: &mut Vec<Record>| {
            let count = (records.len() as f64 * factor).round() as usize;
            *records =
                (0..count).map(|i| records[((i as f64 / factor) as usize).min(records.len() - 1)].clone()).collect();
        };
        spread(&mut corpus.train);
        spread(&mut corpus.held_out);
        corpus
    }
}

/// Gives every `stride`th row of the file to `take`, from its first on, each as one line; how many those are, and how many there are.
fn each_nth(
    path: &Path,
    source: &crate::config::SourceConfig,
    stride: u64,
    take: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<(u64, u64)> {
    let (mut taken, mut read) = (0, 0);
    let mut rows = Rows::open(path, &source.columns)?;
    loop {
        let chunk = rows.next_chunk()?;
        if chunk.is_empty() {
            return Ok((taken, read));
        }
        // blank lines are no rows
        for (_, mut row) in chunk.into_iter().filter(|(_, row)| !row.trim_ascii().is_empty()) {
            if read % stride == 0 {
                // Where a row goes over several lines, what ends them stands between JSON's tokens.
                row.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
                take(&row)?;
                taken += 1;
            }
            read += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SourceConfig;
    use serde_json::{Value, json};

    fn config(sources: Vec<SourceConfig>) -> DataConfig {
        serde_json::from_value(json!({"sources": sources, "max_seq_len": 64})).unwrap()
    }

    #[test]
    fn a_sample_is_spread_over_every_file_and_small_corpora_have_none() {
        let folder = tempfile::tempdir().unwrap();
        let row = |i: usize| format!("{{\"text\":\r\n \"{i}\"}}");
        let all: Vec<String> = (0..1000).map(row).collect();
        fs::write(folder.path().join("a.json"), format!("[{}]", all.join(",\n"))).unwrap();
        fs::write(folder.path().join("b.jsonl"), "\n{\"text\": \"alone\"}\n").unwrap();
        let mut source = SourceConfig::new(folder.path(), "root");
        source.cap = Some(500);
        let config = config(vec![source]);
        let bytes = fs::metadata(folder.path().join("a.json")).unwrap().len();
        assert!(Sample::take(&config, bytes / 3).unwrap().is_none());
        let sample = Sample::take(&config, bytes / 20).unwrap().unwrap();
        assert_eq!((sample.rows, sample.of_rows), (49, 1001));
        let source = &sample.config.sources[0];
        assert_eq!((source.cap, &*source.root), (Some(24), "root"));
        let text = fs::read_to_string(&source.path).unwrap();
        let found: Vec<Value> =
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["text"].clone()).collect();
        assert_eq!(found[..2], ["0", "21"]);
        assert_eq!(found[47..], ["987", "alone"]);
    }
}
