//! What errors advise where a command takes by flags what a run takes from its configuration.

use crate::error::Error;

/// `error` of a command that is told its model as `model`, and its chat template by `--template`.
pub fn by_flags(error: Error, model: &str) -> Error {
    match error.code() {
        "model::not_found" => error
            .help_instead(format!("name a model folder in Hugging Face layout: {model}"))
            .help("a .gguf file is read in the folder it was exported to; an adapter is named beside its base"),
        "corpus::no_template" => {
            error.help_instead("name one: --template FILE, or --template base where the model folder ships one")
        }
        "corpus::unknown_shape" => error.help_instead(
            "give the records keys of one shape; keys are named anew (`columns`) in a configuration alone",
        ),
        _ => error,
    }
}
