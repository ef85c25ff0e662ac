//! Properties of a corpus filter. The host checks each answer against the rules of `wit/corpus-filter.wit` as it comes.

use std::path::Path;

use serde_json::Value;

use super::inputs::{self, Record};
use super::{Outcome, Report};
use crate::corpus;
use crate::plugins::{CorpusFilter, PluginRef, Verdict};

const MANY: usize = 50_000;
/// Records in a chunk of the host's own reader, at most.
const CHUNK: usize = 4096;

pub fn check(plugin: &PluginRef, config: &Value, report: &mut Report) {
    let subject = Subject { plugin, config };
    report.add("an empty chunk has no answers", subject.empty());
    report.add("records of every shape are answered", subject.judge(&inputs::records(600), CHUNK).map(drop));
    report.add("two instances give the same answers", subject.instances_agree());
    report.add("how the corpus is cut into chunks changes no answer", subject.chunks_do_not_matter());
    report.add("a corpus that starts anew has the same answers", subject.starts_anew());
    report.add("what replaces a record can be trained", subject.replacements());
    report.add("50,000 records are answered within the limits", subject.judge(&inputs::records(MANY), CHUNK).map(drop));
}

struct Subject<'a> {
    plugin: &'a PluginRef,
    config: &'a Value,
}

impl Subject<'_> {
    fn start(&self) -> Result<CorpusFilter, String> {
        CorpusFilter::load(self.plugin, Some(self.config)).map_err(|error| error.to_string())
    }

    fn judge(&self, records: &[Record], chunk: usize) -> Result<Vec<Verdict>, String> {
        judge(&mut self.start()?, records, chunk)
    }

    fn empty(&self) -> Outcome {
        self.start()?.filter(0, &[]).map(drop).map_err(|error| error.to_string())
    }

    fn instances_agree(&self) -> Outcome {
        let records = inputs::records(600);
        same(&records, &self.judge(&records, CHUNK)?, &self.judge(&records, CHUNK)?)
    }

    fn chunks_do_not_matter(&self) -> Outcome {
        let records = inputs::records(600);
        let whole = self.judge(&records, CHUNK)?;
        for chunk in [1, 7, 100] {
            let cut = self.judge(&records, chunk)?;
            same(&records, &whole, &cut).map_err(|why| format!("in chunks of {chunk} and in one: {why}"))?;
        }
        Ok(())
    }

    fn starts_anew(&self) -> Outcome {
        let (mut filter, records) = (self.start()?, inputs::records(600));
        same(&records, &judge(&mut filter, &records, 100)?, &judge(&mut filter, &records, 100)?)
    }

    fn replacements(&self) -> Outcome {
        for (at, verdict) in self.judge(&inputs::records(600), CHUNK)?.iter().enumerate() {
            if let Verdict::Replace(record) = verdict {
                corpus::check_record(Path::new("replacement"), at as u64 + 1, record).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }
}

fn judge(filter: &mut CorpusFilter, records: &[Record], chunk: usize) -> Result<Vec<Verdict>, String> {
    let candidates: Vec<_> = records.iter().map(Record::candidate).collect();
    let mut verdicts = Vec::with_capacity(records.len());
    for chunk in candidates.chunks(chunk) {
        verdicts.extend(filter.filter(verdicts.len() as u64, chunk).map_err(|error| error.to_string())?);
    }
    Ok(verdicts)
}

fn same(records: &[Record], first: &[Verdict], second: &[Verdict]) -> Outcome {
    match first.iter().zip(second).position(|(first, second)| first != second) {
        None => Ok(()),
        Some(at) => Err(format!("record {:?}: {:?} and {:?}", records[at].id, first[at], second[at])),
    }
}
