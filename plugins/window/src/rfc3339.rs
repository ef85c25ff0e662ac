//! Date and time as in RFC 3339: `2026-01-31T06:00:00Z`, `2026-01-31T08:00:00.5+02:00`.

/// Milliseconds since 1970-01-01 UTC; `None` for what is no such time, or lies before.
pub fn milliseconds(text: &str) -> Option<u64> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let (time, offset_minutes) = split_offset(time)?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(time, ':', [2, 2, 2])?;
    let valid = (1..=12).contains(&month) && (1..=days_in(year, month)).contains(&day);
    if !valid || hour > 23 || minute > 59 || second > 60 || !digits(fraction) {
        return None;
    }
    let thousandths: i64 = format!("{fraction:0<3}")[..3].parse().ok()?;
    let minutes = (days_since_1970(year, month, day) * 24 + hour) * 60 + minute - offset_minutes;
    u64::try_from((minutes * 60 + second) * 1000 + thousandths).ok()
}

/// The time without its offset, and the offset in minutes east.
fn split_offset(time: &str) -> Option<(&str, i64)> {
    if let Some(time) = time.strip_suffix(['Z', 'z']) {
        return Some((time, 0));
    }
    let at = time.rfind(['+', '-'])?;
    let [hours, minutes] = numbers(&time[at + 1..], ':', [2, 2])?;
    let east = hours * 60 + minutes;
    (hours < 24 && minutes < 60).then_some((&time[..at], if time[at..].starts_with('-') { -east } else { east }))
}

/// The numbers of a text, each with just so many digits.
fn numbers<const N: usize>(text: &str, separator: char, widths: [usize; N]) -> Option<[i64; N]> {
    let parts: Vec<&str> = text.split(separator).collect();
    let parts: [&str; N] = parts.try_into().ok()?;
    if parts.iter().zip(widths).any(|(part, width)| part.len() != width || !digits(part)) {
        return None;
    }
    Some(parts.map(|part| part.parse().unwrap_or_default()))
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 => 28 + i64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let before = year - 1;
    let leap_days = before / 4 - before / 100 + before / 400 - 477;
    (year - 1970) * 365 + leap_days + (1..month).map(|month| days_in(year, month)).sum::<i64>() + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_from_1970() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:30:15.25Z", 951_827_415_250),
            ("2001-09-09T01:46:40Z", 1_000_000_000_000),
            ("2023-11-14T22:13:20Z", 1_700_000_000_000),
            ("2023-11-15T00:13:20+02:00", 1_700_000_000_000),
            ("2023-11-14T17:43:20-04:30", 1_700_000_000_000),
            ("2038-01-19 03:14:08z", 2_147_483_648_000),
        ] {
            assert_eq!(milliseconds(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "2026-01-01",
            "2026-01-01T00:00:00",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-1-1T00:00:00Z",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00+2:00",
            "1969-12-31T23:59:59Z",
            "2026-01-01T00:00:00é",
        ] {
            assert_eq!(milliseconds(text), None, "{text}");
        }
    }
}
