//! Which turns of a conversation are trained: what the configuration says, and what messages say of themselves.

use super::reader::Chat;
use crate::config::TrainOn;
use crate::error::{Error, Result};
use serde_json::Value;
use std::borrow::Cow;

/// The conversation without the keys `train` and `weight`, which are not for templates, and for each message whether it
/// is trained. A message's own word stands above `train_on`; a given prompt is not trained in any case.
///
/// # Errors
/// `corpus::bad_choice` for a value that is no choice, two that contradict each other, and one that cannot be kept.
pub fn choose(chat: &Chat, train_on: TrainOn) -> Result<(Cow<'_, Chat>, Vec<bool>)> {
    let by_role = |role: &'static str| move |message: &Value| message["role"] == role;
    let assistant = by_role("assistant");
    let last = chat.messages.iter().rposition(assistant).unwrap_or_default();
    let asked = chat.messages[..last].iter().rposition(by_role("user"));
    let mut chosen = Vec::with_capacity(chat.messages.len());
    let mut own = false;
    for (index, message) in chat.messages.iter().enumerate() {
        let refuse = |what: String| {
            Error::new("corpus::bad_choice", format!("message {}: {what}", index + 1))
                .expected("`train` true or false, or `weight` 0 or 1")
        };
        let said = own_word(message).map_err(refuse)?;
        own |= message.get("train").or(message.get("weight")).is_some();
        let by_config = match train_on {
            TrainOn::All => true,
            TrainOn::Assistant => assistant(message),
            TrainOn::LastTurn => assistant(message) && asked.is_none_or(|asked| index > asked),
        };
        if index < chat.trained_from {
            if said == Some(true) {
                return Err(refuse("it stands in the prompt, which is given and not trained".into()));
            }
            chosen.push(false);
            continue;
        }
        if !assistant(message) && said.is_some_and(|said| said != by_config) {
            return Err(refuse("only what the assistant says can be chosen message by message".into()));
        }
        chosen.push(said.unwrap_or(by_config));
    }
    if !own {
        return Ok((Cow::Borrowed(chat), chosen));
    }
    let mut chat = chat.clone();
    for message in chat.messages.iter_mut().filter_map(Value::as_object_mut) {
        message.retain(|key, _| key != "train" && key != "weight");
    }
    Ok((Cow::Owned(chat), chosen))
}

fn own_word(message: &Value) -> Result<Option<bool>, String> {
    let train = match &message["train"] {
        Value::Null => None,
        Value::Bool(train) => Some(*train),
        other => return Err(format!("`train` is {other}")),
    };
    let weight = match (&message["weight"], message["weight"].as_f64()) {
        (Value::Null, _) => None,
        (_, Some(0.0)) => Some(false),
        (_, Some(1.0)) => Some(true),
        (other, _) => return Err(format!("`weight` is {other}")),
    };
    match (train, weight) {
        (Some(train), Some(weight)) if train != weight => Err("`train` and `weight` contradict each other".into()),
        _ => Ok(train.or(weight)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::reader;
    use super::*;
    use serde_json::json;

    fn chosen(messages: Value, train_on: TrainOn) -> Result<Vec<bool>> {
        let chat = reader::chat("here", messages, Value::Null).unwrap();
        let (left, chosen) = choose(&chat, train_on)?;
        assert!(left.messages.iter().all(|m| m.get("train").is_none() && m.get("weight").is_none()));
        Ok(chosen)
    }

    #[test]
    fn the_last_turn_is_all_that_the_assistant_says_to_the_last_question_it_answers() {
        let call = json!([{"id": "c", "function": {"name": "f", "arguments": {}}}]);
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
            {"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "d"},
            {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}]);
        let of = |train_on| chosen(messages.clone(), train_on).unwrap();
        assert_eq!(of(TrainOn::Assistant), [false, true, false, true, false, true, false]);
        assert_eq!(of(TrainOn::LastTurn), [false, false, false, true, false, true, false]);
        assert_eq!(of(TrainOn::All), [true; 7]);
    }

    #[test]
    fn a_message_says_for_itself_whether_it_is_trained() {
        let say = |key: &str, value: Value| {
            let mut messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
            messages[1][key] = value;
            chosen(messages, TrainOn::Assistant)
        };
        for (key, value, trained) in [
            ("train", json!(false), false),
            ("train", json!(true), true),
            ("weight", json!(0), false),
            ("weight", json!(1.0), true),
            ("weight", Value::Null, true),
        ] {
            assert_eq!(say(key, value).unwrap(), [false, trained]);
        }
        for (key, value) in [("train", json!(1)), ("weight", json!(0.5)), ("weight", json!("1"))] {
            let error = say(key, value).unwrap_err();
            assert_eq!(error.code(), "corpus::bad_choice");
            assert!(error.message().contains(&format!("message 2: `{key}` is")), "{error}");
        }
    }

    #[test]
    fn a_choice_that_cannot_be_kept_is_an_error() {
        let both = json!([{"role": "assistant", "content": "b", "train": true, "weight": 0}]);
        assert!(chosen(both, TrainOn::Assistant).unwrap_err().message().contains("contradict"));
        let user = |train: bool| json!([{"role": "user", "content": "a", "train": train}]);
        assert!(chosen(user(true), TrainOn::Assistant).unwrap_err().message().contains("only what the assistant"));
        assert!(chosen(user(false), TrainOn::All).is_err());
        assert_eq!(chosen(user(false), TrainOn::Assistant).unwrap(), [false]);
    }
}
