"""Reads calls of tools out of a growing text, in the forms that models write them.

A parser is a machine over single characters. So the calls, and the text around them, are the same however the text is
cut into deltas. Arguments come as they are written, before a call is complete. Text that begins like a call and
turns out to be none stays text.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Call number `index` begins (`name` is set) or goes on; `arguments` are appended to what came before."""

    index: int
    name: str
    arguments: str


Part: TypeAlias = Said | CallPiece
Steps: TypeAlias = Generator[None, str, Any]


class NoCall(Exception):
    """The text is not the call that it began like."""


class ToolParser(ABC):
    """Turns text into parts; `push` takes it piece by piece and `finish` says that no more comes."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names` are the functions that there are."""
        self._names = names
        self._parts: list[Part] = []
        self._back = deque[str]()
        self._raw = ""
        """The text of the call under way so far."""
        self._blank = ""
        """White space that is text only if text follows."""
        self.calls = 0
        """Calls so far."""
        self._machine = self._read()
        next(self._machine)

    def push(self, text: str) -> list[Part]:
        """The parts that this text completes, neighbours joined."""
        for char in text:
            self._machine.send(char)
        return self._take()

    def finish(self) -> list[Part]:
        """The parts that are left."""
        with contextlib.suppress(StopIteration):
            self._machine.send("")
        if not self.calls:
            self._parts.append(Said(self._blank))
        return self._take()

    @abstractmethod
    def _read(self) -> Steps:
        """The machine: it is sent characters, and an empty string at the end."""

    def _take(self) -> list[Part]:
        joined: list[Part] = []
        for part in self._parts:
            last = joined[-1] if joined else None
            if isinstance(part, Said) and isinstance(last, Said):
                joined[-1] = Said(last.text + part.text)
            elif isinstance(part, CallPiece) and isinstance(last, CallPiece) and not part.name:
                joined[-1] = CallPiece(last.index, last.name, last.arguments + part.arguments)
            else:
                joined.append(part)
        self._parts = []
        return [part for part in joined if not isinstance(part, Said) or part.text]

    def _say(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._blank += char
            else:
                self._parts.append(Said(self._blank + char))
                self._blank = ""

    def _next(self) -> Steps:
        if self._back:
            return self._back.popleft()
        return (yield)

    def _eat(self) -> Steps:
        """The next character, of a call. Raises `NoCall` at the end of the text."""
        char = yield from self._next()
        if not char:
            raise NoCall
        self._raw += char
        return char

    def _eat_solid(self) -> Steps:
        while (char := (yield from self._eat())).isspace():
            pass
        return char

    def _skip_blank(self) -> Steps:
        """The next character that is not white space."""
        while (char := (yield from self._next())).isspace():
            self._blank += char
        return char

    def _rest(self) -> Steps:
        """Everything else is text."""
        while char := (yield from self._next()):
            self._say(char)

    def _until(self, marker: str) -> Steps:
        """Text up to `marker`, which is dropped; False if it does not come."""
        held = ""
        while held != marker:
            char = yield from self._next()
            if not char:
                self._say(held)
                return False
            held += char
            while not marker.startswith(held):
                self._say(held[0])
                held = held[1:]
        return True

    def _maybe(self, literal: str, *, cut: bool = False) -> Steps:
        """Drop `literal` if it comes next; with `cut` also a beginning of it with which the text ends."""
        held = ""
        while held != literal:
            char = yield from self._next()
            if cut and not char:
                held = ""
            held += char
            if not char or not literal.startswith(held):
                self._back.extendleft(reversed(held if char else (*held, "")))
                return False
        return True

    # Calls ----------------------------------------------------------------------------------------------------------

    def _attempt(self, call: Steps, opening: str) -> Steps:
        """Read a call whose first characters are `opening`. False if the text is no call: it is said then."""
        self._raw, before = opening, self.calls
        try:
            yield from call
        except NoCall:
            if self.calls == before:
                self._say(self._raw)
            return False
        return True

    def _open(self, name: str) -> None:
        if name not in self._names:
            raise NoCall
        self._parts.append(CallPiece(self.calls, name, ""))
        self._blank = ""
        self.calls += 1

    def _add(self, arguments: str) -> None:
        self._parts.append(CallPiece(self.calls - 1, "", arguments))

    def _object(self) -> Steps:
        """`"name": NAME, "arguments": {...}}`, in any order; the brace before it has been read."""
        name, early, empty = "", "", True
        while True:
            key = yield from self._string((yield from self._eat_solid()))
            if (yield from self._eat_solid()) != ":":
                raise NoCall
            char = yield from self._eat_solid()
            if key in ("arguments", "parameters") and empty:
                early = yield from self._arguments(char, opened=bool(name))
                empty = False
            elif key == "name" and not name:
                name = yield from self._string(char)
                self._open(name)
                self._add(early)
            elif key in ("type", "id"):
                yield from self._string(char)
            else:
                raise NoCall
            end = yield from self._eat_solid()
            if end == "}" and name:
                if empty:
                    self._add("{}")
                return
            if end != ",":
                raise NoCall

    def _arguments(self, char: str, *, opened: bool) -> Steps:
        """A JSON object that begins with `char`. It is added as it comes if its call is `opened`, else returned."""
        if char != "{":
            raise NoCall
        depth, early = 0, ""
        quoted = escaped = False
        while True:
            if opened:
                self._add(char)
            else:
                early += char
            if quoted:
                quoted, escaped = escaped or char != '"', not escaped and char == "\\"
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
            if not depth:
                return early
            char = yield from self._eat()

    def _string(self, char: str) -> Steps:
        """A JSON string that begins with `char`."""
        if char != '"':
            raise NoCall
        text, escaped = char, False
        while escaped or char != '"' or len(text) == 1:
            char = yield from self._eat()
            text += char
            escaped = not escaped and char == "\\"
        try:
            return json.loads(text)
        except ValueError as error:
            raise NoCall from error
