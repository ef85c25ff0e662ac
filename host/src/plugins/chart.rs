//! A plan drawn in text: the padding of its micro-batches, and the roots that its steps mix.

use super::{Plan, PlanRequest};
use std::fmt::Write;

/// Cells of a full bar.
const WIDTH: usize = 40;
/// What stands for each root; later roots share the last.
const SHADES: [char; 6] = ['█', '▒', '#', '░', '+', '.'];
/// Steps are drawn in at most this many groups.
const GROUPS: usize = 10;
/// Upper ends of the shares of padding that are told apart.
const PADDING: [(f64, &str); 5] =
    [(0.0, "none"), (0.01, "up to 1%"), (0.05, "up to 5%"), (0.2, "up to 20%"), (1.0, "more")];

/// A bar chart of micro-batches by the share of padding that a rectangle around their rows would have, and one of the tokens of
/// each of `roots` in groups of steps.
pub fn chart(plan: &Plan, request: &PlanRequest, roots: &[String]) -> String {
    let mut by_padding = [0; PADDING.len()];
    let mut of_batches = Vec::with_capacity(plan.batch_ends.len());
    for rows in plan.batches() {
        let (mut tokens, mut rectangle) = (vec![0; roots.len()], Rectangle::default());
        for row in rows {
            let lengths = row.iter().map(|&record| u64::from(request.lengths[record as usize]));
            rectangle.add(lengths.clone().sum());
            for (length, &record) in lengths.zip(row) {
                tokens[request.roots[record as usize] as usize] += length;
            }
        }
        let padding = rectangle.padding();
        by_padding[PADDING.iter().position(|(end, _)| padding <= *end).unwrap_or(PADDING.len() - 1)] += 1;
        of_batches.push(tokens);
    }

    let mut text = String::from("\nmicro-batches by the padding that a rectangle around their rows would have\n");
    for ((_, label), count) in PADDING.iter().zip(by_padding) {
        let share = f64::from(count) / of_batches.len().max(1) as f64;
        let bar = "█".repeat((share * WIDTH as f64).round() as usize);
        line(&mut text, &format!("{label:>14} {count:>8} {:>5.1}%  {bar}", 100.0 * share));
    }
    text += "\ntokens of each root, step by step:";
    for (index, root) in roots.iter().enumerate() {
        write!(text, "  {} {root}", shade(index)).expect("writing to a String");
    }
    text.push('\n');
    let steps: Vec<Vec<u64>> = of_batches.chunks(request.accumulation.max(1) as usize).map(sum).collect();
    let size = steps.len().div_ceil(GROUPS).max(1);
    for (group, first) in steps.chunks(size).zip((1..).step_by(size)) {
        let label = format!("{first} to {}", first + group.len() - 1);
        line(&mut text, &format!("{label:>14}  {}", mix(&sum(group))));
    }
    text
}

/// The rectangle around rows.
#[derive(Default)]
struct Rectangle {
    rows: u64,
    widest: u64,
    tokens: u64,
}

impl Rectangle {
    fn add(&mut self, width: u64) {
        self.rows += 1;
        self.widest = self.widest.max(width);
        self.tokens += width;
    }

    fn padding(&self) -> f64 {
        1.0 - self.tokens as f64 / (self.rows * self.widest).max(1) as f64
    }
}

fn sum(rows: &[Vec<u64>]) -> Vec<u64> {
    let mut sum = vec![0; rows.first().map_or(0, Vec::len)];
    rows.iter().for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, tokens)| *sum += tokens));
    sum
}

/// A full bar, shared out among the roots by their tokens.
fn mix(tokens: &[u64]) -> String {
    let all = tokens.iter().sum::<u64>().max(1) as f64;
    let (mut bar, mut before, mut drawn) = (String::new(), 0, 0);
    for (index, tokens) in tokens.iter().enumerate() {
        before += tokens;
        let end = (before as f64 / all * WIDTH as f64).round() as usize;
        bar.extend(std::iter::repeat_n(shade(index), end - drawn));
        drawn = end;
    }
    bar
}

fn shade(root: usize) -> char {
    SHADES[root.min(SHADES.len() - 1)]
}

fn line(text: &mut String, line: &str) {
    text.push_str(line.trim_end());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_and_roots_are_drawn_to_scale() {
        let plan =
            Plan { records: vec![0, 1, 2, 3, 4], row_ends: vec![1, 2, 4, 5], batch_ends: vec![2, 4], dropped: vec![] };
        let request = PlanRequest {
            lengths: &[10, 10, 3, 4, 5],
            roots: &[0, 1, 0, 0, 1],
            epoch: 0,
            seed: 0,
            max_seq_len: 20,
            rows_per_batch: 2,
            accumulation: 1,
            token_budget: None,
        };
        let drawn = chart(&plan, &request, &["a".into(), "b".into()]);
        let lines: Vec<&str> = drawn.lines().map(str::trim).collect();
        let half = "█".repeat(20);
        // rows of 10 and 10: none; rows of 7 and 5: 2 of 14
        assert!(lines.contains(&format!("none        1  50.0%  {half}").as_str()), "{drawn}");
        assert!(lines.contains(&format!("up to 20%        1  50.0%  {half}").as_str()), "{drawn}");
        assert!(lines.contains(&"more        0   0.0%"), "{drawn}");
        assert!(lines.contains(&"tokens of each root, step by step:  █ a  ▒ b"), "{drawn}");
        assert!(lines.contains(&format!("1 to 1  {half}{}", "▒".repeat(20)).as_str()), "{drawn}");
        // 7 of 12 tokens: 23 of 40 cells
        assert!(lines.contains(&format!("2 to 2  {}{}", "█".repeat(23), "▒".repeat(17)).as_str()), "{drawn}");
    }
}
