//! `tunehost corpus`.

use super::{BatchesArgs, print};
use crate::config;
use crate::corpus;
use crate::error::Result;
use crate::model::config::TextConfig;
use crate::plugins::{CorpusFilter, Kind, PlanRequest, PluginRef, Sampler, mixture};

pub fn batches(args: &BatchesArgs) -> Result<()> {
    let config = config::load(&args.config.config, &args.config.sets, &args.config.plugins)?.config;
    let plugins = &config.plugins;
    let find = |kind| PluginRef::configured(kind, plugins);
    let settings = |kind: Kind| plugins.config.get(kind.config_key());
    let mut sampler = Sampler::load(&find(Kind::Sampler)?, settings(Kind::Sampler))?;
    let mut filter = CorpusFilter::load(&find(Kind::CorpusFilter)?, settings(Kind::CorpusFilter))?;
    let text = TextConfig::read(&config.model.base)?;
    let corpus = corpus::load(&config.data, &config.model.base, text.vocab_size, &mut filter)?;
    let (lengths, roots) = corpus.columns();
    let request = PlanRequest::configured(&config, &lengths, &roots, 0);
    let mixture = mixture::Mixture::of(&sampler.plan(&request)?, &request);
    match args.json {
        true => print(&format!("{:#}", mixture.json())),
        false => print(&mixture::table(&[(sampler.identity().name.clone(), mixture)])),
    }
}
