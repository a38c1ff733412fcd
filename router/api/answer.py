"""The parts of an answer: thoughts, text, and calls of tools, told apart while it grows."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from hackkv.tokenizer import overlap
from router.api.structured import Thinking
from router.api.tools.machine import CallPiece, Part, Said, ToolParser

_OPEN, _CLOSE = "<think>", "</think>"
_ID_LETTERS = string.ascii_letters + string.digits


def call_id(length: int = 0) -> str:
    """An id for a call: OpenAI's form, or `length` letters and digits."""
    if not length:
        return f"call_{uuid4().hex[:24]}"
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))


class Thoughts:
    """Splits a growing text into what stands within <think> and what comes after it."""

    def __init__(self, thinking: Thinking) -> None:
        self._inside = thinking is Thinking.OPEN
        self._over = thinking is Thinking.NEVER
        self._trim = False
        self._held = ""

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """The thoughts and the text that are now certain; all of them if this is the `last` piece."""
        if self._over:
            return "", self._trimmed(text)
        self._held += text
        if not self._inside:
            begun = self._held.lstrip()
            if begun.startswith(_OPEN):
                self._inside, self._held = True, begun[len(_OPEN) :]
            elif _OPEN.startswith(begun) and not last:
                return "", ""
            else:
                self._over, held = True, self._held
                return "", held
        thought, closed, rest = self._held.partition(_CLOSE)
        if closed:
            self._over = self._trim = True
            return thought, self._trimmed(rest)
        keep = 0 if last else overlap(self._held, _CLOSE)
        cut = len(self._held) - keep
        thought, self._held = self._held[:cut], self._held[cut:]
        return thought, ""

    def _trimmed(self, text: str) -> str:
        """`text` without the blank lines between thoughts and text."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


class MessageDraft:
    """The message of one choice, as it grows."""

    def __init__(self, thinking: Thinking, parser: ToolParser | None, new_id: Callable[[], str] = call_id) -> None:
        self._thoughts, self._parser, self._new_id = Thoughts(thinking), parser, new_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        """OpenAI's `tool_calls` so far."""

    def push(self, text: str, last: bool) -> list[dict[str, Any]]:
        """Take a piece of the output. Returns what it adds, as OpenAI's `delta` objects."""
        thought, said = self._thoughts.push(text, last)
        deltas: list[dict[str, Any]] = []
        if thought:
            self._reasoning.append(thought)
            deltas.append({"reasoning_content": thought})
        return deltas + [self._delta(part) for part in self._parts(said, last)]

    def message(self) -> dict[str, Any]:
        """The whole message so far."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.calls else ""),
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _parts(self, said: str, last: bool) -> list[Part]:
        if self._parser is None:
            return [Said(said)] if said else []
        parts = self._parser.push(said)
        return parts + self._parser.finish() if last else parts

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Said):
            self._content.append(part.text)
            return {"content": part.text}
        return {"tool_calls": [self._called(part)]}

    def _called(self, part: CallPiece) -> dict[str, Any]:
        if part.index < len(self.calls):
            self.calls[part.index]["function"]["arguments"] += part.arguments
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        call = {"id": self._new_id(), "type": "function", "function": function}
        self.calls.append({**call, "function": dict(function)})
        return {"index": part.index, **call}
