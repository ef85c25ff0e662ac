//! Wall-clock time as text.

use std::time::{SystemTime, UNIX_EPOCH};

/// The current time in UTC as RFC 3339 with seconds: `2026-03-01T09:30:00Z`.
pub fn utc_now() -> String {
    rfc3339(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// The current time in milliseconds since 1970-01-01 UTC.
pub fn unix_ms_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Days from 1970-01-01 to a date of the proleptic Gregorian calendar (`days_from_civil` of the same source as below).
pub fn unix_days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = 365 * year_of_era + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Seconds since 1970-01-01 as RFC 3339. Days become a date in the proleptic Gregorian calendar, counted in eras of 400
/// years that begin on the first of March, so that a leap day comes last (Howard Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms", `civil_from_days`).
fn rfc3339(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(unix_s), text);
            let number = |range: std::ops::Range<usize>| text[range].parse().unwrap();
            assert_eq!(unix_days(number(0..4), number(5..7), number(8..10)), (unix_s / 86_400) as i64, "{text}");
        }
        assert_eq!(unix_days(1969, 12, 31), -1);
    }
}
