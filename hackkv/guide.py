"""Guided decoding: which tokens a grammar allows next. llguidance compiles grammars and computes the masks.

A grammar is a string in llguidance's own form: a Lark grammar, or JSON that holds Lark grammars and JSON schemas.
docs/structured-output.md says why llguidance is used.

A guide's state is a function of (grammar, tokens so far): any node can rebuild it. Compiling takes milliseconds to a
second, so it runs on a thread of its own; the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hackkv.errors import CheckpointError, GuideError, RequestError

Bits: TypeAlias = npt.NDArray[np.uint8]
"""One bit for each token id, the least significant of byte 0 first."""

KEPT_GRAMMARS = 16
"""Compiled grammars that a process keeps, least recently used ones leave."""

MAX_REASON_CHARS = 400
"""The longest reason that is passed on from llguidance about a grammar at fault."""

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The limits of a grammar: about 20 ms for each of fuel and items in a step, and 40 MB of states."""


class Guide:
    """The place of one sequence in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos_ids = matcher, frozenset(eos_ids)
        ends = np.array(sorted(eos_ids), dtype=np.int64)
        self._end_bytes, self._end_bits = ends // 8, (1 << (ends % 8)).astype(np.uint8)

    def allowed(self) -> Bits:
        """The tokens that may come next; an end token is among them where the grammar may end.

        Raises `GuideError` if the grammar leaves no token, or if finding out would take too long.
        """
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GuideError(f"the grammar cannot go on: {_why(self._matcher)}")
        bits = np.frombuffer(packed, dtype=np.uint8)
        if self._matcher.is_accepting():
            bits = np.pad(bits, (0, max(0, int(self._end_bytes.max(initial=0)) + 1 - bits.size)))
            np.bitwise_or.at(bits, self._end_bytes, self._end_bits)
        if not bits.any():
            raise GuideError("the grammar leaves no token that this model has")
        return bits

    def accept(self, token_id: int) -> None:
        """Go on after a token. Raises `GuideError` if the grammar did not allow it."""
        if token_id not in self._eos_ids and not self._matcher.consume_token(token_id):
            raise GuideError(f"the grammar does not allow token {token_id}: {_why(self._matcher)}")


class Guides:
    """Compiles grammars for one checkpoint's vocabulary. Thread-safe; reads tokenizer.json when first needed."""

    def __init__(self, folder: Path, eos_ids: Sequence[int] = (), limits: LLParserLimits = LIMITS) -> None:
        """`eos_ids` end a sequence; if there are none, the tokenizer's own end token does."""
        self._path, self._eos_ids, self._limits = folder / "tokenizer.json", tuple(eos_ids), limits
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    async def opened(self, grammar: str, emitted: Sequence[int] = ()) -> Guide | None:
        """`open` in a thread, so that the event loop goes on; None without a grammar."""
        if not grammar:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.open, grammar, tuple(emitted))

    def open(self, grammar: str, emitted: Sequence[int] = ()) -> Guide:
        """A guide that stands after the output tokens `emitted`.

        Raises `RequestError` if the grammar is wrong or too large, `GuideError` if it does not allow `emitted`, and
        `CheckpointError` if the checkpoint's tokenizer is of a kind that llguidance cannot read.
        """
        guide = Guide(self._compile(grammar).deep_copy(), self._eos_ids or (self._tokenizer.eos_token,))
        for token_id in emitted:
            guide.accept(token_id)
        return guide

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise RequestError(f"cannot be compiled: {_why(matcher)}", "grammar")
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return matcher

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="guides")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(str(self._path), eos_token=self._eos_ids[0] if self._eos_ids else None)
        except Exception as error:  # the Rust side raises bare Exception; all of them mean a bad file
            raise CheckpointError(f"{self._path}: guided decoding cannot read it: {error}") from error


def _why(matcher: LLMatcher) -> str:
    """llguidance's reason on one line, without the state that it prints behind it."""
    reason, _, _ = matcher.get_error().partition("<")
    return " ".join(reason.split())[:MAX_REASON_CHARS]
