#!/usr/bin/env python3
"""Renders conversations through chat templates with Python's Jinja, set up as transformers sets it up.

    pip install jinja2==3.1.6
    python make_template_golden.py ../fixtures/templates      # writes golden.json there

golden.json: {"conversations": [{name, messages, tools}], "renderings": {template: [{conversation, add_generation_prompt,
text | error}]}, "methods": [{source, text | null}]}. Arguments of tool calls that are JSON text are decoded before rendering, as the templates expect.
"""
import copy, datetime, json, sys
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>", "unk_token": "<unk>"}
NOW = datetime.datetime(2026, 1, 1)


class GenerationBlocks(Extension):
    """`{% generation %}` blocks: their text is rendered, what they mark is not recorded here."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


def dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols])
    env.filters["tojson"] = dumps
    env.globals.update(raise_exception=refuse, strftime_now=NOW.strftime)
    return env


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "Name of the city"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]},
        "exact": {"type": "boolean", "nullable": True}}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}}

CONVERSATIONS = [
    ("one turn", [user("Hello?"), assistant("Good morning.")], None),
    ("system", [{"role": "system", "content": "  You are brief. "}, user(" Hello? "), assistant(" Yes. \n")], None),
    ("developer", [{"role": "developer", "content": "Rhyme."}, user("Hi"), assistant("Bye")], None),
    ("many turns", [user("One?"), assistant("1."), user("Two?"), assistant("2."), user("Three?"), assistant("3.")], None),
    ("ends with the user", [user("One?"), assistant("1."), user("Two?")], None),
    ("thoughts in the content", [user("Why?"), assistant("<|channel>thought\nLet me see.\n<channel|>Because."), user("Sure?"),
                                 assistant("<|channel>thought\nHm.\n<channel|>Quite sure.")], None),
    ("reasoning key", [user("Why?"), assistant("Because.", reasoning="Let me see."), user("Sure?"),
                       assistant("Yes.", reasoning_content="Hm.")], None),
    ("tools declared", [user("Weather in Oslo?"), assistant("Which day?")], [WEATHER, CLOCK]),
    ("tool call", [user("Weather in Oslo?"), assistant(None, tool_calls=[call("get_weather", {"city": "Oslo", "days": [1, 2], "exact": True})]),
                   {"role": "tool", "tool_call_id": "call_1", "content": "{\"sky\": \"grey\"}"}, assistant("Grey."), user("Thanks"),
                   assistant("Any time.")], [WEATHER]),
    ("tool call, arguments as text", [user("Weather in Oslo?"), assistant("", tool_calls=[call("get_weather", "{\"city\": \"Oslo\"}")]),
                                      {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "grey"}]},
                                      assistant("Grey.")], [WEATHER]),
    ("tool calls with thoughts", [user("Both?"), assistant("", reasoning="Two calls.", tool_calls=[
        call("get_weather", {"city": "Łódź", "where": {"lat": 51.75, "lon": 19.0}, "unit": None}, "a"), call("clock", {}, "b")]),
        {"role": "tool", "tool_call_id": "a", "content": "cold"}, {"role": "tool", "tool_call_id": "b", "content": "9:05"},
        assistant("Cold, and nine.")], [WEATHER, CLOCK]),
    ("words and a tool call", [user("Time?"), assistant("I shall look.", tool_calls=[call("clock", {"zone": "UTC+1", "n": 1e20})]),
                               {"role": "tool", "tool_call_id": "call_1", "content": "9"}, assistant("Nine.")], [CLOCK]),
    ("tool call at the end", [user("Time?"), assistant("", tool_calls=[call("clock", {})])], [CLOCK]),
    ("content parts", [{"role": "system", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
                       {"role": "user", "content": [{"type": "text", "text": " Hello "}, {"type": "text", "text": "there."}]},
                       {"role": "assistant", "content": [{"type": "text", "text": "Good "}, {"type": "text", "text": "day."}]}], None),
    ("adjacent assistant turns", [user("Count."), assistant("One."), assistant("Two."), user("On."), assistant("Three.")], None),
    ("adjacent user turns", [user("Hello."), user("Are you there?"), assistant("Yes.")], None),
    ("unicode", [user("¿Qué? 你好 🙂\u00a0e\u0301"), assistant("Здравствуйте — “да” 👩‍🚀\u2028ok")], None),
    ("empty words", [user("Say nothing."), assistant(""), user("Again."), assistant("   ")], None),
    ("markup in the words", [user("<b>&amp;'\"</b> {{ x }} {% if %}"), assistant("<turn|>\n<|turn>user\n{# no #}")], None),
    ("no assistant", [user("Anyone?")], None),
    ("no user", [{"role": "system", "content": "Begin."}, assistant("Begun.")], None),
]


METHODS = [f"{{{{ {text!r}.{call} }}}}" for text in ["a,b,,c", " one  two\tthree ", "", "-42", "Straße\u00a0x", "<think>a</think>b"]
           for call in ["rsplit(',')", "rsplit(',', 1)", "rsplit(',', maxsplit=0)", "rsplit()", "rsplit(none, 1)", "rsplit('')",
                        "partition('</think>') | list", "rpartition(',') | list", "partition(',') | last", "partition('')",
                        "removeprefix('a,')", "removesuffix('c')", "zfill(8)", "swapcase()", "nosuch()"]]


METHODS += [f"{{{{ {value} | {filter} }}}}" for value in ["['a', none, 1.5, 'it']", "true", "\"it's o'neil (ÉTÉ) a-b\"", "17"]
            for filter in ["upper", "lower", "title", "capitalize", "replace('a', 'b')", "replace('t', 'T', 1)"]]
METHODS += ["{{ 'aab' | replace('a', 'b', count=1) }}", "{{ 'aab' | replace('a', 'b', -1) }}", "{{ 'aab' | replace(old='a', new='b') }}"]
METHODS += ["{{ true is number }}", "{{ 'a' is number }}"]
REASONING = ["reasoning_content", "thinking", "reasoning"]


def answer(env, source):
    try:
        return env.from_string(source).render()
    except Exception:
        return None


def decoded(messages):
    messages = copy.deepcopy(messages)
    for message in messages:
        # as transformers' apply_chat_template
        thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if thought is not None:
            message.setdefault("thinking", thought)
            message["reasoning_content"] = thought
        for one in message.get("tool_calls") or []:
            if isinstance(one["function"]["arguments"], str):
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return messages


def main(folder):
    env = environment()
    renderings = {}
    for path in sorted(folder.glob("*.jinja")):
        template = env.from_string(path.read_text(encoding="utf-8"))
        rows = renderings[path.name] = []
        for name, messages, tools in CONVERSATIONS:
            for prompt in (False, True):
                row = {"conversation": name, "add_generation_prompt": prompt}
                try:
                    row["text"] = template.render(
                        messages=decoded(messages), tools=tools, documents=None, add_generation_prompt=prompt, **SPECIAL)
                except Exception as error:
                    row["error"] = str(error)
                rows.append(row)
    out = {"conversations": [{"name": n, "messages": m, "tools": t} for n, m, t in CONVERSATIONS], "renderings": renderings,
           "methods": [{"source": source, "text": answer(env, source)} for source in METHODS]}
    (folder / "golden.json").write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for name, rows in renderings.items():
        print(name, len(rows), "renderings,", sum("error" in r for r in rows), "errors")


main(Path(sys.argv[1]))
