//! The command line: each flag is documented where it is defined.

mod advice;
mod bench;
mod cache;
mod config;
mod corpus;
mod export;
mod generate;
mod grants;
mod load;
mod plan;
mod plugins;
mod probe;
mod profile;
mod run;
mod runs;
mod score;
mod smoke;

use crate::config::{Resolved, WeightDtype};
use crate::error::{Error, Result};
use crate::plugins::project::Language;
use crate::report::{Mode, Reporter};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use tunehost_kernels::simd;

/// LoRA-tunes Gemma-family mixture-of-experts models; policy is in sandboxed WebAssembly plugins.
#[derive(Debug, Parser)]
#[command(name = "tunehost", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tune a base on a corpus, as a configuration file says.
    Run(RunArgs),
    /// What a run would take: memory, steps, disk, work and time, from headers, configuration and lengths; no weight is read.
    Plan(plan::PlanArgs),
    /// What could spoil a run without an error, looked at before it; exit code 7 where something is found.
    #[command(subcommand)]
    Probe(probe::ProbeCommand),
    /// Where the time of a run's steps goes: by phase, layer kind and kernel, held against a measured peak.
    Profile(profile::ProfileArgs),
    /// How long each part of a run's steps takes, at the run's shapes and with its kernels.
    Bench(bench::BenchArgs),
    /// Steps of a run's own shapes, each in a process of its own: memory, time, and which shape will not fit.
    Smoke(smoke::SmokeArgs),
    /// Continue a run that was interrupted, to the same bytes.
    Resume(ResumeArgs),
    /// Let a model answer a prompt; with --adapter, the base and the tuned model one after the other.
    Generate(GenerateArgs),
    /// Loss and perplexity of a model on records, one by one and in all.
    Score(ScoreArgs),
    /// Write a tune as others load it, and judge what was written beside base and tuned model.
    Export(export::ExportArgs),
    /// The policy plugins.
    #[command(subcommand)]
    Plugins(PluginsCommand),
    /// The corpus of a configuration.
    #[command(subcommand)]
    Corpus(CorpusCommand),
    /// Records that were encoded by earlier runs.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Permissions to train on corpora that something stands against.
    #[command(subcommand)]
    Grants(GrantsCommand),
    /// The runs that were made: what they recorded, in what they differ, whether it is still there.
    #[command(subcommand)]
    Runs(RunsCommand),
    /// The configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
}

#[derive(Debug, Args)]
struct OutputArgs {
    /// Print results and errors only.
    #[arg(long, conflicts_with = "json")]
    quiet: bool,
    /// Print one JSON object a line on standard output.
    #[arg(long)]
    json: bool,
}

impl OutputArgs {
    fn reporter(&self) -> Reporter {
        Reporter::new(match (self.quiet, self.json) {
            (_, true) => Mode::Json,
            (true, _) => Mode::Quiet,
            _ => Mode::Human,
        })
    }
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The configuration, a TOML file.
    config: PathBuf,
    /// Change one value: --set train.lr=1e-4. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Choose a plugin: --plugins sampler=shuffled, or sampler=path/to/x.wasm. May be repeated.
    #[arg(long = "plugins", value_name = "KIND=PLUGIN")]
    plugins: Vec<String>,
    /// Device: cpu, wgpu or cuda:0, as the build has them; short for --set model.device=NAME.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
}

impl ConfigArgs {
    /// Every value that a flag changes, as `--set` has it.
    fn sets(&self) -> Vec<String> {
        let device = self.device.iter().map(|device| format!("model.device={device}"));
        self.sets.iter().cloned().chain(device).collect()
    }

    /// The configuration with what the flags change.
    ///
    /// # Errors
    /// Classes `config`, `usage`.
    fn load(&self) -> Result<Resolved> {
        crate::config::load(&self.config, &self.sets(), &self.plugins)
    }
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The run folder: new or empty. Without it, the first free <run.root>/<name>-<number>.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// End before this time, saved and ready to be resumed: the next 06:30 of this machine's clock, or date, time and offset
    /// (2026-12-01T06:30:00+01:00). The plugin `window` ends it a minute ahead or more, beside the run's own checkpoint scheduler;
    /// the run's configuration stays as it is.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct ResumeArgs {
    /// The run folder.
    run: PathBuf,
    /// Change a value that decides nothing of what is computed, such as the settings of the checkpoint scheduler or a plugin's
    /// limits: --set plugins.limits.sampler.call_deadline_ms=90000. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// End before this time, as in `run`.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Go on although this is not what it was, as run::changed names it: --allow train.lr, or --allow kernel for every kernel. The
    /// run is then what it was allowed to be, for later resumes too. The result is no longer the one of a run that did not stop,
    /// and provenance says so. May be repeated.
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct ModelArgs {
    /// Model folder in Hugging Face layout.
    model: PathBuf,
    /// Adapter folder as PEFT or tunehost writes it.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Device: cpu, wgpu or cuda:0, as the build has them.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// How the base's matrices are kept and multiplied.
    #[arg(long, value_enum, default_value = "f32")]
    weights: WeightsArg,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum WeightsArg {
    F32,
    Bf16,
}

impl From<WeightsArg> for WeightDtype {
    fn from(weights: WeightsArg) -> Self {
        match weights {
            WeightsArg::F32 => WeightDtype::F32,
            WeightsArg::Bf16 => WeightDtype::Bf16,
        }
    }
}

#[derive(Debug, Args)]
struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What the user says.
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// A system message before it.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Chat template file; without it, the one in the model folder.
    #[arg(long, value_name = "PATH")]
    template: Option<String>,
    /// What stands before the answer: `training` is the prompt as the tune rendered it, `generation` the template's own
    /// generation prompt, as servers render it. They differ where a template opens an empty thought channel.
    #[arg(long, value_enum, default_value = "training")]
    prompt_form: PromptFormArg,
    /// Most tokens of the answer.
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    /// 0 is greedy: always the likeliest token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample among the likeliest tokens that cover this probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PromptFormArg {
    Training,
    Generation,
}

#[derive(Debug, Args)]
struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Records: a file, a folder or a glob. May be repeated.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<PathBuf>,
    /// Chat template for `messages`: a file, or the word `base` for the one in the model folder.
    #[arg(long, value_name = "PATH")]
    template: Option<String>,
    /// Also write every record's logits to this new safetensors file; for small inputs.
    #[arg(long, value_name = "OUT")]
    logits: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Subcommand)]
enum PluginsCommand {
    /// Name, kind, version, size, sha256 and origin of every plugin; nothing is compiled.
    List {
        /// Look in the folders of this configuration's plugins.search_path, before the bundled plugins.
        config: Option<PathBuf>,
        /// Also look in this folder, before the bundled plugins. May be repeated.
        #[arg(long, value_name = "DIR")]
        search_path: Vec<PathBuf>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What one plugin says about itself: settings, imports, limits, sha256, version of the contract.
    Show(PluginArgs),
    /// Check that a plugin keeps its contract on generated inputs; exit code 5 where it does not.
    Check {
        #[command(flatten)]
        plugin: PluginArgs,
        /// Its settings as a JSON object; without them, the least that fit its schema.
        #[arg(long, value_name = "JSON")]
        config: Option<String>,
    },
    /// Measure what a plugin's calls cost.
    Bench {
        #[command(flatten)]
        plugin: PluginArgs,
        /// Its settings as a JSON object; without them, the least that fit its schema.
        #[arg(long, value_name = "JSON")]
        config: Option<String>,
    },
    /// Write the source folder of a new plugin, which builds and passes `check` as it is.
    New {
        /// The plugin's name, and the folder's.
        name: String,
        /// What it decides: sampler, checkpoint-scheduler and so on, as in `plugins list`.
        #[arg(long)]
        kind: String,
        /// The language to write it in.
        #[arg(long, value_enum)]
        lang: Language,
    },
    /// Build the plugin of a source folder into its target/NAME.wasm.
    Build {
        /// The source folder.
        folder: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the contract that plugins are built against, in WIT.
    Wit {
        /// Write its files into this folder instead.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct PluginArgs {
    /// A plugin's name, or the path of a .wasm file; either may end in @sha256:DIGITS.
    plugin: String,
    /// Also look for a name in this folder, before the bundled plugins. May be repeated.
    #[arg(long, value_name = "DIR")]
    search_path: Vec<PathBuf>,
    /// Another limit than the kind's: --limit call_deadline_ms=300000. The keys of [plugins.limits.<kind>]. May be repeated.
    #[arg(long = "limit", value_name = "KEY=VALUE")]
    limits: Vec<String>,
    /// Let it import the virtual WASI, as plugins.wasi does.
    #[arg(long)]
    wasi: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum CorpusCommand {
    /// What the sampler makes of the corpus: padding waste, micro-batches without padding, roots per accumulation window.
    Batches(BatchesArgs),
    /// Show records as the model sees them: their text, and which of it is trained.
    Inspect(InspectArgs),
    /// What each of several length limits would cost: records and tokens cut, trained tokens lost.
    Stats(StatsArgs),
}

#[derive(Debug, Args)]
struct InspectArgs {
    /// A configuration (TOML), whose sources are shown one after the other, or one file of records.
    target: PathBuf,
    /// How many records of each file, the first ones.
    #[arg(short, long, value_name = "N", default_value_t = 3)]
    n: usize,
    /// For a file of records: the folder of the model, for its tokenizer.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// For a file of records: chat template for `messages`, a file or the word `base`.
    #[arg(long, value_name = "PATH", default_value = "base")]
    template: String,
    /// Write an HTML page to this new file, with each token an element, instead of printing.
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct StatsArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The limits, in tokens: --lengths 4096,8192,16384. Without them, data.max_seq_len alone.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    lengths: Vec<usize>,
    /// As JSON: one truncation report a limit.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct BatchesArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum CacheCommand {
    /// Records, tokens, size, tokenizer and template of each file of the cache.
    Ls(CacheFolderArgs),
    /// Read every token of the cache against its checksum; exit code 3 where one is damaged.
    Verify(CacheFolderArgs),
    /// Remove files of the cache.
    Rm {
        /// The beginning of a file's name, as `cache ls` prints it.
        #[arg(required_unless_present = "all")]
        names: Vec<String>,
        /// Remove all of them.
        #[arg(long, conflicts_with = "names")]
        all: bool,
        #[command(flatten)]
        folder: CacheFolderArgs,
    },
    /// Encode the corpus of a configuration ahead of a run.
    Fill {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
struct CacheFolderArgs {
    /// The folder of the cache; without it, tunehost/encodings in the user's cache folder.
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum GrantsCommand {
    /// Make the ledger of a new grants file, FILE's name with .ledger.jsonl, in which runs write what they use.
    Open {
        /// The grants, a TOML file.
        file: PathBuf,
    },
    /// Scope, operator, expiry, uses left and runs of every grant.
    Show {
        /// The grants, a TOML file.
        file: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// The runs in a folder: when they started, how they ended, held-out loss before and after.
    List {
        /// The folder that holds the run folders.
        #[arg(default_value = "runs")]
        root: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// What one run recorded: inputs with their hashes, kernels, gates, how it ended.
    Show {
        /// The run folder.
        run: PathBuf,
        /// Its whole provenance, as JSON.
        #[arg(long)]
        json: bool,
    },
    /// In what two runs differ, one line for each thing; what follows from another line, run id, clocks and results are left out.
    Diff {
        /// A run folder.
        a: PathBuf,
        /// Another.
        b: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Hash again what the run recorded: base, tokenizer, template, corpus, plugins, order, logs, checkpoints, exports; and compute
    /// again its order, steps and held-out losses. Exit code 6 where something is not as it was.
    Verify {
        /// The run folder.
        run: PathBuf,
        /// Optimiser steps to compute again, before the last one as far as there is a checkpoint to start from.
        #[arg(long, default_value_t = 1, value_name = "N")]
        steps: u64,
        /// Compute nothing: a base need not fit into memory then.
        #[arg(long, conflicts_with = "steps")]
        hashes_only: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Every resolved value and where it came from.
    Show(ConfigArgs),
}

/// Runs the command.
///
/// # Errors
/// Whatever the command met; the caller prints it and exits with [`Error::exit_code`].
pub fn execute(cli: Cli) -> Result<()> {
    simd::asked().map_err(|other| {
        Error::new("usage::isa", format!("TUNEHOST_ISA is `{other}`"))
            .expected("portable, avx2 or avx512")
            .help("without it, the kernels use the best that the processor has")
    })?;
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Probe(command) => probe::execute(&command),
        Command::Profile(args) => profile::profile(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Smoke(args) => smoke::smoke(&args),
        Command::Resume(args) => run::resume(&args),
        Command::Generate(args) => generate::generate(&args).map_err(|e| advice::by_flags(e, "MODEL")),
        Command::Score(args) => score::score(&args).map_err(|e| advice::by_flags(e, "MODEL")),
        Command::Export(args) => export::export(&args).map_err(|e| advice::by_flags(e, "--base DIR")),
        Command::Plugins(command) => match command {
            PluginsCommand::List { config, search_path, json } => plugins::list(config.as_deref(), search_path, json),
            PluginsCommand::Show(plugin) => plugins::show(&plugin),
            PluginsCommand::Check { plugin, config } => plugins::check(&plugin, config.as_deref()),
            PluginsCommand::Bench { plugin, config } => plugins::bench(&plugin, config.as_deref()),
            PluginsCommand::New { name, kind, lang } => plugins::new(&name, &kind, lang),
            PluginsCommand::Build { folder, json } => plugins::build(&folder, json),
            PluginsCommand::Wit { out } => plugins::wit(out.as_deref()),
        },
        Command::Corpus(CorpusCommand::Batches(args)) => corpus::batches(&args),
        Command::Corpus(CorpusCommand::Inspect(args)) => corpus::inspect(&args),
        Command::Corpus(CorpusCommand::Stats(args)) => corpus::stats(&args),
        Command::Cache(CacheCommand::Ls(args)) => cache::ls(&args),
        Command::Cache(CacheCommand::Verify(args)) => cache::verify(&args),
        Command::Cache(CacheCommand::Rm { names, all, folder }) => cache::rm(&folder, &names, all),
        Command::Cache(CacheCommand::Fill { config, output }) => cache::fill(&config, &output),
        Command::Grants(GrantsCommand::Open { file }) => grants::open(&file),
        Command::Grants(GrantsCommand::Show { file }) => grants::show(&file),
        Command::Runs(command) => runs::execute(&command),
        Command::Config(ConfigCommand::Show(args)) => config::show(&args),
    }
}

/// Prints what a command found, as JSON or as text.
fn print_as(json: bool, value: impl Fn() -> serde_json::Value, text: impl Fn() -> String) -> Result<()> {
    if json { print(&format!("{:#}", value())) } else { print(&text()) }
}

fn print(text: &str) -> Result<()> {
    use std::io::Write;
    match writeln!(std::io::stdout(), "{}", text.trim_end_matches('\n')) {
        // A closed pipe is the reader's choice: `tunehost plugins list | head`.
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::new("io::failed", format!("cannot write to standard output: {e}")))
        }
        _ => Ok(()),
    }
}
