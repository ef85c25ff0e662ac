//! Files of lines, compared.

/// The first line, counted from 1, at which `found` is not `written`, where it is another text.
pub(super) fn first_difference(found: &[u8], written: &[u8]) -> Option<usize> {
    let lines = |text: &'_ [u8]| text.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (found, written) = (lines(found), lines(written));
    (0..found.len().max(written.len())).find(|i| found.get(*i) != written.get(*i)).map(|i| i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_told() {
        for (found, written, line) in [
            ("", "", None),
            ("a\nb\n", "a\nb\n", None),
            ("a\nx\n", "a\nb\n", Some(2)),
            ("a\n", "a\nb\n", Some(2)),
            ("a\nb\nc\n", "a\nb\n", Some(3)),
            ("a\nb", "a\nb\n", Some(2)),
        ] {
            assert_eq!(first_difference(found.as_bytes(), written.as_bytes()), line, "{found:?}");
        }
    }
}
