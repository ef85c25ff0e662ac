//! Tests hold a table of JSON keys against the JSON that is written.

use serde_json::Value;

/// That the keys in the first column of the `table` (Markdown; a line may name several, `*` is any name or place in a list) are
/// those of the `samples`, and no others: each value has its key, and each key is in a sample.
pub fn assert_documented(table: &str, samples: &[Value]) {
    let lines = table.lines().filter(|line| line.starts_with("| `"));
    let keys =
        lines.flat_map(|line| line.split('|').nth(1).unwrap().split(',').map(|key| key.trim().trim_matches('`')));
    let documented: Vec<Vec<&str>> = keys.map(|key| key.split('.').collect()).collect();
    let fits = |key: &Vec<&str>, node: &Vec<String>| {
        key.len() == node.len() && key.iter().zip(node).all(|(key, name)| *key == "*" || key == name)
    };
    let mut all = Vec::new();
    for value in samples {
        let mut written = Vec::new();
        nodes(value, &[], &mut written);
        // What holds other keys needs no line of its own.
        for (node, value) in &written {
            let leaf = !(value.is_object() || value.is_array());
            assert!(!leaf || documented.iter().any(|key| fits(key, node)), "{node:?} is not documented");
        }
        all.extend(written);
    }
    for key in &documented {
        assert!(all.iter().any(|(node, _)| fits(key, node)), "{key:?} is documented and not written");
    }
}

/// Every node of `value` below the root, with the names that lead to it.
fn nodes<'a>(value: &'a Value, path: &[String], out: &mut Vec<(Vec<String>, &'a Value)>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(name, child)| (name.clone(), child)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, child)| (i.to_string(), child)).collect(),
        _ => Vec::new(),
    };
    for (name, child) in children {
        let path: Vec<String> = path.iter().cloned().chain([name]).collect();
        nodes(child, &path, out);
        out.push((path, child));
    }
}
