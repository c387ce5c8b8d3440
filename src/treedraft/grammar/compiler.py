"""From a user's schema, regex or grammar to a matcher. Whatever a user may write, it ends, with an error or without."""

from __future__ import annotations

import json
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, hf

from treedraft.errors import RequestError
from treedraft.grammar.state import GrammarState, num_words, shortened, write_mask
from treedraft.types import StructuredOutput

MAX_CHARACTERS = 1 << 16  # of a schema, regex or grammar; 5,000 properties, half of it more, compile in 2 s
MAX_COMPILE_S = 10.0  # the library's own limits end nearly all before 2 s
STACK_BYTES = 1 << 28  # rules that name each other are followed by recursion: 5,000 of them overflow 8 MiB
MAX_CACHED = 128  # compiled grammars, and refused ones
MAX_LEXER_STATES = 20_000  # of a grammar, 1 to 2 kB each; its users share them
TRIAL_TOKENS = 32  # of a random text, which shows what is too complex before the engine's thread meets it

# Between the parts of a JSON document: at most one space, or a new line and its indentation. Without a bound a model
# may go on with white space for ever, and no document would be of bounded length.
JSON_SPACE = r"(?: |\n {0,16})?"
DEAD_END = "NoExtensionBias"  # the library's word where nothing may follow, not even the end


class _TooSlow(RequestError):
    """Perhaps the machine was busy: asked again, it is tried again."""


class CompiledGrammar:
    """A grammar that any number of requests may follow."""

    def __init__(self, matcher: LLMatcher, mask_size: int, num_words: int) -> None:
        """mask_size, num_words: words of the library's masks, and of the model's."""
        self._matcher, self._mask_size, self._num_words = matcher, mask_size, num_words

    def start(self, min_tokens: int, stop_token_ids: frozenset[int]) -> GrammarState:
        """The state of a request that has said nothing yet. stop_token_ids: masked while it has said fewer tokens."""
        mask = np.zeros(self._mask_size, dtype=np.int32)
        return GrammarState(self._matcher.deep_copy(), mask, self._num_words, min_tokens, stop_token_ids)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once while it is among the last `MAX_CACHED`. Any thread may call."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None  # made when it is first needed
        self._compiled: OrderedDict[StructuredOutput, CompiledGrammar | RequestError] = OrderedDict()
        self._compiling = threading.Lock()  # one at a time: its memory is bounded, and it has a processor
        self._lock = threading.Lock()  # of `_compiled`

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Return the compiled grammar. Raises RequestError with what is wrong with it, after MAX_COMPILE_S at most.

        The first call also reads the vocabulary: 1.7 s for 129,280 tokens.
        """
        self._check_size(structured)
        found = self.find(structured)
        if found is None:
            with self._compiling:
                found = self.find(structured) or self._outcome(structured)
            with self._lock:
                self._compiled[structured] = found
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
        if isinstance(found, RequestError):
            raise RequestError(str(found))
        return found

    def find(self, structured: StructuredOutput) -> CompiledGrammar | RequestError | None:
        """What compiling it gave; None where it was not compiled yet, or long ago. Never waits for a compilation."""
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
            return self._compiled.get(structured)

    def _outcome(self, structured: StructuredOutput) -> CompiledGrammar | RequestError:
        vocabulary = self._load_vocabulary()
        try:
            return _in_large_stack(lambda: self._compile(structured, vocabulary))
        except _TooSlow:
            raise
        except RequestError as error:
            return error.with_traceback(None)

    def _check_size(self, structured: StructuredOutput) -> None:
        texts = (structured.json_schema, structured.regex, structured.grammar, *(structured.choice or ()))
        size = sum(len(text) for text in texts if isinstance(text, str))
        if size > MAX_CHARACTERS:
            raise RequestError(
                f"a schema, regex, grammar or choice must have at most {MAX_CHARACTERS} characters; got {size}"
            )

    def _compile(self, structured: StructuredOutput, vocabulary: LLTokenizer) -> CompiledGrammar:
        try:
            matcher = LLMatcher(
                vocabulary,
                grammar_text(structured),
                log_level=0,
                limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False),
            )
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured output: {shortened(str(error))}") from error
        if matcher.is_error():
            raise RequestError(f"structured output: {shortened(matcher.get_error())}")
        _try(matcher.deep_copy(), vocabulary)
        return CompiledGrammar(matcher, num_words(vocabulary.vocab_size), num_words(self._vocab_size))

    def _load_vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer, which this checkpoint lacks")
        if not self._eos_token_ids:
            raise RequestError("structured output needs an end-of-sequence token, which this checkpoint does not name")
        if self._vocabulary is None:
            size = max(self._vocab_size, len(self._tokenizer))
            try:
                self._vocabulary = hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=list(self._eos_token_ids))
            except Exception as error:  # of a tokenizer that is not the tokenizers library's, or of an unknown kind
                raise RequestError(f"structured output does not know this checkpoint's tokenizer: {error}") from error
        return self._vocabulary


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar in the library's own form. Raises ValueError where that shows already that it is none."""
    if structured.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(structured.json_schema, defaults={"whitespace_pattern": JSON_SPACE})
    if structured.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults={"whitespace_pattern": JSON_SPACE})
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return grammar_from("choice", json.dumps(structured.choice))
    assert structured.grammar is not None
    return grammar_from("grammar", structured.grammar)


def _try(matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
    """Say a random text. Raises RequestError when nothing can be said, or the grammar turns out to be too complex."""
    chooser, mask = random.Random(0), np.zeros(num_words(vocabulary.vocab_size), dtype=np.int32)
    num_said = 0
    while num_said < TRIAL_TOKENS and not matcher.is_stopped() and write_mask(matcher, mask):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        num_said += matcher.consume_token(int(chooser.choice(allowed)))
    error = matcher.get_error()
    if error.startswith(DEAD_END) and num_said == 0:
        raise RequestError("structured output: no text can match")
    if error and not error.startswith(DEAD_END):  # a random text may run into a dead end that a model's does not
        raise RequestError(f"structured output: too complex ({shortened(error)})")


def _in_large_stack(function: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Call in a thread whose stack holds deep recursion, for MAX_COMPILE_S at most."""
    outcome: list[CompiledGrammar | BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # a panic of the library's is no Exception
            outcome.append(error)

    usual = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="treedraft-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join(MAX_COMPILE_S)
    if not outcome:
        raise _TooSlow(f"structured output: not compiled within {MAX_COMPILE_S:g} s")
    if isinstance(outcome[0], RequestError):
        raise outcome[0]
    if isinstance(outcome[0], BaseException):
        raise RequestError(f"structured output: {shortened(str(outcome[0]))}") from outcome[0]
    return outcome[0]
