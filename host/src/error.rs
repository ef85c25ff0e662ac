//! The one error type of the host: written for the person reading it.
//!
//! Every error has a stable code such as `config::unknown_key`. The part before `::` is its class and decides the exit
//! code of the process.

use std::fmt;
use std::io::ErrorKind;

/// What went wrong, where, what was expected and what to do about it.
#[derive(Debug)]
pub struct Error {
    code: &'static str,
    message: String,
    expected: Option<String>,
    help: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// `Result` with the host's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a stable `code` (`class::name`) and a message that says what happened and where (file, line, record,
    /// tensor, plugin).
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        debug_assert!(code.contains("::"), "an error code is `class::name`, not {code:?}");
        Self { code, message: message.into(), expected: None, help: None, source: None }
    }

    /// Failed file operation `doing` (an infinitive, such as "read") on `path`.
    pub fn io(doing: &str, path: &std::path::Path, source: std::io::Error) -> Self {
        let help = match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there, and try again",
            ErrorKind::FileTooLarge => "raise the limit of file sizes (ulimit -f), or name another file system",
            ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => {
                "make it writable or readable for this user, or name another place"
            }
            ErrorKind::NotFound => "look whether the path is right, and what moved or removed it",
            ErrorKind::AlreadyExists | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
                "something else has this place: move that away, or name another place"
            }
            _ => "try again when what the system says of it is mended, or name another place",
        };
        Self::new("io::failed", format!("cannot {doing} {}: {source}", path.display())).source(source).help(help)
    }

    /// The same error with the `place` it happened at in front of its message.
    pub fn at(mut self, place: &str) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// What should have been there instead.
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = Some(expected.into());
        self
    }

    /// What the reader can do now; said after what was said before.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        let help = help.into();
        self.help = Some(match self.help.take() {
            Some(earlier) => format!("{earlier}; {help}"),
            None => help,
        });
        self
    }

    /// What the reader can do now, in place of what was said before: the caller knows better.
    pub fn help_instead(mut self, help: impl Into<String>) -> Self {
        self.help = None;
        self.help(help)
    }

    /// The error underneath.
    pub fn source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The stable code, `class::name`.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// The message alone, without code, expectation and help.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The process exit code of this error's class; the table stands in the README.
    pub fn exit_code(&self) -> u8 {
        match self.code.split("::").next().unwrap_or_default() {
            "usage" | "config" => 2,
            "corpus" => 3,
            "model" => 4,
            "plugin" => 5,
            "run" => 6,
            "gate" | "probe" => 7,
            "io" => 8,
            "device" => 9,
            "export" => 10,
            _ => 1,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error[{}]: {}", self.code, self.message)?;
        if let Some(expected) = &self.expected {
            write!(f, "\n  expected: {expected}")?;
        }
        if let Some(help) = &self.help {
            write!(f, "\n  help: {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e.as_ref() as _)
    }
}
