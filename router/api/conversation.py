"""Conversations as a checkpoint's chat template wants them, and how its answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hackkv.errors import RequestError
from hackkv.tokenizer import Tokenizer
from router.api.answer import MessageDraft, call_id
from router.api.schema import ChatRequest, Message
from router.api.structured import Form, Thinking
from router.api.tools.fields import Function, ToolChoice
from router.api.tools.styles import STYLES, Style, detect, force
from router.config import ChatConfig

_ROLES: Final = {"developer": "system"}
"""Roles that chat templates know under another name."""

_TAIL = 16
"""Tokens at a prompt's end that say whether the answer begins within thoughts."""

_INSTRUCTIONS = (
    "You may call functions. Write each call as\n"
    '<tool_call>\n{"name": FUNCTION, "arguments": OBJECT}\n</tool_call>\n'
    "and nothing else. The functions, as JSON:\n"
)
"""Tells a model of its tools where the chat template cannot."""


class Conversations:
    """The peculiarities of one checkpoint's conversations."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        template = tokenizer.chat_template
        self._knows_tools = re.search(r"\btools\b", template) is not None
        found = detect(template) if self._knows_tools else "hermes"
        self._style = STYLES.get((found or "") if config.tool_style == "auto" else config.tool_style)
        thinks = "</think>" in template if config.reasoning == "auto" else config.reasoning == "think"
        self._thinks = thinks
        ids = {marker: tokenizer.special_id(marker) for style in STYLES.values() for marker in style.markers}
        self._markers = {marker: token_id for marker, token_id in ids.items() if token_id is not None}

    def prompt(self, body: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template. Raises `RequestError` naming the field at fault."""
        offered = body.offered()
        if offered:
            self._style_for(body)
        tools = [{"type": "function", "function": _described(function)} for function in offered]
        messages = [self._message(message, at) for at, message in enumerate(body.messages)]
        if not tools:
            return messages, None
        return (messages, tools) if self._knows_tools else (_instructed(messages, tools), None)

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking:
        """Whether the answer to a prompt begins with thoughts."""
        if not self._thinks:
            return Thinking.NEVER
        tail = self.tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith("<think>"):
            return Thinking.OPEN
        return Thinking.NEVER if tail.endswith("</think>") else Thinking.MAYBE

    def form(self, body: ChatRequest, thinking: Thinking) -> Form | None:
        """The form that the answer has to match, if any. Raises `RequestError` if fields contradict each other."""
        form, forced = body.form(), body.forced()
        if form is not None and body.offered():
            raise RequestError(f"{form.param} and tools exclude each other, unless tool_choice is none", form.param)
        if not forced:
            return None if form is None else replace(form, thinking=thinking)
        if body.ignore_eos:
            raise RequestError("ignore_eos and tool_choice exclude each other", "ignore_eos")
        return force(self._style_for(body), forced, body.calls_at_once, self._literal, thinking)

    def answer(self, body: ChatRequest, thinking: Thinking) -> MessageDraft:
        """Reads the answer of one choice."""
        names = frozenset(function.name for function in body.offered())
        if not names:
            return MessageDraft(thinking, None)
        style = self._style_for(body)
        return MessageDraft(thinking, style.parser(names), partial(call_id, style.id_length))

    def shown(self, body: ChatRequest) -> frozenset[int]:
        """Special tokens whose text is needed to read the answer."""
        return frozenset(self._markers.values()) if body.offered() else frozenset()

    @staticmethod
    def finish(body: ChatRequest, answer: MessageDraft, finish: str | None) -> str | None:
        """OpenAI's `finish_reason`: a function that the client named itself ends with `stop`."""
        called = finish == "stop" and answer.calls and not isinstance(body.tool_choice, ToolChoice)
        return "tool_calls" if called else finish

    def _style_for(self, body: ChatRequest) -> Style:
        if self._style is None:
            raise RequestError(
                "tools: how this model calls them is not known; see the setting chat.tool_style", "tools"
            )
        return self._style

    def _literal(self, marker: str) -> str:
        token_id = self._markers.get(marker)
        if token_id is not None:
            return f"<[{token_id}]>"
        return {"<tool_call>": r'"<tool_call>\n"', "</tool_call>": r'"\n</tool_call>"'}.get(marker, json.dumps(marker))

    def _message(self, message: Message, at: int) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": message.text}
        if message.name:
            shown["name"] = message.name
        calls = [
            call.rendered(f"messages[{at}].tool_calls[{nth}]") for nth, call in enumerate(message.tool_calls or ())
        ]
        if not self._knows_tools:
            return _without_tools(shown, calls)
        if calls:
            shown["tool_calls"] = calls
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        return shown


def _described(function: Function) -> dict[str, Any]:
    return function.model_dump(exclude_none=True, exclude={"strict"})


def _instructed(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its tools in the system's message."""
    text = _INSTRUCTIONS + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]


def _without_tools(message: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls and their results as text, for a template that knows neither."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {**message, "content": "\n".join([*filter(None, [message["content"]]), *written])} if written else message
