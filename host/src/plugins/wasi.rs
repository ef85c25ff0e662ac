//! A virtual WASI 0.2 for plugins of languages that cannot do without it, where the configuration allows it.
//!
//! Nothing of the machine is in it, so that the same call still has the same answer: clocks stand still, random numbers
//! are the same at every start, standard input is empty, output goes to the plugin's log, and there are no files, arguments
//! or environment. Time does not pass, so every wait is over at once and no call from here can outlast a deadline.
//!
//! The functions are written by hand: the `wasmtime-wasi` crate waits on the real clock, out of a deadline's reach, and
//! brings the machine's files and sockets with it.

use std::fmt;

use tracing::Level;
use wasmtime::StoreContextMut;
use wasmtime::component::{ComponentType, Linker, LinkerInstance, Lower, Resource, ResourceType};

use super::state::State;
use crate::model::rng::SplitMix64;

/// The line of versions that is offered; its versions only add to one another.
pub const MINOR: &str = "0.2";
/// The packages that an allowed plugin may import from.
pub const PACKAGES: [&str; 5] = ["wasi:cli", "wasi:clocks", "wasi:filesystem", "wasi:io", "wasi:random"];

/// 2000-01-01T00:00:00Z, where the wall clock stands.
const WALL_CLOCK_SECONDS: u64 = 946_684_800;
/// Where the monotonic clock stands.
const MONOTONIC_NS: u64 = 0;
/// Most random bytes handed out at once.
const RANDOM_BYTES_MAX: u64 = 1 << 20;
/// Most bytes kept of a line of output; a log line is shorter still.
const LINE_BYTES_MAX: usize = 4096;
/// What an output stream takes at once, so that no write keeps the host busy past a deadline.
const WRITE_BYTES_MAX: usize = 1 << 16;

/// Whether `import` is of a version and package that can be allowed.
pub fn offers(import: &str) -> bool {
    let Some((interface, version)) = import.split_once('@') else { return false };
    let Some((package, _)) = interface.split_once('/') else { return false };
    PACKAGES.contains(&package) && version.strip_prefix(MINOR).is_some_and(|patch| patch.starts_with('.'))
}

/// An instance's own part of it.
pub struct Virtual {
    random: SplitMix64,
    /// The unfinished lines of standard output and error.
    lines: [Vec<u8>; 2],
}

impl Virtual {
    /// As every instance starts.
    pub fn new() -> Self {
        Self { random: SplitMix64::new(0, "wasi:random"), lines: [Vec::new(), Vec::new()] }
    }
}

const STREAM_LEVELS: [Level; 2] = [Level::INFO, Level::WARN];

impl State {
    pub(super) fn write(&mut self, stream: &Resource<OutputStream>, bytes: &[u8]) -> wasmtime::Result<()> {
        if bytes.len() > WRITE_BYTES_MAX {
            let written = bytes.len();
            return Err(wasmtime::Error::msg(format!("{written} bytes were written where {WRITE_BYTES_MAX} may be")));
        }
        let stream = stream.rep() as usize;
        for byte in bytes {
            let line = &mut self.wasi.lines[stream];
            match byte {
                b'\n' => {
                    self.count_log_line()?;
                    self.end_line(stream);
                }
                byte if line.len() < LINE_BYTES_MAX => line.push(*byte),
                _ => {}
            }
        }
        Ok(())
    }

    fn end_line(&mut self, stream: usize) {
        let line = std::mem::take(&mut self.wasi.lines[stream]);
        if !line.is_empty() {
            self.log.line(STREAM_LEVELS[stream], &String::from_utf8_lossy(&line));
        }
    }

    /// Show what stands in unfinished lines.
    pub(super) fn end_lines(&mut self) {
        (0..STREAM_LEVELS.len()).for_each(|stream| self.end_line(stream));
    }

    pub(super) fn random_bytes(&mut self, count: u64) -> wasmtime::Result<Vec<u8>> {
        if count > RANDOM_BYTES_MAX {
            return Err(wasmtime::Error::msg(format!(
                "{count} random bytes were wanted at once, at most {RANDOM_BYTES_MAX} are given"
            )));
        }
        let words = std::iter::repeat_with(|| self.wasi.random.next_u64().to_le_bytes());
        Ok(words.flatten().take(count as usize).collect())
    }
}

// The resources of WASI. None has anything behind it but the number of its output stream.
enum IoError {}
enum Pollable {}
enum InputStream {}
pub(super) enum OutputStream {}
enum TerminalInput {}
enum TerminalOutput {}
enum Descriptor {}
enum DirectoryEntryStream {}

#[derive(ComponentType, Lower)]
#[component(variant)]
#[allow(dead_code)] // the variant that is never given is part of the type
enum StreamError {
    #[component(name = "last-operation-failed")]
    LastOperationFailed(Resource<IoError>),
    #[component(name = "closed")]
    Closed,
}

#[derive(ComponentType, Lower)]
#[component(record)]
struct Datetime {
    seconds: u64,
    nanoseconds: u32,
}

/// The plugin ended itself.
#[derive(Debug)]
pub(super) struct Exit {
    pub success: bool,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit with {}", if self.success { "success" } else { "an error" })
    }
}

impl std::error::Error for Exit {}

type Context<'a> = StoreContextMut<'a, State>;
type Streamed<T> = wasmtime::Result<(Result<T, StreamError>,)>;

/// Every interface that is offered.
pub(super) fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    io(linker)?;
    streams(&mut interface(linker, "io/streams")?)?;
    cli(linker)?;
    terminals(linker)?;
    clocks(linker)?;
    random(linker)?;
    filesystem(linker)
}

fn interface<'a>(linker: &'a mut Linker<State>, name: &str) -> wasmtime::Result<LinkerInstance<'a, State>> {
    // wasmtime gives it to an import of any later patch version too.
    linker.instance(&format!("wasi:{name}@{MINOR}.0"))
}

fn resource<T: 'static>(instance: &mut LinkerInstance<State>, name: &str) -> wasmtime::Result<()> {
    instance.resource(name, ResourceType::host::<T>(), |_, _| Ok(()))
}

fn pollable() -> wasmtime::Result<(Resource<Pollable>,)> {
    Ok((Resource::new_own(0),))
}

fn io(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    let mut error = interface(linker, "io/error")?;
    resource::<IoError>(&mut error, "error")?;
    error.func_wrap("[method]error.to-debug-string", |_: Context, _: (Resource<IoError>,)| Ok((String::new(),)))?;

    let mut poll = interface(linker, "io/poll")?;
    resource::<Pollable>(&mut poll, "pollable")?;
    poll.func_wrap("[method]pollable.ready", |_: Context, _: (Resource<Pollable>,)| Ok((true,)))?;
    poll.func_wrap("[method]pollable.block", |_: Context, _: (Resource<Pollable>,)| Ok(()))?;
    poll.func_wrap("poll", |_: Context, (pollables,): (Vec<Resource<Pollable>>,)| {
        if pollables.is_empty() {
            return Err(wasmtime::Error::msg("poll was given nothing to wait for"));
        }
        Ok(((0..pollables.len() as u32).collect::<Vec<_>>(),))
    })
}

fn streams(streams: &mut LinkerInstance<State>) -> wasmtime::Result<()> {
    resource::<InputStream>(streams, "input-stream")?;
    for name in ["read", "blocking-read"] {
        let read =
            |_: Context, _: (Resource<InputStream>, u64)| -> Streamed<Vec<u8>> { Ok((Err(StreamError::Closed),)) };
        streams.func_wrap(&format!("[method]input-stream.{name}"), read)?;
    }
    for name in ["skip", "blocking-skip"] {
        let skip = |_: Context, _: (Resource<InputStream>, u64)| -> Streamed<u64> { Ok((Err(StreamError::Closed),)) };
        streams.func_wrap(&format!("[method]input-stream.{name}"), skip)?;
    }
    streams.func_wrap("[method]input-stream.subscribe", |_: Context, _: (Resource<InputStream>,)| pollable())?;

    resource::<OutputStream>(streams, "output-stream")?;
    let check = |_: Context, _: (Resource<OutputStream>,)| -> Streamed<u64> { Ok((Ok(WRITE_BYTES_MAX as u64),)) };
    streams.func_wrap("[method]output-stream.check-write", check)?;
    for name in ["write", "blocking-write-and-flush"] {
        let write = |mut store: Context, (stream, bytes): (Resource<OutputStream>, Vec<u8>)| -> Streamed<()> {
            store.data_mut().write(&stream, &bytes)?;
            Ok((Ok(()),))
        };
        streams.func_wrap(&format!("[method]output-stream.{name}"), write)?;
    }
    for name in ["flush", "blocking-flush"] {
        let flush = |_: Context, _: (Resource<OutputStream>,)| -> Streamed<()> { Ok((Ok(()),)) };
        streams.func_wrap(&format!("[method]output-stream.{name}"), flush)?;
    }
    for name in ["write-zeroes", "blocking-write-zeroes-and-flush"] {
        // Nothing to show in a log.
        let write = |_: Context, _: (Resource<OutputStream>, u64)| -> Streamed<()> { Ok((Ok(()),)) };
        streams.func_wrap(&format!("[method]output-stream.{name}"), write)?;
    }
    for name in ["splice", "blocking-splice"] {
        let splice = |_: Context, _: (Resource<OutputStream>, Resource<InputStream>, u64)| -> Streamed<u64> {
            Ok((Err(StreamError::Closed),))
        };
        streams.func_wrap(&format!("[method]output-stream.{name}"), splice)?;
    }
    streams.func_wrap("[method]output-stream.subscribe", |_: Context, _: (Resource<OutputStream>,)| pollable())
}

fn cli(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    let mut environment = interface(linker, "cli/environment")?;
    environment.func_wrap("get-environment", |_: Context, (): ()| Ok((Vec::<(String, String)>::new(),)))?;
    environment.func_wrap("get-arguments", |_: Context, (): ()| Ok((Vec::<String>::new(),)))?;
    environment.func_wrap("initial-cwd", |_: Context, (): ()| Ok((None::<String>,)))?;

    let mut exit = interface(linker, "cli/exit")?;
    exit.func_wrap("exit", |_: Context, (status,): (Result<(), ()>,)| -> wasmtime::Result<()> {
        Err(Exit { success: status.is_ok() }.into())
    })?;
    exit.func_wrap("exit-with-code", |_: Context, (code,): (u8,)| -> wasmtime::Result<()> {
        Err(Exit { success: code == 0 }.into())
    })?;

    let input = |_: Context, (): ()| Ok((Resource::<InputStream>::new_own(0),));
    interface(linker, "cli/stdin")?.func_wrap("get-stdin", input)?;
    for (stream, name) in ["stdout", "stderr"].into_iter().enumerate() {
        let output = move |_: Context, (): ()| Ok((Resource::<OutputStream>::new_own(stream as u32),));
        interface(linker, &format!("cli/{name}"))?.func_wrap(&format!("get-{name}"), output)?;
    }
    Ok(())
}

fn terminals(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    resource::<TerminalInput>(&mut interface(linker, "cli/terminal-input")?, "terminal-input")?;
    resource::<TerminalOutput>(&mut interface(linker, "cli/terminal-output")?, "terminal-output")?;
    let input = |_: Context, (): ()| Ok((None::<Resource<TerminalInput>>,));
    interface(linker, "cli/terminal-stdin")?.func_wrap("get-terminal-stdin", input)?;
    for name in ["stdout", "stderr"] {
        let output = |_: Context, (): ()| Ok((None::<Resource<TerminalOutput>>,));
        interface(linker, &format!("cli/terminal-{name}"))?.func_wrap(&format!("get-terminal-{name}"), output)?;
    }
    Ok(())
}

fn clocks(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    let mut wall = interface(linker, "clocks/wall-clock")?;
    wall.func_wrap("now", |_: Context, (): ()| Ok((Datetime { seconds: WALL_CLOCK_SECONDS, nanoseconds: 0 },)))?;
    wall.func_wrap("resolution", |_: Context, (): ()| Ok((Datetime { seconds: 1, nanoseconds: 0 },)))?;

    let mut monotonic = interface(linker, "clocks/monotonic-clock")?;
    monotonic.func_wrap("now", |_: Context, (): ()| Ok((MONOTONIC_NS,)))?;
    monotonic.func_wrap("resolution", |_: Context, (): ()| Ok((1_000_000_000u64,)))?;
    monotonic.func_wrap("subscribe-instant", |_: Context, (_,): (u64,)| pollable())?;
    monotonic.func_wrap("subscribe-duration", |_: Context, (_,): (u64,)| pollable())
}

fn random(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    for (name, prefix) in [("random", "get-random"), ("insecure", "get-insecure-random")] {
        let mut random = interface(linker, &format!("random/{name}"))?;
        random.func_wrap(&format!("{prefix}-bytes"), |mut store: Context, (count,): (u64,)| {
            Ok((store.data_mut().random_bytes(count)?,))
        })?;
        random.func_wrap(&format!("{prefix}-u64"), |mut store: Context, (): ()| {
            Ok((store.data_mut().wasi.random.next_u64(),))
        })?;
    }
    interface(linker, "random/insecure-seed")?.func_wrap("insecure-seed", |mut store: Context, (): ()| {
        let random = &mut store.data_mut().wasi.random;
        Ok(((random.next_u64(), random.next_u64()),))
    })
}

/// No folder is given, so nothing can be opened and what works on an open file has nothing to be called with.
fn filesystem(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    let none = |_: Context, (): ()| Ok((Vec::<(Resource<Descriptor>, String)>::new(),));
    interface(linker, "filesystem/preopens")?.func_wrap("get-directories", none)?;

    let mut types = interface(linker, "filesystem/types")?;
    resource::<Descriptor>(&mut types, "descriptor")?;
    resource::<DirectoryEntryStream>(&mut types, "directory-entry-stream")?;
    let mut unreachable = |name: &str| {
        types.func_new(name, |_, _, _, _| Err(wasmtime::Error::msg("a file was used, but none can be opened")))
    };
    for method in DESCRIPTOR_METHODS {
        unreachable(&format!("[method]descriptor.{method}"))?;
    }
    unreachable("[method]directory-entry-stream.read-directory-entry")?;
    unreachable("filesystem-error-code")
}

const DESCRIPTOR_METHODS: [&str; 27] = [
    "read-via-stream",
    "write-via-stream",
    "append-via-stream",
    "advise",
    "sync-data",
    "get-flags",
    "get-type",
    "set-size",
    "set-times",
    "read",
    "write",
    "read-directory",
    "sync",
    "create-directory-at",
    "stat",
    "stat-at",
    "set-times-at",
    "link-at",
    "open-at",
    "readlink-at",
    "remove-directory-at",
    "rename-at",
    "symlink-at",
    "unlink-file-at",
    "is-same-object",
    "metadata-hash",
    "metadata-hash-at",
];
