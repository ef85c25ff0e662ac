//! The definition, in f64.

/// `scale` times the rows `ids` of `table`, each of `cols` values.
pub fn forward(table: &[f64], cols: usize, ids: &[u32], scale: f64) -> Vec<f64> {
    ids.iter().flat_map(|&id| &table[id as usize * cols..][..cols]).map(|x| x * scale).collect()
}
