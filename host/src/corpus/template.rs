//! Chat templates: Jinja as Hugging Face's transformers runs it, in minijinja.
//!
//! Known differences: `~` joins `none`, `true` and floats as minijinja prints them, not as Python does; tuples print as lists;
//! `and` and `or` give a truth value; integers beyond 64 bits are floats; `%` does not format text. Fuel and the length of what is
//! printed are limited, the memory of a text that a template doubles over and over is not.

use super::moment::Moment;
use super::tokenizer::Tokenizer;
use super::{methods, python};
use crate::error::{Error, Result};
use crate::hash::FileHash;
use minijinja::value::{Kwargs, ValueKind, merge_maps};
use minijinja::{AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, Value};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Instructions one rendering may take: a conversation of a thousand messages needs a tenth of it.
const FUEL: u64 = 100_000_000;
/// Depth of macro calls; a template that recurses for ever ends here and not at the end of the stack.
const RECURSION: usize = 100;
/// Stand around what a `{% generation %}` block prints, where it is asked for: private-use characters.
const BLOCK: [char; 2] = ['\u{E002}', '\u{E003}'];
/// The variable that asks for them.
const MARK_BLOCKS: &str = "__mark_generation_blocks";

/// A compiled template with the special tokens it may print.
pub struct ChatTemplate {
    env: Environment<'static>,
    special: BTreeMap<String, String>,
    info: TemplateInfo,
}

/// Which template a corpus was rendered with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TemplateInfo {
    /// Path of the file it was read from.
    pub origin: String,
    /// Its text.
    #[serde(skip)]
    pub source: String,
    /// sha256 of its text.
    pub sha256: String,
    /// sha256 of the template that the base ships, if it ships one.
    pub base_sha256: Option<String>,
    /// Whether it says itself what the assistant says, by `{% generation %}` blocks.
    pub has_generation_blocks: bool,
    /// What `strftime_now` tells it, where it asks for the date: a fixed moment, so that the same corpus always becomes
    /// the same tokens.
    pub now: Option<Moment>,
}

impl TemplateInfo {
    /// As provenance records it.
    pub fn file_hash(&self) -> FileHash {
        let (path, bytes) = (self.origin.clone().into(), self.source.len() as u64);
        FileHash { path, bytes, sha256: self.sha256.clone() }
    }

    /// Whether the base ships another template than this one.
    pub fn differs_from_base(&self) -> bool {
        self.base_sha256.as_ref().is_some_and(|base| *base != self.sha256)
    }
}

impl ChatTemplate {
    /// Reads the template that `choice` names: a path, or the word `base` for the one in the folder `base`. It is rendered
    /// as if it were `now`.
    pub fn open(choice: &str, base: &Path, tokenizer: &Tokenizer, now: Moment) -> Result<Self> {
        let shipped = shipped_template(base)?;
        let (origin, source) = if choice == "base" {
            shipped.clone().ok_or_else(|| {
                Error::new("corpus::no_template", format!("{} ships no chat template", base.display()))
                    .help("set `data.template` to a template file")
            })?
        } else {
            let path = Path::new(choice);
            (choice.to_string(), std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?)
        };
        let base_sha256 = shipped.map(|(_, text)| crate::hash::sha256(text.as_bytes()));
        Self::new(&source, origin, base_sha256, tokenizer.special_tokens().clone(), now)
    }

    /// Compiles `source`; `special` are the variables it sees, such as `bos_token`.
    ///
    /// # Errors
    /// `corpus::bad_template` where the template does not compile.
    pub fn new(
        source: &str,
        origin: String,
        base_sha256: Option<String>,
        special: BTreeMap<String, String>,
        now: Moment,
    ) -> Result<Self> {
        let info = TemplateInfo {
            source: source.to_string(),
            sha256: crate::hash::sha256(source.as_bytes()),
            base_sha256,
            has_generation_blocks: generation_tag().is_match(source),
            now: source.contains("strftime_now").then_some(now),
            origin,
        };
        let mut env = environment(now);
        env.add_template_owned("chat", generation_blocks_as_filters(source)).map_err(|e| {
            let message = format!("{}: the chat template does not compile: {e}", info.origin);
            Error::new("corpus::bad_template", message).source(e)
        })?;
        Ok(Self { env, special, info })
    }

    /// Where the template came from and its hashes.
    pub fn info(&self) -> &TemplateInfo {
        &self.info
    }

    /// The text of a conversation; with `add_generation_prompt` it ends where the model would go on.
    ///
    /// # Errors
    /// `corpus::template_failed` with the template's own message: it raised one, or ran out of fuel.
    pub fn render(&self, messages: &[Value], tools: &Value, add_generation_prompt: bool) -> Result<String> {
        self.render_with(minijinja::context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => add_generation_prompt,
        })
    }

    /// Where the `{% generation %}` blocks stand in `whole`, the rendering of `messages` without a generation prompt; ascending
    /// and apart.
    ///
    /// # Errors
    /// `corpus::undecidable_spans` where they cannot be told; as [`ChatTemplate::render`].
    pub fn generation_blocks(&self, messages: &[Value], tools: &Value, whole: &str) -> Result<Vec<Range<usize>>> {
        let marked = self.render_with(minijinja::context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => false,
            ..Value::from_iter([(MARK_BLOCKS, true)])
        })?;
        let mut blocks = Vec::new();
        let mut text = String::with_capacity(whole.len());
        let mut rest = marked.as_str();
        while let Some((before, after)) = rest.split_once(BLOCK[0]) {
            text += before;
            // blocks may stand in one another: the outer one counts
            let mut depth = 1;
            let start = text.len();
            rest = after;
            while let (true, Some((piece, mark))) = (depth > 0, rest.split_once(BLOCK)) {
                text += piece;
                depth = if rest[piece.len()..].starts_with(BLOCK[0]) { depth + 1 } else { depth - 1 };
                rest = mark;
            }
            blocks.push(start..text.len());
        }
        text += rest;
        if text != whole {
            let reason =
                "the template works on what its generation blocks print, or a message has their marks (U+E002, U+E003)";
            return Err(Error::new("corpus::undecidable_spans", reason));
        }
        Ok(blocks)
    }

    fn render_with(&self, conversation: Value) -> Result<String> {
        let documents = minijinja::context! { documents => () };
        let context = merge_maps([conversation, documents, Value::from_serialize(&self.special)]);
        let mut printed = Printed::default();
        let template = self.env.get_template("chat");
        let rendered = template.and_then(|template| template.render_captured_to(context, &mut printed).map(drop));
        let rendered = rendered.map(|()| String::from_utf8(printed.0).expect("a template prints text"));
        rendered.map_err(|e| {
            let at = e.line().map_or(String::new(), |line| format!(":{line}"));
            let cause = match e.kind() {
                ErrorKind::OutOfFuel => "it did not end".to_string(),
                ErrorKind::WriteFailure => format!("it prints more than {} MiB", python::TEXT_MAX_BYTES >> 20),
                _ => e.detail().map_or_else(|| e.to_string(), str::to_string),
            };
            Error::new("corpus::template_failed", format!("the chat template {}{at}: {cause}", self.info.origin))
                .expected("a conversation that the template renders")
                .help("look at the roles, their order and the tools of the record; `tunehost corpus inspect` renders it alone")
                .source(e)
        })
    }
}

/// What a rendering has printed so far; it fails where that is too much.
#[derive(Default)]
struct Printed(Vec<u8>);

impl io::Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > python::TEXT_MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `chat_template.jinja`, or the entry in `tokenizer_config.json`: where it was found, and its text.
pub(crate) fn shipped_template(base: &Path) -> Result<Option<(String, String)>> {
    let path = base.join("chat_template.jinja");
    if path.exists() {
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
        return Ok(Some((path.display().to_string(), text)));
    }
    let path = base.join("tokenizer_config.json");
    let config = super::read_json(&path)?.unwrap_or_default();
    let text = match &config["chat_template"] {
        serde_json::Value::String(text) => Some(text.clone()),
        // several named ones: a list of {name, template}
        serde_json::Value::Array(list) => list
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(String::from),
        _ => None,
    };
    Ok(text.map(|text| (path.display().to_string(), text)))
}

fn generation_tag() -> regex::Regex {
    regex::Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("the pattern is a constant")
}

/// minijinja has no `{% generation %}` block, but a filter may stand around a block too; what is set within is not seen
/// outside.
fn generation_blocks_as_filters(source: &str) -> String {
    let replace = |found: &regex::Captures| {
        let words = if found.get(2).is_some() { "endwith %}{% endfilter" } else { "filter generation_block %}{% with" };
        format!("{{%{} {words} {}%}}", &found[1], &found[3])
    };
    generation_tag().replace_all(source, replace).into_owned()
}

fn generation_block(state: &State, printed: String) -> String {
    match state.lookup(MARK_BLOCKS) {
        Some(_) => format!("{}{printed}{}", BLOCK[0], BLOCK[1]),
        None => printed,
    }
}

fn environment(now: Moment) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => out.write_str(text).map_err(Into::into),
        None => out.write_str(&python::str(value)).map_err(Into::into),
    });
    env.add_filter("tojson", |value: &Value, kwargs: Kwargs| python::tojson(value, kwargs));
    env.add_filter("string", python::str);
    env.add_filter("trim", python::strip);
    env.add_filter("generation_block", generation_block);
    methods::add_filters(&mut env);
    // in Python text, mappings and even undefined values are sequences and can be iterated over
    let sequence = |value: &Value| {
        use ValueKind::{Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | String | Map | Undefined)
    };
    env.add_test("sequence", sequence);
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("iterable", move |value: &Value| sequence(value) || value.kind() == ValueKind::Iterable);
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: String| python::strftime(now, &format));
    env
}

#[cfg(test)]
mod tests {
    use super::super::{fixtures, reader, spans};
    use super::*;
    use serde_json::json;

    #[test]
    fn every_template_renders_every_conversation_as_python_does() {
        let golden = fixtures::json("templates/golden.json");
        let mut compared = 0;
        for (name, rows) in golden["renderings"].as_object().unwrap() {
            let template = fixtures::template(name);
            for row in rows.as_array().unwrap() {
                let conversations = golden["conversations"].as_array().unwrap();
                let found = conversations.iter().find(|c| c["name"] == row["conversation"]).unwrap();
                let chat = reader::chat("golden", found["messages"].clone(), found["tools"].clone()).unwrap();
                let tools = Value::from_serialize(&chat.tools);
                let prompt = row["add_generation_prompt"].as_bool().unwrap();
                let text = template.render(&spans::values(&chat.messages), &tools, prompt).unwrap();
                assert_eq!(text, row["text"].as_str().unwrap(), "{name}: {}", row["conversation"]);
                compared += 1;
            }
        }
        assert!(compared >= 4 * 12 * 2, "{compared} renderings compared");
    }

    #[test]
    fn row_9_both_spellings_of_arguments_render_alike() {
        let render = |arguments: serde_json::Value| {
            let call = json!({"id": "c", "function": {"name": "weather", "arguments": arguments}});
            let messages = json!([{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]);
            let chat = reader::chat("here", messages, json!(null)).unwrap();
            let template = fixtures::template("unsloth-gemma-4.jinja");
            template.render(&spans::values(&chat.messages), &Value::from(()), false).unwrap()
        };
        let text = render(json!("{\"city\": \"Oslo\"}"));
        assert_eq!(text, render(json!({"city": "Oslo"})));
        assert!(text.contains("call:weather{city:<|\"|>Oslo<|\"|>}"), "{text}");
    }

    fn fails(source: &str) -> String {
        // on a worker's small stack, where the corpus is rendered
        let run = || fixtures::inline_template(source).render(&[], &Value::from(()), false).unwrap_err();
        let error = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
        assert_eq!(error.code(), "corpus::template_failed");
        error.message().to_string()
    }

    #[test]
    fn a_template_that_does_not_end_is_stopped() {
        let nested = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
        assert!(fails(nested).contains("did not end"));
        assert!(fails("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").contains("recursion"));
        let long = "{% set x = 'x' * 90000 %}{% for a in range(90000) %}{{ x }}{% endfor %}";
        assert!(fails(long).contains("prints more than 512 MiB"));
    }

    #[test]
    fn a_conversation_of_a_thousand_messages_needs_a_tenth_of_the_fuel() {
        let mut template = fixtures::template("google-2026-05-via-forcepusher.jinja");
        template.env.set_fuel(Some(FUEL / 10));
        let roles = ["user", "assistant"].into_iter().cycle().take(1000);
        let messages: Vec<_> = roles.map(|role| json!({"role": role, "content": "word"})).collect();
        let text = template.render(&spans::values(&messages), &Value::from(()), false).unwrap();
        assert_eq!(text.matches("<|turn>").count(), 1000);
    }

    #[test]
    fn what_a_template_raises_is_the_error() {
        assert!(
            fails("a\n{{ raise_exception('roles must ' 'alternate') }}").contains("inline:2: roles must alternate")
        );
    }

    #[test]
    fn a_template_that_does_not_compile_names_its_file() {
        let error =
            ChatTemplate::new("{% if %}", "x.jinja".into(), None, BTreeMap::new(), Moment::default()).err().unwrap();
        assert_eq!(error.code(), "corpus::bad_template");
        assert!(error.message().starts_with("x.jinja: "), "{error}");
    }

    #[test]
    fn the_template_of_an_older_base_stands_in_its_tokenizer_config() {
        let base = tempfile::tempdir().unwrap();
        assert_eq!(shipped_template(base.path()).unwrap(), None);
        let config =
            json!({"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]});
        let path = base.path().join("tokenizer_config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        assert_eq!(shipped_template(base.path()).unwrap(), Some((path.display().to_string(), "yes".into())));
    }
}
