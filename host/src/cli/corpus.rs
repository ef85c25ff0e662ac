//! `tunehost corpus`.

use super::advice::by_flags;
use super::{BatchesArgs, InspectArgs, StatsArgs, print};
use crate::config::{self, Config, Overlong, SourceConfig};
use crate::corpus::inspect::{self, Marking};
use crate::corpus::{self, Corpus, EncodeOptions, Encoder};
use crate::error::{Error, Result};
use crate::model::config::TextConfig;
use crate::plugins::{CorpusFilter, Kind, PlanRequest, PluginRef, Sampler, chart, mixture};
use crate::report;
use crate::run::atomic::{self, Existing};
use std::io::IsTerminal;

pub fn batches(args: &BatchesArgs) -> Result<()> {
    let config = args.config.load()?.config;
    let mut sampler =
        Sampler::load(&PluginRef::configured(Kind::Sampler, &config.plugins)?, settings(&config, Kind::Sampler))?;
    let corpus = load(&config)?;
    let (lengths, roots) = corpus.columns();
    let request = PlanRequest::configured(&config, &lengths, &roots, 0);
    let plan = sampler.plan(&request)?;
    let mixture = mixture::Mixture::of(&plan, &request);
    match args.json {
        true => print(&format!("{:#}", mixture.json())),
        false => {
            let table = mixture::table(&[(sampler.identity().name.clone(), mixture)]);
            print(&(table + &chart::chart(&plan, &request, &corpus.roots)))
        }
    }
}

pub fn inspect(args: &InspectArgs) -> Result<()> {
    if let Some(path) = args.html.as_deref().filter(|path| path.exists()) {
        return Err(Error::new("export::exists", format!("{} exists already", path.display())).help("name a new file"));
    }
    let (encoder, sources) = match args.target.extension().is_some_and(|extension| extension == "toml") {
        true => {
            let config = config::load(&args.target, &[], &[])?.config;
            (encoder(&config)?, config.data.sources)
        }
        false => {
            let model = args.model.as_ref().ok_or_else(|| {
                Error::new("usage::no_model", format!("{} is a file of records", args.target.display()))
                    .help("name the model whose tokenizer encodes them: --model DIR")
            })?;
            let encoder = TextConfig::read(model).and_then(|config| {
                Encoder::open(model, Some(&args.template), config.vocab_size, EncodeOptions::default())
            });
            let encoder = encoder.map_err(|e| by_flags(e, "--model DIR"))?;
            (encoder, vec![SourceConfig::new(&args.target, "")])
        }
    };
    let mut records = Vec::new();
    for source in &sources {
        for record in corpus::first_records(&encoder, source, args.n)? {
            match record {
                Ok(record) => records.push(record),
                Err(refused) => warn(&format!("refused, and not trained: {}", refused.message())),
            }
        }
    }
    print("records as their files have them: no filter, cap, weight or length limit is applied")?;
    let tokenizer = encoder.tokenizer().ok();
    if let Some(path) = &args.html {
        let page = inspect::html(tokenizer, &records)?;
        atomic::write(path, page.as_bytes(), Existing::Refuse)?;
        return print(&format!("{} records in {}", records.len(), path.display()));
    }
    // an empty NO_COLOR counts as none
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let marking = if !plain && std::io::stdout().is_terminal() { Marking::Colour } else { Marking::Brackets };
    records.iter().try_for_each(|record| print(&inspect::text(tokenizer, record, marking)?))
}

pub fn stats(args: &StatsArgs) -> Result<()> {
    let mut config = args.config.load()?.config;
    let lengths = if args.lengths.is_empty() { vec![config.data.max_seq_len] } else { args.lengths.clone() };
    config.data.max_seq_len = usize::MAX;
    let corpus = load(&config)?;
    let reports: Vec<_> = match config.data.overlong {
        // where a conversation is split depends on the limit
        Overlong::SplitTurns => {
            let under = |max_seq_len| {
                config.data.max_seq_len = max_seq_len;
                load(&config).map(|corpus| corpus.report)
            };
            lengths.into_iter().map(under).collect::<Result<_>>()?
        }
        overlong => lengths.into_iter().map(|length| corpus.cost_of_limit(length, overlong)).collect(),
    };
    match args.json {
        true => print(&serde_json::to_string_pretty(&reports).expect("numbers and names are JSON")),
        false => print(&format!("{}\n{}", corpus.report.lengths(), corpus::table_of_limits(&reports))),
    }
}

fn warn(text: &str) {
    report::note(format_args!("warning: {text}"));
}

/// Tokenizer and template of `config`.
pub fn encoder(config: &Config) -> Result<Encoder> {
    let vocab_size = TextConfig::read(&config.model.base)?.vocab_size;
    let options = EncodeOptions::of(&config.data, &config.template);
    Encoder::open(&config.model.base, config.data.template.as_deref(), vocab_size, options)
}

pub fn load(config: &Config) -> Result<Corpus> {
    let filter = PluginRef::configured(Kind::CorpusFilter, &config.plugins)?;
    let mut filter = CorpusFilter::load(&filter, settings(config, Kind::CorpusFilter))?;
    let text = TextConfig::read(&config.model.base)?;
    let corpus =
        corpus::load(&config.data, &config.template, &config.model.base, text.vocab_size, &mut filter, &mut |_, _| {})?;
    corpus.warnings.iter().for_each(|warning| warn(warning));
    Ok(corpus)
}

pub fn settings(config: &Config, kind: Kind) -> Option<&serde_json::Value> {
    config.plugins.config.get(kind.config_key())
}
