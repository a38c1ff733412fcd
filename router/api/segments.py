"""An answer as a sequence of segments: thoughts, texts and calls, each opened, grown and closed in turn.

OpenAI's /v1/responses calls them output items, Anthropic's /v1/messages content blocks. Both stream them so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hackkv.types import Token
from router.api.answer import MessageDraft
from router.api.choices import ChoiceCollector, Delta


class SegmentKind(StrEnum):
    """The content of a segment."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Segment:
    """A piece of the answer. The text of a call is its arguments, as JSON."""

    index: int
    kind: SegmentKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """The tokens of a text. A token belongs to the first piece that came with it or after it."""
    closed: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment begins."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class Grew:
    """A segment has more text."""

    segment: Segment
    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A segment is complete."""

    segment: Segment


Step = Opened | Grew | Closed


class Segments:
    """Cuts the answer of one choice into segments, while it grows or when it is whole."""

    def __init__(self, answer: MessageDraft) -> None:
        self._answer = answer
        self._tokens: list[Token] = []
        self.all: list[Segment] = []

    @property
    def has_calls(self) -> bool:
        """Whether the model has called anything."""
        return any(segment.kind is SegmentKind.CALL for segment in self.all)

    def push(self, delta: Delta) -> Iterator[Step]:
        """The steps that a delta makes. The last delta closes the last segment."""
        return self._push(delta.text, delta.token, delta.finish is not None)

    def read(self, choice: ChoiceCollector) -> None:
        """Read an answer that is complete, as if it had come token by token."""
        last = len(choice.tokens) - 1
        for index, (text, token) in enumerate(zip(choice.pieces, choice.tokens, strict=True)):
            for _ in self._push(text, token, index == last):
                pass

    def _push(self, text: str, token: Token | None, last: bool) -> Iterator[Step]:
        if token is not None:
            self._tokens.append(token)
        for added in self._answer.push(text, last):
            yield from self._added(added)
        if last:
            yield from self._close()

    def _added(self, added: dict[str, Any]) -> Iterator[Step]:
        """The steps of one of OpenAI's `delta` objects."""
        if thought := added.get("reasoning_content"):
            yield from self._grow(SegmentKind.THOUGHT, thought)
        elif text := added.get("content"):
            yield from self._grow(SegmentKind.TEXT, text)
        for call in added.get("tool_calls", ()):
            if "id" in call:
                yield from self._close()
                yield self._open(SegmentKind.CALL, call["id"], call["function"]["name"])
            if arguments := call["function"]["arguments"]:
                yield from self._grow(SegmentKind.CALL, arguments)

    def _open(self, kind: SegmentKind, call_id: str = "", name: str = "") -> Opened:
        self.all.append(Segment(len(self.all), kind, call_id, name))
        return Opened(self.all[-1])

    def _grow(self, kind: SegmentKind, text: str) -> Iterator[Step]:
        if not self.all or self.all[-1].closed or self.all[-1].kind is not kind:
            yield from self._close()
            yield self._open(kind)
        segment, tokens = self.all[-1], tuple(self._tokens)
        self._tokens.clear()
        segment.pieces.append(text)
        segment.tokens.extend(tokens)
        yield Grew(segment, text, tokens)

    def _close(self) -> Iterable[Step]:
        if self.all and not self.all[-1].closed:
            self.all[-1].closed = True
            yield Closed(self.all[-1])
