//! Thoughts that a template leaves out: what nobody would notice, since the record is there without them.

use super::reader::Chat;
use super::spans::{self, REASONING, Renderer};
use super::template::ChatTemplate;
use crate::error::Result;
use serde_json::{Value, json};

/// In which of the assistant's turns a template prints the thought that a key of the message holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// By whether the turn calls a tool, and whether a user's message comes after it.
    turns: [[bool; 2]; 2],
}

impl Shown {
    /// Looks at what the template makes of a thought in each kind of turn.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn find(template: &ChatTemplate) -> Result<Self> {
        let renderer = Renderer::new(template, &Value::Null);
        let thought = spans::mark(0);
        let call = json!([{"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}]);
        let mut turns = [[false; 2]; 2];
        for (calls, earlier) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut answer = json!({"role": "assistant", "content": "Yes."});
            REASONING.iter().for_each(|key| answer[*key] = thought.clone().into());
            let mut messages = vec![json!({"role": "user", "content": "Hello?"}), answer];
            if calls {
                messages[1]["tool_calls"] = call.clone();
                messages.push(json!({"role": "tool", "tool_call_id": "c", "content": "1"}));
            }
            if earlier {
                messages.extend([
                    json!({"role": "user", "content": "And?"}),
                    json!({"role": "assistant", "content": "No."}),
                ]);
            }
            // a template that refuses such a conversation prints nothing of it
            let text = renderer.render(&spans::values(&messages)).unwrap_or_default();
            turns[usize::from(calls)][usize::from(earlier)] = text.contains(&thought);
        }
        Ok(Self { turns })
    }

    /// Whether the conversation has a thought that is not printed.
    pub fn leaves_out(&self, chat: &Chat) -> bool {
        let last_user = chat.messages.iter().rposition(|message| message["role"] == "user").unwrap_or_default();
        let hidden = |(at, message): (usize, &Value)| {
            let thinks = REASONING.iter().any(|key| message[*key].as_str().is_some_and(|text| !text.trim().is_empty()));
            let calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
            thinks && message["role"] == "assistant" && !self.turns[usize::from(calls)][usize::from(at < last_user)]
        };
        chat.messages.iter().enumerate().any(hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures;
    use super::*;

    #[test]
    fn gemma_shows_thoughts_in_front_of_the_tools_it_calls_for_the_last_question() {
        let shown = Shown::find(&fixtures::template("google-2026-05-via-forcepusher.jinja")).unwrap();
        assert_eq!(shown.turns, [[false, false], [true, false]]);
        let chat = |messages: Value| Chat { messages: messages.as_array().unwrap().clone(), ..Chat::default() };
        let user = json!({"role": "user", "content": "?"});
        let answer = json!({"role": "assistant", "content": "Yes.", "reasoning": "Hm."});
        let mut call = answer.clone();
        call["tool_calls"] = json!([{"function": {"name": "f", "arguments": {}}}]);
        let silent = json!({"role": "assistant", "content": "Yes.", "reasoning": " "});
        assert!(shown.leaves_out(&chat(json!([user, answer]))));
        assert!(!shown.leaves_out(&chat(json!([user, call]))));
        assert!(shown.leaves_out(&chat(json!([user, call, user, silent]))));
        assert!(!shown.leaves_out(&chat(json!([user, silent]))));
    }

    #[test]
    fn a_template_that_shows_every_thought_leaves_none_out() {
        let all = "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.reasoning }}{{ m.content }}<turn|>\n{% endfor %}";
        assert_eq!(Shown::find(&fixtures::inline_template(all)).unwrap().turns, [[true; 2]; 2]);
    }
}
