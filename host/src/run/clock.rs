//! Wall-clock time as text, and the moments that people name.

use crate::error::{Error, Result};
use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};

/// The current time in UTC as RFC 3339 with seconds: `2026-03-01T09:30:00Z`.
pub fn utc_now() -> String {
    in_seconds(Timestamp::now())
}

/// The current time in milliseconds since 1970-01-01 UTC.
pub fn unix_ms_now() -> u64 {
    Timestamp::now().as_millisecond().max(0) as u64
}

/// An RFC 3339 time in milliseconds since 1970-01-01 UTC, 0 for what lies before; nothing for another text, or one without
/// an offset from UTC.
pub fn unix_ms(text: &str) -> Option<u64> {
    text.parse::<Timestamp>().ok().map(|time| time.as_millisecond().max(0) as u64)
}

/// A moment to end at, as `--until` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Until {
    /// The moment in UTC, RFC 3339 with seconds.
    pub utc: String,
    /// The moment on this machine's clock, with its time zone.
    pub local: String,
}

impl Until {
    /// Reads `06:30`, the next time that this machine's clock shows it, or an RFC 3339 time.
    ///
    /// # Errors
    /// `usage::until`: another text, a moment that has passed, or a machine whose time zone is not known.
    pub fn parse(text: &str) -> Result<Self> {
        Self::after(text, &Timestamp::now().to_zoned_datetime(time_zone()?))
    }

    fn after(text: &str, now: &ZonedDateTime) -> Result<Self> {
        let wrong = |what: &str| {
            Error::new("usage::until", format!("--until {text}: {what}"))
                .expected("a time of day (06:30), or date, time and offset from UTC (2026-12-01T06:30:00+01:00)")
        };
        let at = match (text.parse::<Timestamp>(), text.parse::<Time>()) {
            (Ok(moment), _) => moment.to_zoned_datetime(now.time_zone().clone()),
            (Err(_), Ok(time)) if is_time_of_day(text) => next(time, now).map_err(|e| wrong(&e.to_string()))?,
            _ => return Err(wrong("this is no time")),
        };
        if at <= *now {
            return Err(wrong(&format!("this has passed; it is {}", in_seconds(now.timestamp()))));
        }
        let zone = at.time_zone().iana_name().map_or_else(|| at.offset().to_string(), String::from);
        let local = format!("{} ({zone})", at.strftime("%Y-%m-%dT%H:%M:%S%:z"));
        Ok(Self { utc: in_seconds(at.timestamp()), local })
    }
}

/// `HH:MM`, with seconds or without: jiff also reads the time of a date.
fn is_time_of_day(text: &str) -> bool {
    text.contains(':') && text.chars().all(|c| c.is_ascii_digit() || c == ':')
}

/// The next moment after `now` at which its clock shows `time`; where the clock jumps over it, the moment after the jump.
fn next(time: Time, now: &ZonedDateTime) -> Result<ZonedDateTime, jiff::Error> {
    let today = now.with().time(time).build()?;
    if today > *now {
        return Ok(today);
    }
    now.date().tomorrow()?.to_datetime(time).to_zoned_datetime(now.time_zone().clone())
}

/// This machine's time zone; UTC where nobody set one.
fn time_zone() -> Result<TimeZone> {
    match TimeZone::try_system() {
        Ok(zone) => Ok(zone),
        Err(_) if std::env::var_os("TZ").is_none() => Ok(TimeZone::UTC),
        Err(e) => Err(Error::new("usage::until", format!("the time zone of this machine is not known: {e}"))
            .help("set TZ to a zone of /usr/share/zoneinfo, or give --until date, time and offset from UTC")),
    }
}

fn in_seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_counted_from_1970_in_utc() {
        for (text, ms) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1969-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:01.250Z", 1250),
            ("2024-02-29T12:30:00-07:00", 1_709_235_000_000),
            ("2100-03-01T00:00:00Z", 4_107_542_400_000),
        ] {
            assert_eq!(unix_ms(text), Some(ms), "{text}");
        }
        for text in ["2024-02-29T12:30:00", "2024-02-29", "12:30:00", "2023-02-29T12:30:00Z", "tomorrow"] {
            assert_eq!(unix_ms(text), None, "{text}");
        }
        assert_eq!(unix_ms(&in_seconds(Timestamp::new(951_782_400, 999_999_999).unwrap())), Some(951_782_400_000));
    }

    /// In central European time by the rule of the zone itself, so that no zone file is needed.
    fn at(text: &str) -> ZonedDateTime {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        text.parse::<Timestamp>().unwrap().to_zoned_datetime(zone)
    }

    #[test]
    fn a_time_of_day_is_its_next_occurrence() {
        for (now, until, utc) in [
            // 22:10 in the evening, and 6:29 in the morning.
            ("2026-11-30T21:10:00Z", "06:30", "2026-12-01T05:30:00Z"),
            ("2026-12-01T05:29:00Z", "06:30", "2026-12-01T05:30:00Z"),
            // The very moment has passed.
            ("2026-12-01T05:30:00Z", "06:30:00", "2026-12-02T05:30:00Z"),
            // The night in which 2:00 to 3:00 does not exist, and the one in which it is there twice.
            ("2026-03-28T20:00:00Z", "02:30", "2026-03-29T01:30:00Z"),
            ("2026-10-24T20:00:00Z", "02:30", "2026-10-25T00:30:00Z"),
            ("2026-11-30T21:10:00Z", "2026-12-24T18:00:00-05:00", "2026-12-24T23:00:00Z"),
        ] {
            assert_eq!(Until::after(until, &at(now)).unwrap().utc, utc, "{until} after {now}");
        }
        let local = Until::after("06:30", &at("2026-11-30T21:10:00Z")).unwrap().local;
        assert_eq!(local, "2026-12-01T06:30:00+01:00 (+01)");
    }

    #[test]
    fn what_is_no_moment_to_come_is_refused() {
        for text in ["", "6", "24:30", "06:61", "half past six", "2026-12-01", "2026-12-01T06:30", "T06:30", "063000"] {
            let error = Until::after(text, &at("2026-11-30T21:10:00Z")).unwrap_err();
            assert_eq!(error.code(), "usage::until", "{text}");
        }
        let error = Until::after("2026-11-30T21:09:59Z", &at("2026-11-30T21:10:00Z")).unwrap_err();
        assert!(error.message().ends_with("this has passed; it is 2026-11-30T21:10:00Z"), "{error}");
    }
}
