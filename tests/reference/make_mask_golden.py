#!/usr/bin/env python3
"""Records the assistant mask that transformers makes of a template's generation blocks.

    pip install transformers==5.24.0 jinja2==3.1.6
    python make_mask_golden.py ../fixtures             # writes templates/mask-golden.json there

mask-golden.json: [{conversation, input_ids, assistant_masks}] for those conversations of templates/golden.json in which the
assistant speaks, through templates/generation-blocks.jinja and the tokenizer of tiny-base.
"""
import json, sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

fixtures = Path(sys.argv[1])
tokenizer = PreTrainedTokenizerFast.from_pretrained(fixtures / "tiny-base")
template = (fixtures / "templates/generation-blocks.jinja").read_text(encoding="utf-8")
conversations = json.loads((fixtures / "templates/golden.json").read_text(encoding="utf-8"))["conversations"]

rows = []
for conversation in conversations:
    messages = conversation["messages"]
    for message in messages:
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if not any(message["role"] == "assistant" for message in messages):
        continue
    encoded = tokenizer.apply_chat_template(
        messages, tools=conversation["tools"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    rows.append({"conversation": conversation["name"], "input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]})
lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
(fixtures / "templates/mask-golden.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
print(len(rows), "conversations")
