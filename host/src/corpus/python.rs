//! How Python writes values, since chat templates are written for Python's Jinja: `str`, `repr`, `json.dumps`, `strftime`.

use super::moment::Moment;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use regex::Regex;
use std::fmt::Write;
use std::sync::LazyLock;

/// The longest text that a template may make.
pub const TEXT_MAX_BYTES: usize = 512 << 20;

/// Python's `str(value)`.
pub fn str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_string(),
        _ => repr(value),
    }
}

/// Python's `str(value).strip(chars)`, which also takes the information separators for white space.
pub fn strip(value: &Value, chars: Option<String>) -> String {
    let text = str(value);
    let stripped = match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)),
        None => text.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)),
    };
    stripped.to_string()
}

/// Python's `repr(value)`.
pub fn repr(value: &Value) -> String {
    repr_at(value, 0)
}

/// Columns that `tojson` indents by at most.
const INDENT_MAX: usize = 100;
/// No record has values in values so deep; a template can make them.
const DEPTH_MAX: usize = 200;

fn repr_at(value: &Value, depth: usize) -> String {
    let repr = |value: &Value| repr_at(value, depth + 1);
    if depth > DEPTH_MAX {
        return "...".into();
    }
    match value.kind() {
        ValueKind::Undefined => "Undefined".into(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value, ["inf", "-inf", "nan"]),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            let pairs = items(value).map(|(key, item)| format!("{}: {}", repr(&key), repr(&item)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            format!("[{}]", elements(value).map(|v| repr(&v)).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn items(value: &Value) -> impl Iterator<Item = (Value, Value)> + '_ {
    elements(value).map(|key| {
        let item = value.get_item(&key).unwrap_or(Value::UNDEFINED);
        (key, item)
    })
}

fn elements(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

/// Integers as they are, floats as Python prints them; `special` spells infinity, its negative and not-a-number.
fn number(value: &Value, special: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if float.is_nan() {
        return special[2].into();
    }
    if float.is_infinite() {
        return special[usize::from(float < 0.0)].into();
    }
    // Rust and Python switch to an exponent at the same magnitudes; Python gives it a sign and two digits
    let plain = format!("{float:?}");
    match plain.split_once('e') {
        None => plain,
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if !is_printable(c) => {
                _ = match c as u32 {
                    code @ ..0x100 => write!(out, "\\x{code:02x}"),
                    code @ ..0x1_0000 => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                }
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Python's `str.isprintable` of one character: no separator but the space, no control, format, private or unassigned one.
fn is_printable(c: char) -> bool {
    static OTHER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{Z}\p{C}--\x20]").expect("the pattern is a constant"));
    matches!(c, ' '..='~') || !OTHER.is_match(c.encode_utf8(&mut [0; 4]))
}

/// The `tojson` of Hugging Face's chat templates: `json.dumps` without HTML escapes, non-ASCII kept by default.
pub fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    if indent.is_some_and(|indent| indent > INDENT_MAX) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: an indent of more than {INDENT_MAX}")));
    }
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two texts")),
    };
    let style = JsonStyle {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        key,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

struct JsonStyle {
    ascii: bool,
    sort: bool,
    indent: Option<usize>,
    /// What stands between two members, and between a key and its value.
    item: String,
    key: String,
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: values within values too deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, ["Infinity", "-Infinity", "NaN"])),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let list: Vec<_> = elements(value).collect();
                self.block(out, ['[', ']'], list, depth, |out, item| self.write(out, &item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut pairs: Vec<_> = items(value).collect();
                if self.sort {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.block(out, ['{', '}'], pairs, depth, |out, (key, item)| {
                    self.string(out, &str(&key));
                    out.push_str(&self.key);
                    self.write(out, &item, depth + 1)
                })?;
            }
            kind => {
                let message = format!("{kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn block<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        members: Vec<T>,
        depth: usize,
        mut write: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        let empty = members.is_empty();
        for (index, member) in members.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            line(out, depth + 1);
            write(out, member)?;
        }
        if !empty {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, out: &mut String, text: &str) {
        for c in serde_json::Value::from(text).to_string().chars() {
            if self.ascii && !c.is_ascii() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
            } else {
                out.push(c);
            }
        }
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Python's `strftime` for the directives that chat templates use.
///
/// # Errors
/// Names a directive it does not know.
pub fn strftime(moment: Moment, format: &str) -> Result<String, Error> {
    let ((year, month, day), (hour, minute, second)) = (moment.date, moment.time);
    let month_name = MONTHS[(month as usize - 1) % 12];
    let day_name = DAYS[weekday(year, month, day)];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let two = |n: u32| if bare { n.to_string() } else { format!("{n:02}") };
        let piece = match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year.rem_euclid(100) as u32),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".into(),
            other => {
                let message = format!("strftime_now: unknown directive %{}", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        out.push_str(&piece);
    }
    Ok(out)
}

/// Day of the week in the Gregorian calendar, 0 = Sunday (Sakamoto's method).
fn weekday(year: i32, month: u32, day: u32) -> usize {
    const OFFSET: [i32; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
    let year = if month < 3 { year - 1 } else { year };
    let sum = year + year / 4 - year / 100 + year / 400 + OFFSET[(month as usize - 1) % 12] + day as i32;
    sum.rem_euclid(7) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(json: serde_json::Value) -> Value {
        Value::from_serialize(json)
    }

    #[test]
    fn values_print_as_python_prints_them() {
        let mixed = value(json!({"a": [1, 2.0, true, null, "it's"], "b": {"x": 1e-7, "y": 1e16}}));
        assert_eq!(str(&mixed), r#"{'a': [1, 2.0, True, None, "it's"], 'b': {'x': 1e-07, 'y': 1e+16}}"#);
        assert_eq!(str(&value(json!("plain"))), "plain");
        assert_eq!(strip(&value(json!("\u{1f} a\u{3000}")), None), "a");
        assert_eq!(strip(&value(json!(["a", null])), Some("[]".into())), "'a', None");
        let unseen = value(json!("é\u{a0}\u{ad}\u{2028}\u{85}\u{e0001}🙂"));
        assert_eq!(repr(&unseen), r"'é\xa0\xad\u2028\x85\U000e0001🙂'");
        assert_eq!(repr(&value(json!("say \"it's\"\n"))), r#"'say "it\'s"\n'"#);
    }

    #[test]
    fn json_is_json_dumps_without_html_escapes() {
        let data = value(json!({"b": "<ä & 'q'>", "a": [1, 2.5], "e": [], "n": null}));
        let dumps = |pairs: Vec<(&str, Value)>| tojson(&data, pairs.into_iter().collect()).unwrap();
        assert_eq!(dumps(vec![]), r#"{"b": "<ä & 'q'>", "a": [1, 2.5], "e": [], "n": null}"#);
        let ascii = dumps(vec![("ensure_ascii", true.into()), ("sort_keys", true.into())]);
        assert_eq!(ascii, r#"{"a": [1, 2.5], "b": "<\u00e4 & 'q'>", "e": [], "n": null}"#);
        let indented = "{\n  \"b\": \"<ä & 'q'>\",\n  \"a\": [\n    1,\n    2.5\n  ],\n  \"e\": [],\n  \"n\": null\n}";
        assert_eq!(dumps(vec![("indent", 2.into())]), indented);
        let separators = Value::from(vec![",", ":"]);
        let compact = r#"{"b":"<ä & 'q'>","a":[1,2.5],"e":[],"n":null}"#;
        assert_eq!(dumps(vec![("separators", separators)]), compact);
        assert!(tojson(&Value::UNDEFINED, Kwargs::from_iter(Vec::<(&str, Value)>::new())).is_err());
    }

    #[test]
    fn dates_print_as_strftime_prints_them() {
        let moment = "2024-02-09T00:05:07".parse().unwrap();
        assert_eq!(strftime(moment, "%A %a %-d %B %b %Y %y").unwrap(), "Friday Fri 9 February Feb 2024 24");
        assert_eq!(strftime(moment, "%F %T %I%p 100%%").unwrap(), "2024-02-09 00:05:07 12AM 100%");
        assert!(strftime(moment, "%Q").unwrap_err().to_string().contains("%Q"));
    }
}
