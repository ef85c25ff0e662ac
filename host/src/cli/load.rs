//! Opening a model for a command.

use super::ModelArgs;
use crate::config::WeightDtype;
use crate::device;
use crate::error::Result;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::TextConfig;
use crate::model::peft;
use crate::model::weights::Model;
use crate::train::engine::Engine;

/// Rows of the loss head at once, for commands that only score.
const LOSS_CHUNK_ROWS: usize = 256;

/// The model folder, and the adapter where there is one, ready to score.
pub fn model(args: &ModelArgs) -> Result<(Engine, Option<Adapter>)> {
    let device = device::open(&args.device)?;
    let config = TextConfig::read(&args.model)?;
    device::check(&args.device, WeightDtype::from(args.weights).beside_f32(), WeightDtype::F32, &config)?;
    let model = Model::load(config, &Checkpoint::open(&args.model)?, &device, args.weights.into(), &mut |_| {})?;
    let adapter = match &args.adapter {
        Some(dir) => Some(peft::read(dir, &model.spec, &device)?),
        None => None,
    };
    Ok((
        Engine {
            model,
            recompute_layers: 0,
            keep_products: false,
            loss_chunk_rows: LOSS_CHUNK_ROWS,
            residuals: WeightDtype::F32,
        },
        adapter,
    ))
}
