//! What a chat template is told when it asks for the date.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use toml::value::{Date, Datetime, Time};

/// A moment without a time zone, to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Moment {
    /// Year, month 1 to 12, day 1 to 31.
    pub date: (i32, u32, u32),
    /// Hour 0 to 23, minute, second.
    pub time: (u32, u32, u32),
}

/// The first second of 2026.
impl Default for Moment {
    fn default() -> Self {
        Self { date: (2026, 1, 1), time: (0, 0, 0) }
    }
}

/// A date or a local date and time as TOML spells them.
impl FromStr for Moment {
    type Err = &'static str;

    /// What is expected instead, where the text is neither.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = "a date, 2026-01-31, or one with a time, 2026-01-31T18:30:00, without a zone";
        let parsed: Datetime = text.parse().map_err(|_| expected)?;
        let Datetime { date: Some(Date { year, month, day }), time, offset: None } = parsed else {
            return Err(expected);
        };
        let (hour, minute, second) = match time {
            None => (0, 0, 0),
            Some(Time { hour, minute, second, nanosecond: None | Some(0) }) => (hour, minute, second.unwrap_or(0)),
            Some(_) => return Err(expected),
        };
        Ok(Self { date: (year.into(), month.into(), day.into()), time: (hour.into(), minute.into(), second.into()) })
    }
}

impl TryFrom<String> for Moment {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Moment> for String {
    fn from(moment: Moment) -> Self {
        moment.to_string()
    }
}

/// The date, and the time where it is not midnight.
impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((year, month, day), (hour, minute, second)) = (self.date, self.time);
        write!(f, "{year:04}-{month:02}-{day:02}")?;
        if self.time != (0, 0, 0) {
            write!(f, "T{hour:02}:{minute:02}:{second:02}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_reads_what_it_prints_and_nothing_that_depends_on_a_zone() {
        for text in ["2026-01-01", "2024-02-29T23:59:59", "0001-12-31T00:00:01"] {
            assert_eq!(text.parse::<Moment>().unwrap().to_string(), text);
        }
        assert_eq!("2026-01-31 18:30:00".parse::<Moment>().unwrap().time, (18, 30, 0));
        for text in [
            "",
            "today",
            "12:00:00",
            "2026-02-30",
            "2026-01-01T00:00:00Z",
            "2026-01-01T00:00:00+02:00",
            "2026-01-01T00:00:00.5",
        ] {
            assert!(text.parse::<Moment>().unwrap_err().contains("2026-01-31T18:30:00"), "{text}");
        }
    }
}
