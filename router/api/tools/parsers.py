"""The forms in which models write calls of tools."""

from __future__ import annotations

from router.api.tools.machine import NoCall, Steps, ToolParser
from router.api.tools.python_call import python_call

MAX_CALL_CHARS = 64 << 10
"""A call in Python's form is read when it is complete; a longer one is text."""


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also Qwen's."""

    def _read(self) -> Steps:
        while (yield from self._until("<tool_call>")):
            if (yield from self._attempt(self._body(), "<tool_call>")):
                yield from self._skip_blank_then("</tool_call>")

    def _body(self) -> Steps:
        if (yield from self._eat_solid()) != "{":
            raise NoCall
        yield from self._object()

    def _skip_blank_then(self, literal: str) -> Steps:
        self._back.appendleft((yield from self._skip_blank()))
        yield from self._maybe(literal, cut=True)


class Llama3(ToolParser):
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several with semicolons between them."""

    def _read(self) -> Steps:
        self._back.appendleft((yield from self._skip_blank()))
        yield from self._maybe("<|python_tag|>")
        while (char := (yield from self._skip_blank())) == "{":
            if not (yield from self._attempt(self._object(), char)):
                break
            char = yield from self._skip_blank()
            if char != ";":
                self._back.appendleft(char)
                break
        else:
            self._back.appendleft(char)
        yield from self._rest()


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}`."""

    def _read(self) -> Steps:
        while (yield from self._until("[TOOL_CALLS]")):
            yield from self._attempt(self._body(), "[TOOL_CALLS]")

    def _body(self) -> Steps:
        char = yield from self._eat_solid()
        if char != "[":
            yield from self._named(char)
            return
        while True:
            if (yield from self._eat_solid()) != "{":
                raise NoCall
            yield from self._object()
            end = yield from self._eat_solid()
            if end == "]":
                return
            if end != ",":
                raise NoCall

    def _named(self, char: str) -> Steps:
        name = ""
        while char not in "[{":
            name += char
            char = yield from self._eat()
        if char == "[":
            for expected in "ARGS]":
                if (yield from self._eat()) != expected:
                    raise NoCall
            char = yield from self._eat_solid()
        self._open(name.strip())
        yield from self._arguments(char, opened=True)


class Pythonic(ToolParser):
    """The whole answer is a list of calls in Python: `[weather(city="Oslo"), clock()]`."""

    def _read(self) -> Steps:
        char = yield from self._skip_blank()
        if char == "[":
            yield from self._attempt(self._list(), char)
        else:
            self._back.appendleft(char)
        yield from self._rest()

    def _list(self) -> Steps:
        while True:
            text = yield from self._one()
            name, arguments = python_call(text)
            self._open(name)
            self._add(arguments)
            self._raw = ""
            end = yield from self._eat_solid()
            if end == "]":
                return
            if end != ",":
                raise NoCall

    def _one(self) -> Steps:
        """The text of a call, up to its closing parenthesis."""
        text, depth, quote, escaped = "", 0, "", False
        while len(text) < MAX_CALL_CHARS:
            char = yield from self._eat()
            text += char
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = not escaped and char == "\\"
            elif char in "\"'":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
                if not depth and (char in ")]},"):
                    return text
        raise NoCall
