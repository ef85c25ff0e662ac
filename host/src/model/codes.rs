//! The small numbers that quantised weights are made of: E4M3 (OCP 8-bit floating point, revision 1.0) and E2M1 (OCP
//! microscaling formats, revision 1.0), rounded to nearest, ties to the even code.

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;
/// Smallest E4M3 value above zero.
pub const E4M3_MIN: f32 = 1.0 / 512.0;

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The E4M3 code of `x`, which is cut to the largest value; not of a NaN.
pub fn e4m3(x: f32) -> u8 {
    let sign = u8::from(x.is_sign_negative()) << 7;
    let magnitude = x.abs().min(E4M3_MAX);
    // Of the binade below the smallest normal one the steps are those of that binade.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (magnitude * f32::exp2((3 - exponent) as f32)).round_ties_even() as i32;
    // Steps count from 8 in a binade; 16 of them carry into the next.
    sign | (((exponent + 7) << 3) + steps - 8) as u8
}

/// The value of an E4M3 code; NaN for the two codes that are none.
pub fn from_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (0, _) => mantissa * E4M3_MIN,
        (15, 7) => f32::NAN,
        _ => (8.0 + mantissa) * f32::exp2((exponent - 10) as f32),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The E2M1 code of `x`, which is cut to the largest value; not of a NaN.
pub fn e2m1(x: f32) -> u8 {
    let a = x.abs();
    // Half-way points; one that is reached goes up where the code above is the even one.
    let up = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0];
    up.into_iter().map(u8::from).sum::<u8>() | u8::from(x.is_sign_negative()) << 3
}

/// The value of the E2M1 code in the low four bits.
pub fn from_e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest of `values` (ascending), of two equally near the one with the even index.
    fn nearest(values: &[f32], x: f32) -> usize {
        let distance = |at: &usize| (f64::from(values[*at]) - f64::from(x)).abs();
        (0..values.len()).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
    }

    #[test]
    fn e4m3_is_the_nearest_of_its_values() {
        let values: Vec<f32> = (0..0x7f).map(from_e4m3).collect();
        assert!(values.is_sorted() && values[0x7e] == E4M3_MAX && values[1] == E4M3_MIN && values[0x38] == 1.0);
        // Every value, every half-way point, their neighbours, and what is too large.
        let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let points: Vec<f32> = values.iter().copied().chain(middles).chain([1e-9, 500.0, 1e9]).collect();
        for x in points.iter().flat_map(|x| [*x, x.next_up(), x.next_down().max(0.0)]) {
            assert_eq!(usize::from(e4m3(x)), nearest(&values, x), "{x}");
            assert_eq!(from_e4m3(e4m3(-x)), -from_e4m3(e4m3(x)), "{x}");
        }
        assert!(from_e4m3(0x7f).is_nan() && from_e4m3(0xff).is_nan());
    }

    #[test]
    fn e2m1_is_the_nearest_of_its_values() {
        let middles = E2M1.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let points: Vec<f32> = E2M1.into_iter().chain(middles).chain([7.0, 1e9]).collect();
        for x in points.iter().flat_map(|x| [*x, x.next_up(), x.next_down().max(0.0)]) {
            assert_eq!(usize::from(e2m1(x)), nearest(&E2M1, x), "{x}");
            assert_eq!(from_e2m1(e2m1(-x)), -from_e2m1(e2m1(x)), "{x}");
        }
    }
}
