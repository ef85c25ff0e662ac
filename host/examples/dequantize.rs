//! Writes every tensor of a checkpoint as the host reads it, in f32: `dequantize MODEL OUT.safetensors`. For comparing with
//! what others read of the same files.

use std::path::Path;
use tunehost::error::{Error, Result};
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::peft::f32_safetensors;
use tunehost::run::atomic::{self, Existing};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = arguments.as_slice() else {
        return Err(Error::new("usage::missing", "dequantize MODEL OUT.safetensors"));
    };
    let checkpoint = Checkpoint::open(Path::new(model))?;
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = checkpoint
        .shapes()
        .into_iter()
        .map(|(name, (shape, _))| checkpoint.read_f32(&name).map(|values| (name, shape, values)))
        .collect::<Result<_>>()?;
    let file = f32_safetensors(tensors.iter().map(|(name, shape, values)| (name.as_str(), &shape[..], &values[..])));
    atomic::write(Path::new(out), &file, Existing::Refuse)
}
