//! Methods of Python's text that templates call: those of minijinja-contrib, and the ones it lacks.

use super::python;
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

/// Calls `method` of `value`.
pub fn call(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let known = minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    match (known, value.as_str()) {
        (Err(error), Some(text)) if error.kind() == ErrorKind::UnknownMethod => {
            of_text(text, method, args).unwrap_or(Err(error))
        }
        (known, _) => known,
    }
}

/// Filters that take any value for text, as Python's Jinja does.
pub fn add_filters(env: &mut Environment) {
    env.add_filter("upper", |value: &Value| python::str(value).to_uppercase());
    env.add_filter("lower", |value: &Value| python::str(value).to_lowercase());
    env.add_filter("title", |value: &Value| title(&python::str(value)));
    env.add_filter("capitalize", |value: &Value| capitalize(&python::str(value)));
    env.add_filter("replace", replace);
}

/// A negative count is none.
fn replace(
    value: &Value,
    from: Option<Value>,
    to: Option<Value>,
    count: Option<i64>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let [from, to] = [(from, "old"), (to, "new")].map(|(given, name)| given.map_or_else(|| kwargs.get(name), Ok));
    let (text, from, to) = (python::str(value), python::str(&from?), python::str(&to?));
    let count = count.map_or_else(|| kwargs.get("count"), |count| Ok(Some(count)))?;
    kwargs.assert_all_used()?;
    let count = count.and_then(|count: i64| usize::try_from(count).ok());
    Ok(count.map_or_else(|| text.replace(&from, &to), |count| text.replacen(&from, &to, count)))
}

/// Jinja's own: a word begins behind white space, a hyphen or an opening bracket.
fn title(text: &str) -> String {
    let begins = |c: char| c.is_whitespace() || "-({[<".contains(c);
    text.split_inclusive(begins).map(capitalize).collect()
}

fn capitalize(text: &str) -> String {
    let mut rest = text.chars();
    rest.next()
        .map_or(String::new(), |first| first.to_uppercase().chain(rest.as_str().to_lowercase().chars()).collect())
}

/// `None` where there is no such method here.
fn of_text(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "rsplit" => rsplit(text, args),
        "partition" => parts(text, args, |text, by| text.split_once(by), |whole| [whole, "", ""]),
        "rpartition" => parts(text, args, |text, by| text.rsplit_once(by), |whole| ["", "", whole]),
        "removeprefix" => one_text(args).map(|fix| text.strip_prefix(&*fix).unwrap_or(text).into()),
        "removesuffix" => one_text(args).map(|fix| text.strip_suffix(&*fix).unwrap_or(text).into()),
        "zfill" => zfill(text, args),
        "swapcase" => from_args::<()>(args).map(|()| swapcase(text).into()),
        _ => return None,
    })
}

fn one_text(args: &[Value]) -> Result<String, Error> {
    from_args::<(String,)>(args).map(|(text,)| text)
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, most, kwargs): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let by = by.or(kwargs.get("sep")?).filter(|by| !matches!(by.kind(), ValueKind::None | ValueKind::Undefined));
    let most = most.or(kwargs.get("maxsplit")?).and_then(|most| usize::try_from(most).ok());
    kwargs.assert_all_used()?;
    let pieces = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> = match by.as_ref().map(|by| by.as_str()) {
        Some(Some("")) => return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: empty separator")),
        Some(Some(by)) => text.rsplitn(pieces, by).collect(),
        Some(None) => return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: the separator is no text")),
        None => of_white_space(text, pieces),
    };
    parts.reverse();
    Ok(parts.into_iter().collect())
}

/// Runs of white space separate, the last words first; what is left once there are enough words is one piece.
fn of_white_space(text: &str, pieces: usize) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let (before, word) = match rest.rfind(char::is_whitespace) {
            Some(_) if found.len() + 1 >= pieces => ("", rest),
            Some(at) => rest.split_at(at + rest[at..].chars().next().map_or(0, char::len_utf8)),
            None => ("", rest),
        };
        found.push(word);
        rest = before.trim_end();
    }
    found
}

fn parts<'a>(
    text: &'a str,
    args: &[Value],
    split: impl Fn(&'a str, &str) -> Option<(&'a str, &'a str)>,
    whole: impl Fn(&'a str) -> [&'a str; 3],
) -> Result<Value, Error> {
    let by = one_text(args)?;
    if by.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "partition: empty separator"));
    }
    let parts = match split(text, &by) {
        Some((before, after)) => [before, &by, after].map(Value::from),
        None => whole(text).map(Value::from),
    };
    Ok(parts.into_iter().collect())
}

fn zfill(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (usize,) = from_args(args)?;
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    let missing = width.saturating_sub(text.chars().count()).min(python::TEXT_MAX_BYTES);
    Ok(format!("{sign}{}{digits}", "0".repeat(missing)).into())
}

fn swapcase(text: &str) -> String {
    let swap = |c: char| match c.is_uppercase() {
        true => c.to_lowercase().collect::<String>(),
        false => c.to_uppercase().collect(),
    };
    text.chars().map(swap).collect()
}

#[cfg(test)]
mod tests {
    use crate::corpus::fixtures;
    use minijinja::Value;

    #[test]
    fn they_answer_as_python_does() {
        let golden = fixtures::json("templates/golden.json");
        let golden = golden["methods"].as_array().unwrap();
        for row in golden {
            let source = row["source"].as_str().unwrap();
            let text = fixtures::inline_template(source).render(&[], &Value::from(()), false);
            assert_eq!(text.ok().as_deref(), row["text"].as_str(), "{source}");
        }
        assert!(golden.len() >= 40);
    }
}
