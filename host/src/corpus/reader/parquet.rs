//! Rows of a Parquet file, each as the JSON object that a line of JSONL would hold.
//!
//! A column that a row has no value for, and a field that a struct has none for, is left out: the format gives every row the
//! fields of all. One page of each column is in memory at a time.

use super::rows::{ROW_BYTES_MAX, too_long};
use super::stream::{Compression, Stream};
use super::{Columns, shape};
use crate::error::{Error, Result};
use parquet::basic::{Compression as Codec, ConvertedType, LogicalType, Type as Physical};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::{ColumnDescriptor, ColumnPath, Type, TypePtr};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::fs::File;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Rows that are decoded at once of each column.
const BATCH_ROWS: usize = 256;
/// What is quoted of a decoder's words, in characters.
const QUOTED_CHARS: usize = 200;

/// Whether these are the first bytes of a Parquet file, encrypted or not.
pub fn is_parquet(start: &[u8]) -> bool {
    start.starts_with(b"PAR1") || start.starts_with(b"PARE")
}

/// The rows of a Parquet file.
pub struct ParquetRows {
    stream: Stream,
    rows: RowIter<'static>,
    spellings: Vec<Spelling>,
    /// Number of the row read last, from 1.
    row: u64,
    /// At least 1.
    rows_in_file: u64,
    /// Size of the file.
    bytes: u64,
}

/// What a column's values are besides what their physical type says.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    Plain,
    Json,
    Uuid,
}

impl ParquetRows {
    /// Opens the file of `stream`. Columns of bytes that no record has a use for, such as pictures, are not read.
    ///
    /// # Errors
    /// `corpus::bad_parquet`, `corpus::unsupported_parquet`, class `io`.
    pub fn open(mut stream: Stream, columns: &Columns) -> Result<Self> {
        let path = stream.path().to_path_buf();
        let compression = stream.compression();
        if compression != Compression::None {
            let message = format!("{}: a Parquet file inside of {compression}", path.display());
            return Err(
                Error::new("corpus::unsupported_parquet", message).help("unpack it: its columns are compressed")
            );
        }
        let start = stream.fill()?;
        if start.starts_with(b"PARE") {
            return Err(Error::new(
                "corpus::unsupported_parquet",
                format!("{}: the file is encrypted", path.display()),
            )
            .expected("a Parquet file that is not encrypted"));
        }
        if !is_parquet(start) {
            let start = String::from_utf8_lossy(&start[..start.len().min(40)]).into_owned();
            return Err(Error::new("corpus::bad_parquet", format!("{}: it begins with {start:?}", path.display()))
                .expected("\"PAR1\", as every Parquet file begins")
                .help("a pointer of Git LFS or an error page may have been saved in its place: fetch it again"));
        }
        let open = || {
            let file = File::open(&path)?;
            Ok((file.metadata()?.len(), file))
        };
        let (bytes, file) = open().map_err(|e| Error::io("open", &path, e))?;
        let place = path.display().to_string();
        let reader = decoding(&place, || SerializedFileReader::new(file))?;
        let rows_in_file = reader.metadata().file_metadata().num_rows().max(1) as u64;
        let fields = fields_read(&place, reader.metadata(), columns)?;
        let spellings = fields.iter().map(|field| Spelling::of(field)).collect();
        let rows = decoding(&place, || {
            let name = reader.metadata().file_metadata().schema_descr().root_schema().name().to_string();
            let projection = Type::group_type_builder(&name).with_fields(fields).build()?;
            RowIter::from_file_into(Box::new(reader)).project(Some(projection))
        })?;
        Ok(Self { stream, rows: rows.with_batch_size(BATCH_ROWS), spellings, row: 0, rows_in_file, bytes })
    }

    /// The next row as JSON; `None` at the end.
    ///
    /// # Errors
    /// `corpus::bad_parquet`, `corpus::row_too_long`, each with the row.
    pub fn next_row(&mut self) -> Result<Option<Vec<u8>>> {
        self.row += 1;
        let path = self.stream.path();
        let place = format!("{}:{}", path.display(), self.row);
        let Some(row) = decoding(&place, || self.rows.next().transpose())? else { return Ok(None) };
        let object = object(row, &self.spellings).map_err(|what| {
            Error::new("corpus::bad_parquet", format!("{place}: {what}")).expected("text, as UTF-8 or JSON")
        })?;
        let json = serde_json::to_vec(&object).expect("an object with text as keys is JSON");
        if json.len() > ROW_BYTES_MAX { Err(too_long(path, self.row)) } else { Ok(Some(json)) }
    }

    /// The file's size by the share of its rows that were read.
    pub fn bytes_read(&self) -> u64 {
        let share = self.row as f64 / self.rows_in_file as f64;
        (self.bytes as f64 * share.min(1.0)) as u64
    }

    /// Size in bytes and sha256 of the file.
    pub fn finish(self) -> Result<(u64, String)> {
        self.stream.finish()
    }
}

/// The columns that are read; each must be compressed in a way that can be.
fn fields_read(place: &str, metadata: &ParquetMetaData, columns: &Columns) -> Result<Vec<TypePtr>> {
    let schema = metadata.file_metadata().schema_descr();
    let is_read = |field: &Type| {
        let known = shape::COLUMNS.contains(&field.name()) || columns.values().any(|column| column == field.name());
        known || !schema.columns().iter().any(|leaf| column_of(leaf.path()) == field.name() && holds_bytes(leaf))
    };
    let fields: Vec<_> = schema.root_schema().get_fields().iter().filter(|field| is_read(field)).cloned().collect();
    for chunk in metadata.row_groups().iter().flat_map(RowGroupMetaData::columns) {
        let codec = chunk.compression();
        let read = fields.iter().any(|field| field.name() == column_of(chunk.column_path()));
        if read && matches!(codec, Codec::BROTLI(_) | Codec::LZO) {
            let codec = codec.to_string();
            let (codec, column) = (codec.split('(').next().unwrap_or_default(), chunk.column_path().string());
            let message = format!("{place}: column {column} is compressed with {codec}");
            return Err(Error::new("corpus::unsupported_parquet", message)
                .expected("snappy, gzip, zstd, lz4 or no compression")
                .help("write the file again with one of them"));
        }
    }
    Ok(fields)
}

/// What `read` gives, with the decoder's errors as ours. It also asserts where a file breaks the format's rules, and what a file
/// holds must not end the program.
fn decoding<T>(place: &str, read: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T> {
    let said = match catch_quietly(read) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => match panic.downcast::<String>() {
            Ok(said) => *said,
            Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or_default().to_string(),
        },
    };
    let said: String = said.chars().take(QUOTED_CHARS).collect();
    Err(Error::new("corpus::bad_parquet", format!("{place}: {said}"))
        .expected("a whole Parquet file that is not encrypted")
        .help("it may have been cut short or changed: fetch it, or write it, again"))
}

/// As [`catch_unwind`], and nothing is printed of the panic.
fn catch_quietly<T>(read: impl FnOnce() -> T) -> std::thread::Result<T> {
    thread_local!(static CATCHING: Cell<bool> = const { Cell::new(false) });
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !CATCHING.get() {
                print(panic);
            }
        }));
    });
    CATCHING.set(true);
    let result = catch_unwind(AssertUnwindSafe(read));
    CATCHING.set(false);
    result
}

/// The column of a record that a path in the schema lies in.
fn column_of(path: &ColumnPath) -> &str {
    path.parts().first().map_or("", String::as_str)
}

/// Whether the values are bytes of which nothing says that they are text.
fn holds_bytes(leaf: &ColumnDescriptor) -> bool {
    let physical = leaf.physical_type();
    let plain = leaf.converted_type() == ConvertedType::NONE && leaf.logical_type_ref().is_none();
    plain && matches!(physical, Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY)
}

impl Spelling {
    fn of(column: &Type) -> Self {
        match column.get_basic_info().logical_type_ref() {
            Some(LogicalType::Json) => Spelling::Json,
            Some(LogicalType::Uuid) => Spelling::Uuid,
            _ => Spelling::Plain,
        }
    }
}

/// The row's columns that have a value; where one cannot be told as JSON, its name and why.
fn object(row: Row, spellings: &[Spelling]) -> Result<Map<String, Value>, String> {
    let mut object = Map::new();
    for ((column, field), spelling) in row.into_columns().into_iter().zip(spellings) {
        let value = match (spelling, &field) {
            (Spelling::Json, Field::Str(text)) => serde_json::from_str(text).map_err(|e| e.to_string()),
            (Spelling::Uuid, Field::Bytes(bytes)) if bytes.len() == 16 => Ok(uuid(bytes.data()).into()),
            _ => json(&field),
        };
        let value = value.map_err(|what| format!("column {column}: {what}"))?;
        if !value.is_null() {
            object.insert(column, value);
        }
    }
    Ok(object)
}

fn json(field: &Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        // the shortest decimal number that is this one, as a writer of JSON would spell it; no JSON number is infinite or NaN
        Field::Float16(value) => number(&value.to_string()),
        Field::Float(value) => number(&value.to_string()),
        Field::Double(value) => (*value).into(),
        Field::Decimal(_) => number(field.to_string().trim_end_matches('.')),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_err(|e| e.to_string())?.into(),
        Field::Date(_) | Field::TimeMillis(_) | Field::TimeMicros(_) => field.to_string().into(),
        Field::TimestampMillis(_) | Field::TimestampMicros(_) => field.to_string().into(),
        Field::Group(row) => {
            let fields = row.get_column_iter().map(|(name, field)| Ok((name.clone(), json(field)?)));
            let fields = fields.collect::<Result<Vec<_>, String>>()?;
            Value::Object(fields.into_iter().filter(|(_, value)| !value.is_null()).collect())
        }
        Field::ListInternal(list) => list.elements().iter().map(json).collect::<Result<Vec<_>, _>>()?.into(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match field {
                Field::Str(text) => text.clone(),
                other => other.to_string(),
            };
            let entries = map.entries().iter().map(|(name, value)| Ok((key(name), json(value)?)));
            Value::Object(entries.collect::<Result<_, String>>()?)
        }
    })
}

fn number(text: &str) -> Value {
    text.parse::<Number>().map_or(Value::Null, Value::Number)
}

fn uuid(bytes: &[u8]) -> String {
    let hex = crate::hash::hex(bytes);
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{mutations, rows};
    use super::super::{Content, Format, parse_row};
    use super::*;
    use crate::corpus::fixtures;
    use std::path::Path;

    fn read(name: &str) -> Result<Vec<Vec<u8>>> {
        let (rows, format) = rows("chats", &file(name))?;
        assert_eq!(format, Format::Parquet, "whatever the name is");
        assert!(rows.iter().map(|(row, _)| *row).eq(1..=rows.len() as u64));
        Ok(rows.into_iter().map(|(_, json)| json).collect())
    }

    fn file(name: &str) -> Vec<u8> {
        std::fs::read(fixtures::path(&format!("parquet/{name}.parquet"))).unwrap()
    }

    /// What pyarrow reads, without the nulls of fields: every codec, several row groups, both page formats, delta encoding,
    /// nested lists and structs, every type.
    #[test]
    fn row_8_rows_hold_what_pyarrow_reads_and_no_nulls_for_the_fields_of_other_rows() {
        let expected = fixtures::json("parquet/expected.json");
        for (name, expected) in expected.as_object().unwrap() {
            let rows: Vec<Value> = read(name).unwrap().iter().map(|row| serde_json::from_slice(row).unwrap()).collect();
            assert_eq!(Value::from(rows), *expected, "{name}");
        }
        assert!(read("no-rows").unwrap().is_empty());
    }

    #[test]
    fn every_shape_is_read_from_parquet() {
        let parse = |name: &str, row: usize| {
            let rows = read(name).unwrap();
            parse_row(Path::new("a.parquet"), row as u64, &rows[row - 1], &Columns::new()).unwrap().unwrap()
        };
        let first = parse("messages", 1);
        assert_eq!(first.id, "first");
        let Content::Chat(chat) = first.content else { panic!("not a chat") };
        let calls = &chat.messages[1]["tool_calls"];
        assert_eq!(calls[0]["function"]["arguments"], serde_json::json!({"time": "12:00"}));
        assert_eq!(calls[1]["function"]["arguments"], serde_json::json!({"minutes": 5}));
        assert_eq!(parse("messages", 3).id, "a:3");
        for name in ["sharegpt", "alpaca", "parts"] {
            assert!(matches!(parse(name, 1).content, Content::Chat(_)), "{name}");
        }
        assert_eq!(parse("text", 9).content, Content::Text("line 1 of a text".into()));
        let completion = Content::Completion { prompt: String::new(), completion: "x".into() };
        assert_eq!(parse("completion", 2).content, completion);
        let tokens = Content::Tokens { ids: vec![2, 5, 6], labels: Some(vec![-100, 5, 6]) };
        assert_eq!(parse("tokens", 1).content, tokens);
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_where_a_record_would_use_them() {
        assert_eq!(read("images").unwrap(), [br#"{"text":"a picture"}"#]);
        let error = read("latin").unwrap_err();
        assert_eq!(error.code(), "corpus::bad_parquet");
        assert!(error.message().contains("chats:1: column text: "), "{error}");
    }

    #[test]
    fn a_file_that_cannot_be_read_says_why() {
        let whole = file("text");
        let gzip = super::super::tests::gzip(&whole);
        for (name, bytes, code, says) in [
            (
                "a.parquet",
                &b"version https://git-lfs.github.com/spec/v1"[..],
                "bad_parquet",
                "it begins with \"version ",
            ),
            ("a.parquet", &whole[..whole.len() - 1], "bad_parquet", "a.parquet: "),
            ("a.parquet", &whole[..whole.len() / 2], "bad_parquet", "a.parquet: "),
            ("a.parquet.gz", &gzip, "unsupported_parquet", "inside of gzip"),
            ("a.parquet", &file("brotli"), "unsupported_parquet", "column text is compressed with BROTLI"),
            ("a.parquet", &file("encrypted"), "unsupported_parquet", "encrypted"),
            ("a.parquet", &file("encrypted-column"), "bad_parquet", "a.parquet:1: "),
        ] {
            let error = rows(name, bytes).unwrap_err();
            assert_eq!(error.code(), format!("corpus::{code}"), "{error}");
            assert!(error.message().contains(says), "{error}");
        }
        let mut changed = whole;
        changed[600..900].fill(0xFF);
        let error = rows("a.parquet", &changed).unwrap_err();
        assert_eq!(error.code(), "corpus::bad_parquet", "{error}");
    }

    #[test]
    fn whatever_a_file_holds_is_read_or_refused() {
        let seeds = ["messages", "text", "types", "tokens"].map(file);
        mutations(&seeds.each_ref().map(Vec::as_slice), 2000, |bytes| {
            if let Err(error) = rows("mutated.parquet", bytes) {
                assert!(error.code().starts_with("corpus::") && error.message().contains("mutated.parquet"), "{error}");
            }
        });
    }
}
