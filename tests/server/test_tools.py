"""Tools and thoughts through the official openai client, on a real server whose model is told what to say."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_bad_bodies import send_random_bodies
from test_reply import write

from live_server import Live, live_server
from scripted_runner import ScriptedRunner, scripted
from treedraft import LLM, SamplingParams
from treedraft.engine.text import TextStream
from treedraft.server.reply.count import num_reasoning_tokens
from treedraft.server.reply.forced import NO_ARGUMENTS, forced_schema
from treedraft.server.reply.formats import CALLS, REASONING
from treedraft.server.reply.parser import ReplyForm, ReplyParser

USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Bern?"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of the next days",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
MADE: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Zürich 🌦", "days": 3}), ("now", {})]
BASE: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": TOOLS, "seed": 1}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|user|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "<|assistant|>{% if thinking %}<think>\n{% endif %}"
)


class Told:
    """A live server, and what its model says."""

    def __init__(self, live: Live, runner: ScriptedRunner):
        self.live, self._runner = live, runner
        self.openai, self.http = live.openai, live.http

    def says(self, text: str) -> list[int]:
        self._runner.script = [*self.live.llm.encode(text), self.live.llm.eos_token_ids[0]]
        return self._runner.script

    def says_what_it_likes(self) -> None:
        self._runner.script = None

    def chat(self, **own: Any) -> Any:
        return self.openai.chat.completions.create(**{**BASE, **own})

    def stream(self, **own: Any) -> dict[str, Any]:
        """The message that a client puts together from a stream, and its finish reason."""
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        reason = None
        for chunk in self.chat(**own, stream=True):
            [choice] = chunk.choices
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or ():
                if piece.index == len(message["tool_calls"]):
                    assert piece.id and piece.type == "function" and piece.function.name
                    message["tool_calls"].append([piece.function.name, ""])
                message["tool_calls"][piece.index][1] += piece.function.arguments or ""
            reason = choice.finish_reason or reason
        return {**message, "finish_reason": reason}


def make_tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@contextmanager
def told(llm: LLM, **settings: Any) -> Iterator[Told]:
    with scripted(llm) as runner, live_server(llm, **settings) as live:
        yield Told(live, runner)
        live.wait_until_idle()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_batch=4, max_context=1024, prefix_cache=False, speculative=None)


@pytest.fixture(scope="module")
def qwen(llm: LLM) -> Iterator[Told]:
    with told(llm, tool_call_parser="qwen", reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def template(llm: LLM) -> Iterator[None]:
    before = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = TEMPLATE
    yield
    llm.tokenizer.chat_template = before


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_format_reach_the_client(llm: LLM, name: str) -> None:
    with told(llm, tool_call_parser=name) as server:
        server.says("Let me look.\n" + write(name, MADE))
        [choice] = server.chat().choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
        given = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
        assert given == MADE
        assert len({c.id for c in choice.message.tool_calls}) == 2
        streamed = server.stream()
        assert streamed["finish_reason"] == "tool_calls" and streamed["content"] == "Let me look."
        assert [(n, json.loads(a)) for n, a in streamed["tool_calls"]] == MADE


def test_the_clients_own_stream_helper_and_an_answer_to_the_calls(qwen: Told) -> None:
    qwen.says(write("qwen", MADE))
    with qwen.openai.chat.completions.stream(**BASE, n=2) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and len(final.choices) == 2
    for choice in final.choices:
        assert choice.message.content in (None, "") and choice.finish_reason == "tool_calls"
        assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [a for _, a in MADE]
    message = qwen.chat().choices[0].message
    answers = [{"role": "tool", "tool_call_id": c.id, "content": "fine"} for c in message.tool_calls]
    qwen.says("It is fine.")
    [choice] = qwen.chat(messages=[USER, message, *answers]).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is fine.", None, "stop")


def test_thoughts_content_and_calls_come_apart(qwen: Told) -> None:
    script = qwen.says("<think>\nThe user wants weather.\n</think>\n\nLet me look." + write("qwen", MADE))
    answer = qwen.chat()
    message = answer.choices[0].message
    assert message.reasoning_content == "The user wants weather." and message.content == "Let me look."
    assert len(message.tool_calls) == 2
    streamed = qwen.stream()
    assert streamed["reasoning_content"] == message.reasoning_content and streamed["content"] == message.content
    assert [(n, json.loads(a)) for n, a in streamed["tool_calls"]] == MADE
    num_thoughts = answer.usage.completion_tokens_details.reasoning_tokens
    llm = qwen.live.llm
    assert llm.decode(script[:num_thoughts]).endswith(">") and "</think>" in llm.decode(script[:num_thoughts])
    assert "</think>" not in llm.decode(script[: num_thoughts - 1])


@pytest.mark.parametrize("text", ["<think>a b</think> c", "a b", "<think>a b c", "", "<think></think>"])
def test_reasoning_tokens_end_with_the_mark_that_is_a_token(llm: LLM, text: str) -> None:
    """With marks that are tokens, as in models that think."""
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    token_ids = tokenizer(text)["input_ids"]
    [request] = llm._requests([1], SamplingParams())
    request.text = TextStream(tokenizer, ())
    request.append(tuple(token_ids))
    parser = ReplyParser(ReplyForm(REASONING["qwen3"]))
    parser.push(request.text.text, is_last=True)
    pieces = tokenizer.convert_ids_to_tokens(token_ids)
    expected = pieces.index("</think>") + 1 if "</think>" in pieces else len(pieces) * ("<think>" in pieces)
    assert num_reasoning_tokens(request, parser, REASONING["qwen3"]) == expected


def test_without_tools_the_same_text_is_content(qwen: Told) -> None:
    text = "Look: " + write("qwen", MADE)
    qwen.says(text)
    for own in ({"tools": []}, {"tool_choice": "none"}):
        [choice] = qwen.chat(**own).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        assert qwen.stream(**own)["content"] == text


def test_what_only_looks_like_a_call_is_content(qwen: Told) -> None:
    for text in ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', "a <tool_call> b", "<tool_ca"):
        qwen.says(text)
        [choice] = qwen.chat().choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        streamed = qwen.stream()
        assert (streamed["content"], streamed["tool_calls"]) == (text, [])


def test_a_call_cut_by_the_limit_ends_by_length_with_its_arguments_so_far(qwen: Told) -> None:
    script = qwen.says(write("qwen", MADE))
    llm = qwen.live.llm
    limit = next(n for n in range(len(script)) if '"Z' in llm.decode(script[:n]))
    [choice] = qwen.chat(max_tokens=limit).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "length" and call.function.arguments.startswith('{"city": "Z')
    assert qwen.stream(max_tokens=limit)["tool_calls"] == [["get_weather", call.function.arguments]]


def test_one_call_where_parallel_calls_are_unwanted(qwen: Told) -> None:
    qwen.says(write("qwen", MADE))
    [choice] = qwen.chat(parallel_tool_calls=False).choices
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"]


def test_logprobs_of_a_call_are_those_of_all_its_tokens(qwen: Told) -> None:
    script = qwen.says(write("qwen", MADE))
    entries = qwen.chat(logprobs=True, top_logprobs=1).choices[0].logprobs.content
    chunks = list(qwen.chat(logprobs=True, top_logprobs=1, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert len(entries) == len(streamed) == len(script)


def test_stop_strings_end_the_text_before_it_is_read(qwen: Told) -> None:
    qwen.says("Look. " + write("qwen", MADE))
    [choice] = qwen.chat(stop="</tool_call>").choices
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_are_made_by_the_model_itself(qwen: Told, template: None, stream: bool) -> None:
    """Structured output makes a list of calls of anything that the model would say: no script here."""
    qwen.says_what_it_likes()
    thinking: Any = {"extra_body": {"chat_template_kwargs": {"thinking": True}}, "max_tokens": 300}
    tools = [make_tool("get_weather", {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer"}}), TOOLS[1]]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, **thinking}
        for seed in range(3):
            if stream:
                message = qwen.stream(**options, seed=seed)
                [(name, arguments)] = message["tool_calls"]
                reason, content = message["finish_reason"], message["content"]
            else:
                [answer] = qwen.chat(**options, seed=seed).choices
                [call] = answer.message.tool_calls
                name, arguments = call.function.name, call.function.arguments
                reason, content = answer.finish_reason, answer.message.content or ""
            assert (reason, content) == ("tool_calls", "")
            given = json.loads(arguments)
            if choice == "required" and name == "now":
                assert given == {}
            else:
                assert name == "get_weather" and given["city"] in ("Bern", "Zürich") and isinstance(given["days"], int)


def test_forced_calls_need_no_parser(live: Live) -> None:
    options: Any = {**BASE, "tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = live.openai.chat.completions.create(**options).choices
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [("now", {})]


def test_structured_output_of_a_server_with_parsers_is_content(qwen: Told, template: None) -> None:
    qwen.says_what_it_likes()
    own = {"structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": {"thinking": True}}
    message = qwen.chat(extra_body=own).choices[0].message
    assert message.content in ("yes", "no") and message.tool_calls is None


def test_forced_schema_keeps_references_of_each_tool_right() -> None:
    node: dict[str, Any] = {
        "properties": {"next": {"$ref": "#"}, "at": {"$ref": "#/$defs/place"}},
        "$defs": {"place": {"type": "string"}},
    }
    schema = forced_schema({"a.b": node, "now": NO_ARGUMENTS})
    moved = schema["$defs"]["a.b"]
    assert moved["properties"]["next"]["$ref"] == "#/$defs/a.b"
    assert moved["properties"]["at"]["$ref"] == "#/$defs/a.b/$defs/place"
    assert moved["type"] == "object" and node["properties"]["next"] == {"$ref": "#"}  # the tool's own is as it was
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    good = {"name": "a.b", "parameters": {"next": {"at": "x", "next": {}}}}
    assert validator.is_valid([good, {"name": "now", "parameters": {}}])
    for bad in ([], [{"name": "other", "parameters": {}}], [{"name": "now", "parameters": {"a": 1}}]):
        assert not validator.is_valid(bad)
    assert not validator.is_valid([{"name": "a.b", "parameters": {"next": {"at": 1}}}])


# ------------------------------------------------------------------ the prompt


def test_tools_earlier_calls_and_variables_reach_the_template(qwen: Told, template: None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "fine"})
    qwen.says("so</think>Yes.")
    answer = qwen.chat(messages=messages, extra_body={"chat_template_kwargs": {"thinking": True}})
    llm = qwen.live.llm
    start = json.dumps(TOOLS, ensure_ascii=False)
    text = f"{start}<|user|>{USER['content']}<|user|>(get_weather Bern)<|user|>fine<|assistant|><think>\n"
    token_ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.usage.prompt_tokens == len(token_ids)
    body = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    assert qwen.http.post("/tokenize", json=body).json()["tokens"] == token_ids
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("so", "Yes.")
    plain = qwen.chat(messages=messages).choices[0].message
    assert (plain.reasoning_content, plain.content) == (None, "so</think>Yes.")


def test_templates_that_want_arguments_as_text_are_given_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", text + "{% endfor %}{% endfor %}")
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}
    prompt = llm._encode_chat([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert llm.decode(prompt) == 'now{"a": "é"}'


def test_offline_chat_takes_tools_and_variables(tree64: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree64.tokenizer, "chat_template", TEMPLATE)
    [output] = tree64.chat([USER], SamplingParams(max_tokens=1), False, TOOLS, {"thinking": True})
    text = tree64.tokenizer.decode(output.prompt_token_ids)
    assert text.startswith('[{"type": "function"') and text.endswith("<think>\n")


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "none of the tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice required needs tools"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "different names"),
        ({"tools": [{"type": "function", "function": {"name": "no space"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]}, "parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "an object"),
        ({"tools": [{"type": "other"}]}, "tools.0"),
        ({"tools": TOOLS * 100}, "tools"),
        ({"messages": [USER, {"role": "tool", "content": "a"}]}, "tool_call_id"),
        ({"messages": [USER, {"role": "user", "content": "a", "tool_call_id": "1"}]}, "tool_call_id"),
        ({"messages": [USER, {"role": "assistant"}]}, "content, or tool_calls"),
        ({"messages": [USER, {"role": "user", "content": "a", "reasoning_content": "b"}]}, "assistant"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template' is none"),
        ({"chat_template_kwargs": {"messages": "a"}}, "chat template refuses"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_is_refused_and_named(qwen: Told, own: dict[str, Any], words: str) -> None:
    answer = qwen.http.post("/v1/chat/completions", json={**BASE, "max_tokens": 1, **own})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_schemas_that_are_no_text_or_too_deep_are_refused(qwen: Told) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    for schema in ({"title": "\ud800"}, deep):
        tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
        content = json.dumps({**BASE, "tools": [tool], "max_tokens": 1})
        answer = qwen.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "64 levels deep" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["", "{", "5", '{"a": "\\ud800"}', '{"a":' * 900 + "1" + "}" * 900])
def test_earlier_calls_with_any_arguments_reach_the_template(qwen: Told, template: None, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    content = json.dumps({**BASE, "messages": messages, "max_tokens": 1})
    answer = qwen.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


def test_random_bodies_leave_a_server_with_parsers_right(qwen: Told) -> None:
    qwen.says("<think>a</think>" + write("qwen", MADE[1:]))
    counts = send_random_bodies(qwen.live, 150, seed=5)
    assert counts[200] > 10 and counts[400] > 30, counts


def test_tools_without_a_parser_are_refused(live: Live) -> None:
    answer = live.http.post("/v1/chat/completions", json=BASE)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tools need a server that was started with --tool-call-parser"
    harmless = live.http.post("/v1/chat/completions", json={**BASE, "tool_choice": "none", "max_tokens": 1})
    assert harmless.status_code == 200
