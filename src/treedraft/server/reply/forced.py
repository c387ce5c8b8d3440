"""Calls that a request insists on: the JSON schema of a text that is nothing else.

A grammar that follows the schema makes the text a list, whatever the model's own way to write calls is:

    [{"name": NAME, "parameters": {...}}, ...]          read by server.reply.formats.LISTED
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_schema(tools: Mapping[str, Mapping[str, Any]], max_calls: int | None = None) -> dict[str, Any]:
    """JSON schema of a list of one or more calls. tools: schema of the arguments, by name."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in tools
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {name: _moved({"type": "object", **schema}, f"#/$defs/{name}") for name, schema in tools.items()},
    }
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def _moved(schema: Any, to: str) -> Any:
    """The schema with references to itself that are right where it now stands."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved
