"""A conversation as one text, by the template that came with the tokenizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from treedraft.errors import RequestError


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Return the prompt of the assistant's next turn. Raises RequestError where the template does.

    tools: functions in OpenAI's form; variables: the template's own. Some templates want the arguments of earlier calls
    as an object, others as JSON text, and say so by failing: both are tried.
    """
    reserved = set(variables) & set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if reserved:
        raise RequestError(f"chat_template_kwargs are variables of the template; {min(reserved)!r} is none")
    forms = [messages]
    if any(message.get("tool_calls") for message in messages):
        forms.append([_with_text_arguments(message) for message in messages])
    failures: list[Exception] = []
    for form in forms:
        try:
            return tokenizer.apply_chat_template(
                form, tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # templates raise what they like, to refuse a role for instance
            failures.append(error)
    raise RequestError(f"the chat template refuses the messages: {failures[0]}") from failures[0]


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)
