//! The JSON Schema of a plugin's settings, as far as the host reads it: types, bounds, defaults, required keys.

use super::runtime::shown;
use serde_json::{Map, Value, json};

/// At the top of a sampler's schema: its order is the same in every epoch (`wit/sampler.wit`).
const SAME_ORDER: &str = "x-same-order";

/// A schema of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Schema(Map<String, Value>);

impl Schema {
    /// Read a schema; the error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(Value::Object(schema)) if schema.get("type") == Some(&json!("object")) => Ok(Self(schema)),
            Ok(_) => Err("config-schema is not the schema of an object (\"type\": \"object\")".into()),
            Err(error) => Err(format!("config-schema is no JSON: {error}")),
        }
    }

    /// Each setting's name and schema.
    pub fn properties(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0.get("properties").and_then(Value::as_object).into_iter().flatten()
    }

    /// Whether the sampler says that its order is the same in every epoch.
    pub fn claims_same_order(&self) -> bool {
        self.0.get(SAME_ORDER) == Some(&Value::Bool(true))
    }

    /// A setting in one line: type, bounds, default, meaning.
    pub fn summary(&self, name: &str, property: &Value) -> String {
        let mut parts = vec![property["type"].as_str().unwrap_or("value").to_string()];
        for (key, word) in [("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most")] {
            if let Some(bound) = property.get(key) {
                parts.push(format!("{word} {bound}"));
            }
        }
        if let Some(values) = property["enum"].as_array() {
            parts.push(values.iter().map(Value::to_string).collect::<Vec<_>>().join(" or "));
        }
        match property.get("default") {
            Some(default) => parts.push(format!("default {default}")),
            None if self.is_required(name) => parts.push("must be given".into()),
            None => {}
        }
        let meaning = property["description"].as_str().map_or(String::new(), |text| format!(": {text}"));
        shown(&(parts.join(", ") + &meaning))
    }

    /// The least that fits the schema: its required settings at their default, first example or lowest value.
    pub fn minimal(&self) -> Value {
        let required = self.properties().filter(|(name, _)| self.is_required(name));
        Value::Object(required.map(|(name, property)| (name.clone(), example(property))).collect())
    }

    /// Settings that the schema does not allow, each `good` with one thing wrong and what that is.
    pub fn wrong(&self, good: &Value) -> Vec<(String, Value)> {
        let mut wrong = Vec::new();
        let mut with = |what: String, name: &str, value: Option<Value>| {
            let mut settings = good.as_object().cloned().unwrap_or_default();
            match value {
                Some(value) => settings.insert(name.into(), value),
                None => settings.remove(name),
            };
            wrong.push((what, Value::Object(settings)));
        };
        if self.0.get("additionalProperties") == Some(&Value::Bool(false)) {
            with("an unknown setting".into(), "no-such-setting", Some(json!(1)));
        }
        for (name, property) in self.properties() {
            if self.is_required(name) {
                with(format!("no {name}"), name, None);
            }
            if let Some(kind) = property["type"].as_str() {
                let other = if kind == "object" { json!("text") } else { json!({}) };
                with(format!("{name} = {other}"), name, Some(other));
            }
            for (bound, step) in [("minimum", -1.0), ("exclusiveMinimum", 0.0), ("maximum", 1.0)] {
                if let Some(bound) = property.get(bound).and_then(Value::as_f64) {
                    let value = number(bound + step);
                    with(format!("{name} = {value}"), name, Some(value));
                }
            }
            if property.get("enum").is_some() {
                with(format!("{name} of another value"), name, Some(json!("no-such-value")));
            }
        }
        wrong
    }

    fn is_required(&self, name: &str) -> bool {
        self.0.get("required").and_then(Value::as_array).is_some_and(|required| required.contains(&json!(name)))
    }
}

/// Whole numbers are written as such.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { json!(value as i64) } else { json!(value) }
}

fn example(property: &Value) -> Value {
    let stated = property.get("default").or_else(|| property["examples"].get(0)).or_else(|| property["enum"].get(0));
    let above = || property.get("exclusiveMinimum").and_then(Value::as_f64).map(|bound| number(bound + 1.0));
    let by_type = || match property["type"].as_str() {
        Some("integer" | "number") => json!(1),
        Some("boolean") => json!(false),
        Some("array") => json!([]),
        Some("object") => json!({}),
        _ => json!(""),
    };
    stated.or_else(|| property.get("minimum")).cloned().or_else(above).unwrap_or_else(by_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        Schema::parse(
            r#"{"type": "object", "additionalProperties": false, "required": ["n", "until"], "properties": {
                "n": {"type": "integer", "minimum": 1, "maximum": 9, "description": "Steps"},
                "share": {"type": "number", "exclusiveMinimum": 0, "default": 0.5},
                "until": {"type": "string", "examples": ["noon"]}}}"#,
        )
        .unwrap()
    }

    #[test]
    fn the_least_settings_are_the_required_ones() {
        assert_eq!(schema().minimal(), json!({"n": 1, "until": "noon"}));
    }

    #[test]
    fn each_wrong_setting_breaks_one_rule() {
        let good = schema().minimal();
        let wrong: Vec<Value> = schema().wrong(&good).into_iter().map(|(_, settings)| settings).collect();
        for expected in [
            json!({"n": 1, "until": "noon", "no-such-setting": 1}),
            json!({"until": "noon"}),
            json!({"n": 0, "until": "noon"}),
            json!({"n": 10, "until": "noon"}),
            json!({"n": {}, "until": "noon"}),
            json!({"n": 1, "until": "noon", "share": 0}),
        ] {
            assert!(wrong.contains(&expected), "{expected} is not in {wrong:?}");
        }
        assert!(!wrong.contains(&good));
    }

    #[test]
    fn what_is_no_schema_of_an_object_is_refused() {
        for (text, why) in [("{", "no JSON"), ("[]", "of an object"), (r#"{"type": "string"}"#, "of an object")] {
            let error = Schema::parse(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_summary_says_what_may_be_set() {
        let schema = schema();
        let of = |name: &str| schema.summary(name, schema.properties().find(|(key, _)| *key == name).unwrap().1);
        assert_eq!(of("n"), "integer, at least 1, at most 9, must be given: Steps");
        assert_eq!(of("share"), "number, above 0, default 0.5");
    }
}
