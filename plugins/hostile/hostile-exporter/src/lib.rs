//! An exporter that misbehaves as its setting `act` says. It starts from A and B of the first module in one file, the base
//! tensor that they belong to in another, merged, and a text, and spoils one thing.

use serde::Deserialize;
use tunehost_plugin_sdk::{Dtype, ExportPlan, Exporter, Plugin, Source, Tuned};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    act: Act,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum Act {
    // Numbers.
    NanStrength,
    InfiniteStrength,
    StrengthOfA,
    UnknownTensor,
    UnknownModule,
    // Columns.
    ShortColumn,
    FallingEnds,
    EmptyTensorFile,
    // Names.
    FileAbove,
    AbsoluteFile,
    UnnamedFile,
    SameFileTwice,
    SameTensorTwice,
    // What it is all for.
    NothingOfTheAdapter,
}

struct Hostile {
    act: Act,
}

impl Plugin for Hostile {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "required": ["act"], "properties": {"act": {"type": "string"}}}"#;

    fn new(Config { act }: Config) -> Result<Self, String> {
        Ok(Self { act })
    }
}

impl Exporter for Hostile {
    fn plan(&mut self, tuned: Tuned) -> Result<ExportPlan, String> {
        let mut plan = ExportPlan {
            names: ["a", "b", "merged"].map(String::from).into(),
            sources: vec![Source::LoraA, Source::LoraB, Source::Merged],
            indices: vec![0, 0, tuned.module_tensors[0]],
            dtypes: vec![Dtype::Unchanged; 3],
            strengths: vec![1.0; 3],
            tensor_files: ["adapter.safetensors", "merged.safetensors"].map(String::from).into(),
            tensor_file_ends: vec![2, 3],
            text_files: vec!["about.txt".into()],
            texts: vec!["tuned\n".into()],
            ..ExportPlan::empty()
        };
        match self.act {
            Act::NanStrength => plan.strengths[2] = f64::NAN,
            Act::InfiniteStrength => plan.strengths[2] = f64::INFINITY,
            Act::StrengthOfA => plan.strengths[0] = 2.0,
            Act::UnknownTensor => plan.indices[2] = tuned.base_tensors.len() as u32,
            Act::UnknownModule => plan.indices[0] = tuned.modules.len() as u32,
            Act::ShortColumn => drop(plan.dtypes.pop()),
            Act::FallingEnds => plan.tensor_file_ends.swap(0, 1),
            Act::EmptyTensorFile => {
                plan.tensor_files.push("empty.safetensors".into());
                plan.tensor_file_ends.push(3);
            }
            Act::FileAbove => plan.text_files[0] = "../about.txt".into(),
            Act::AbsoluteFile => plan.text_files[0] = "/about.txt".into(),
            Act::UnnamedFile => plan.text_files[0] = String::new(),
            Act::SameFileTwice => plan.text_files[0] = "adapter.safetensors".into(),
            Act::SameTensorTwice => plan.names[1] = "a".into(),
            Act::NothingOfTheAdapter => {
                plan.sources = vec![Source::Base; 3];
                plan.indices = vec![0; 3];
            }
        }
        Ok(plan)
    }
}

tunehost_plugin_sdk::export_exporter!(Hostile);
