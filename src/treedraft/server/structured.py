"""The fields by which a body asks for structured output: OpenAI's, vLLM's and SGLang's names for the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from treedraft.errors import RequestError
from treedraft.types import StructuredOutput

Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1, max_length=4096)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NamedSchema(_Part):
    """OpenAI's wrapping. With or without strict the answer follows the schema."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    of: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(_Part):
    """OpenAI's field."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def parts(self) -> dict[str, Any]:
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError("response_format of type json_schema needs json_schema")
        if self.type == "json_schema" and self.json_schema is not None and self.json_schema.of is not None:
            return {"json_schema": self.json_schema.of}
        return {} if self.type == "text" else {"json_object": True}


class StructuredOutputs(_Part):
    """vLLM's field."""

    of_json: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def parts(self) -> dict[str, Any]:
        given = {
            "json_schema": self.of_json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return {name: value for name, value in given.items() if value is not None}


class StructuredFields(BaseModel):
    """What bodies inherit. At most one of all these may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema | None = None  # SGLang's three
    regex: Annotated[str, Field(strict=True)] | None = None
    ebnf: Annotated[str, Field(strict=True)] | None = None

    def structured(self) -> StructuredOutput | None:
        """Raises RequestError for more than one, and for what is none."""
        own = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.ebnf}
        every: list[dict[str, Any]] = [{name: value} for name, value in own.items() if value is not None]
        every += [part.parts() for part in (self.response_format, self.structured_outputs) if part is not None]
        if self.structured_outputs is not None and not every[-1]:
            raise RequestError("structured_outputs needs one of json, regex, choice, grammar and json_object")
        asked = [parts for parts in every if parts]
        if len(asked) > 1:
            raise RequestError("ask for structured output once: response_format, structured_outputs, json_schema, "
                               "regex and ebnf exclude each other")  # fmt: skip
        return StructuredOutput(**asked[0]) if asked else None
