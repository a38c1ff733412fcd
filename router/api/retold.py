"""A conversation in the words of another API than /v1/chat/completions.

Such a body is checked with its own fields and then told again as a `ChatRequest`. Prompts, tools, grammars and sampling
are the chat route's from there on; what is left to each API is how its answers look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from hackkv.errors import RequestError
from router.api.sampled import Sampled
from router.api.schema import MAX_MESSAGES, ChatRequest, Message
from router.api.tools.fields import ToolCall


class Retold(Sampled):
    """A body that can be told as a chat request."""

    names: ClassVar[Mapping[str, str]]
    """The client's names of those fields of a `ChatRequest` whose faults are found only there."""

    def chat(self) -> ChatRequest:
        """The same as a chat request."""
        raise NotImplementedError


@contextmanager
def naming(kind: type[Retold]) -> Iterator[None]:
    """Let errors name the field that the client sent."""
    try:
        yield
    except RequestError as error:
        name = kind.names.get(error.param or "")
        if name is None:
            raise
        words = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in kind.names))
        raise RequestError(words.sub(lambda found: kind.names[found[0]], str(error)), name) from error


class ChatTurns:
    """Collects messages. A call belongs to the assistant's message before it, if there is one."""

    def __init__(self, merging: bool = False) -> None:
        """If `merging`, texts of one role in a row become one message."""
        self._merging = merging
        self._messages: list[dict[str, Any]] = []

    def say(self, role: str, content: str | None, **more: Any) -> None:
        """Add a message."""
        last = self._messages[-1] if self._messages else {"role": ""}
        if self._merging and last["role"] == role and not more:
            last["content"] = "\n".join(text for text in (last["content"], content) if text)
        else:
            self._messages.append({"role": role, "content": content, **more})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call that the model made. `arguments` is JSON."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", None)
        call = ToolCall.model_validate({"id": call_id, "function": {"name": name, "arguments": arguments}})
        last = self._messages[-1]
        last["tool_calls"] = (*last.get("tool_calls", ()), call)

    def messages(self) -> tuple[Message, ...]:
        """All messages. Raises `RequestError` if there is none, or if there are too many."""
        if not self._messages:
            raise RequestError("messages holds nothing that is shown to the model", "messages")
        if len(self._messages) > MAX_MESSAGES:
            raise RequestError(f"messages becomes more than {MAX_MESSAGES} of them", "messages")
        return tuple(Message.model_validate(message) for message in self._messages)
