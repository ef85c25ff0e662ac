//! First fit: each item goes into the first row that still has room for it. On items in decreasing order it needs at most
//! 11/9 of the fewest rows (Johnson, "Near-optimal bin packing algorithms", 1973).

/// Items, row by row, and where each row ends.
pub struct Rows {
    pub items: Vec<u32>,
    pub ends: Vec<u32>,
}

/// Pack items of these `lengths`, in this order, into rows of `capacity`; no length may exceed it.
pub fn pack(lengths: &[u32], capacity: u32) -> Rows {
    let mut room = Room::new(lengths.len(), capacity);
    let row_of: Vec<usize> = lengths.iter().map(|&length| room.take_first(length)).collect();
    let mut ends = vec![0; row_of.iter().max().map_or(0, |last| last + 1)];
    row_of.iter().for_each(|&row| ends[row] += 1);
    let mut total = 0;
    for end in &mut ends {
        (*end, total) = (total, total + *end);
    }
    // Each end is now its row's start, and rises to its end as the items come in.
    let mut items = vec![0; lengths.len()];
    for (item, &row) in row_of.iter().enumerate() {
        items[ends[row] as usize] = item as u32;
        ends[row] += 1;
    }
    Rows { items, ends }
}

/// The room left in each row, as a binary tree whose nodes hold the most room below them.
struct Room {
    most: Vec<u32>,
    leaves: usize,
}

impl Room {
    fn new(rows: usize, capacity: u32) -> Self {
        let leaves = rows.next_power_of_two();
        Self { most: vec![capacity; 2 * leaves], leaves }
    }

    /// Take `length` from the first row that has it. There are as many rows as items, so one always has.
    fn take_first(&mut self, length: u32) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.most[node] < length {
                node += 1;
            }
        }
        let row = node - self.leaves;
        self.most[node] -= length;
        while node > 1 {
            node /= 2;
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]);
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, row by row.
    fn plain(lengths: &[u32], capacity: u32) -> Vec<Vec<u32>> {
        let mut rows: Vec<(u32, Vec<u32>)> = Vec::new();
        for (item, &length) in lengths.iter().enumerate() {
            match rows.iter_mut().find(|(tokens, _)| tokens + length <= capacity) {
                Some((tokens, items)) => {
                    *tokens += length;
                    items.push(item as u32);
                }
                None => rows.push((length, vec![item as u32])),
            }
        }
        rows.into_iter().map(|(_, items)| items).collect()
    }

    #[test]
    fn the_tree_finds_the_row_that_a_scan_finds() {
        for count in [0u32, 1, 2, 5, 8, 333] {
            let lengths: Vec<u32> = (0..count).map(|i| i.wrapping_mul(2_654_435_761) % 100 + 1).collect();
            let rows = pack(&lengths, 100);
            let expected = plain(&lengths, 100);
            assert_eq!(rows.items, expected.concat(), "{count} items");
            let sizes: Vec<u32> = expected.iter().map(|row| row.len() as u32).collect();
            let starts = [0].iter().chain(&rows.ends);
            assert_eq!(rows.ends.iter().zip(starts).map(|(end, start)| end - start).collect::<Vec<u32>>(), sizes);
        }
    }
}
