//! Running a component: found functions, bounded calls, a fresh instance after a failed one.
//!
//! A plugin gets no fuel but a deadline: fuel would make every instruction slower, and a deadline is what a user feels.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use wasmtime::component::{Instance, InstancePre, Linker};
use wasmtime::{Config, Engine, EngineWeak, Store};

use super::log::Log;
use super::reference::{Identity, PluginRef};
use super::since_v0_1_0::plugin;
use super::state::State;
use super::versions::{self, PUBLISHED};
use super::{Limits, cache, imports, trap, wasi};
use crate::error::{Error, Result};

const TICK_MS: u64 = 10;
const MESSAGE_BYTES_MAX: usize = 2048;

/// What a plugin says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// One sentence: what it decides, and how.
    pub description: String,
    /// JSON Schema of its settings.
    pub config_schema: String,
}

impl Description {
    /// Start the plugin without settings, and ask.
    ///
    /// # Errors
    /// `plugin::misdescribed`, `plugin::wrong_contract`, `plugin::forbidden_import` where it needs WASI, and those of a
    /// failed call.
    pub fn of(reference: &PluginRef) -> Result<Self> {
        Ok(Compiled::new(reference)?.instantiate()?.description)
    }
}

/// A component ready to be instantiated.
struct Compiled {
    identity: Identity,
    limits: Limits,
    settings_in: String,
    log: Arc<Log>,
    component: InstancePre<State>,
}

/// An instance that has described itself and has no settings yet.
struct Described {
    store: Store<State>,
    instance: Instance,
    common: plugin::Guest,
    description: Description,
}

impl Compiled {
    /// Compile a component, or take it from the cache.
    fn new(reference: &PluginRef) -> Result<Self> {
        imports::check_granted(reference)?;
        let (identity, limits) = (reference.identity().clone(), reference.limits().clone());
        let add_to_linker = versions::resolve(&identity.contract, &PUBLISHED, &identity.to_string())?;
        let engine = engine()?;
        let component = cache::component(engine, reference)?;
        let mut linker = Linker::new(engine);
        let component = add_to_linker(&mut linker)
            .and_then(|()| if limits.wasi { wasi::add_to_linker(&mut linker) } else { Ok(()) })
            .and_then(|()| linker.instantiate_pre(&component))
            .map_err(|error| trap::unfit(&identity, &error))?;
        let log = Arc::new(Log::new(&identity, limits.log_lines_per_minute));
        Ok(Self { identity, limits, settings_in: reference.settings_in().into(), log, component })
    }

    fn instantiate(&self) -> Result<Described> {
        let state = State::new(self.limits.memory_bytes(), Arc::clone(&self.log));
        let mut store = Store::new(self.component.engine(), state);
        store.limiter(|state| state);
        store.set_hostcall_fuel(self.limits.answer_bytes());

        begin(&mut store, self.limits.start_deadline_ms);
        let instance = self
            .component
            .instantiate(&mut store)
            .map_err(|error| self.failed_start("instantiation", &mut store, &error))?;
        let common = plugin::GuestIndices::new(&self.component)
            .and_then(|indices| indices.load(&mut store, &instance))
            .map_err(|error| trap::unfit(&self.identity, &error))?;

        begin(&mut store, self.limits.start_deadline_ms);
        let info =
            common.call_describe(&mut store).map_err(|error| self.failed_start("describe", &mut store, &error))?;
        self.check_description(&info)?;
        let description = Description { description: shown(&info.description), config_schema: info.config_schema };
        Ok(Described { store, instance, common, description })
    }

    fn configure(&self, described: &mut Described, config: &str) -> Result<()> {
        let Described { store, common, description, .. } = described;
        begin(store, self.limits.start_deadline_ms);
        let answer = common
            .call_configure(&mut *store, config)
            .map_err(|error| self.failed_start("configure", store, &error))?;
        store.data_mut().end_of_call();
        answer.map_err(|reason| {
            let (place, schema) = (&self.settings_in, compact(&description.config_schema));
            Error::new("plugin::config_refused", format!("{}: configure refused: {}", self.identity, shown(&reason)))
                .expected(format!("settings ({place}) that fit {schema}"))
                .help(format!("it was given {config}"))
        })
    }

    fn failed_start(&self, function: &str, store: &mut Store<State>, error: &wasmtime::Error) -> Error {
        store.data_mut().end_of_call();
        trap::explain(&self.identity, function, &self.limits, true, store.data(), error)
    }

    /// `describe` must agree with what stands in the bytes, which is what listings and provenance show.
    fn check_description(&self, info: &plugin::Info) -> Result<()> {
        let Identity { name, version, .. } = &self.identity;
        if self.identity.described && (info.name != *name || info.version != *version) {
            return Err(Error::new(
                "plugin::misdescribed",
                format!("{} describes itself as {} {}", self.identity, shown(&info.name), shown(&info.version)),
            )
            .expected("the name and version of its custom section `tunehost-plugin`")
            .help("rebuild the plugin so that both come from one place"));
        }
        Ok(())
    }
}

/// A started plugin whose kind's functions are `G`. A call that fails ends the instance; the next call starts a fresh
/// one.
pub(super) struct Plugin<G> {
    compiled: Compiled,
    config: String,
    functions: Lookup<G>,
    live: Option<(Store<State>, G)>,
}

/// How to find the functions of a kind in an instance.
pub(super) type Lookup<G> = fn(&InstancePre<State>, &mut Store<State>, &Instance) -> wasmtime::Result<G>;

impl<G> Plugin<G> {
    /// Compile (or take from the cache), start and configure a plugin. `config` is a JSON object; nothing means `{}`.
    pub fn load(reference: &PluginRef, config: Option<&serde_json::Value>, functions: Lookup<G>) -> Result<Self> {
        let compiled = Compiled::new(reference)?;
        let config = config_object(&compiled, config)?;
        let mut plugin = Self { compiled, config, functions, live: None };
        plugin.live = Some(plugin.start()?);
        Ok(plugin)
    }

    /// Which plugin this is.
    pub fn identity(&self) -> &Identity {
        &self.compiled.identity
    }

    /// Call `function`, which may answer with an error of its own.
    pub fn call<T>(
        &mut self,
        function: &str,
        call: impl FnOnce(&G, &mut Store<State>) -> wasmtime::Result<Result<T, String>>,
    ) -> Result<T> {
        let (mut store, functions) = match self.live.take() {
            Some(live) => live,
            None => self.start()?,
        };
        let Compiled { identity, limits, settings_in, .. } = &self.compiled;
        begin(&mut store, limits.call_deadline_ms);
        let answer = call(&functions, &mut store);
        store.data_mut().end_of_call();
        let answer = answer.map_err(|error| trap::explain(identity, function, limits, false, store.data(), &error))?;
        self.live = Some((store, functions));
        answer.map_err(|reason| {
            Error::new("plugin::refused", format!("{identity}: {function} refused: {}", shown(&reason)))
                .help(format!("change what it objects to, its settings ({settings_in}), or the plugin"))
        })
    }

    fn start(&self) -> Result<(Store<State>, G)> {
        let Compiled { identity, component, .. } = &self.compiled;
        let mut described = self.compiled.instantiate()?;
        let functions = (self.functions)(component, &mut described.store, &described.instance)
            .map_err(|error| trap::unfit(identity, &error))?;
        self.compiled.configure(&mut described, &self.config)?;
        Ok((described.store, functions))
    }
}

fn config_object(compiled: &Compiled, config: Option<&serde_json::Value>) -> Result<String> {
    match config {
        None => Ok("{}".into()),
        Some(config) if config.is_object() => Ok(config.to_string()),
        Some(config) => {
            let Compiled { identity, settings_in, .. } = compiled;
            Err(Error::new("plugin::config_refused", format!("{identity} was given {config} as its settings"))
                .expected(format!("a table of settings ({settings_in})")))
        }
    }
}

/// Give the next call its own deadline and panic message.
fn begin(store: &mut Store<State>, deadline_ms: u64) {
    // One tick more: the current one is already partly over.
    store.set_epoch_deadline(deadline_ms.div_ceil(TICK_MS) + 1);
    store.data_mut().begin_call();
}

/// The one engine of the process. It never blocks on a plugin: a thread of its own counts the time.
pub(super) fn engine() -> Result<&'static Engine> {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    if let Some(engine) = ENGINE.get() {
        return Ok(engine);
    }
    let mut config = Config::new();
    // The same bits on every machine, whatever its vector units do with NaN.
    config.cranelift_nan_canonicalization(true).relaxed_simd_deterministic(true);
    config.epoch_interruption(true);
    let engine = Engine::new(&config).map_err(|error| {
        Error::new("plugin::no_engine", format!("plugins cannot run on this machine: {error:#}"))
            .help("every policy is a plugin, so a run needs a processor that wasmtime can compile for")
    })?;
    Ok(ENGINE.get_or_init(|| {
        let weak = engine.weak();
        std::thread::spawn(move || tick(&weak));
        engine
    }))
}

fn tick(engine: &EngineWeak) {
    while let Some(engine) = engine.upgrade() {
        engine.increment_epoch();
        drop(engine);
        std::thread::sleep(Duration::from_millis(TICK_MS));
    }
}

/// A plugin's text as one line fit for a terminal: bounded, and with its control characters made visible.
pub(super) fn shown(text: &str) -> String {
    let end = text.floor_char_boundary(MESSAGE_BYTES_MAX);
    let mut line = String::with_capacity(end);
    for character in text[..end].trim_end().chars() {
        match character {
            '\n' => line.push(' '),
            character if character.is_control() => line.extend(character.escape_default()),
            character => line.push(character),
        }
    }
    if end < text.len() {
        line.push('…');
    }
    line
}

/// A JSON text without its line breaks.
fn compact(json: &str) -> String {
    serde_json::from_str::<serde_json::Value>(json).map_or_else(|_| shown(json), |value| shown(&value.to_string()))
}
