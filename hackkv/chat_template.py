"""A checkpoint's chat template: Jinja in a sandbox, with the words that templates on the hub expect.

A template sees the same names and gives the same text as in transformers (`chat_template_utils`); tests compare the
two. The code stands here because importing transformers takes longer than starting a router.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message that is to be continued. The space shows whether the template trims ends."""


class ChatTemplate:
    """One compiled template. Safe to call from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables, such as `bos_token`. Raises `jinja2.TemplateError` for a template that does
        not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: Mapping[str, object],
    ) -> str:
        """The text of a conversation. `arguments` are variables of the template, of JSON's types.

        With `continue_final_message` the text ends where the last message does. Raises `ValueError` if that cannot be
        done or there is no message, `jinja2.TemplateError`, `TypeError`, `KeyError` or `AttributeError` if the template
        refuses or fails.
        """
        if not messages:
            raise ValueError("there is no message")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
        final = self._mark(chat) if continue_final_message else ""
        variables = {"tools": tools, "documents": None, **self._special_tokens, **arguments}
        text = self._template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
        return _cut(text, final) if continue_final_message else text

    def _mark(self, chat: list[dict[str, Any]]) -> str:
        """Put `CONTINUE` behind the text of the last message; return that text."""
        content = chat[-1].get("content")
        if not isinstance(content, str) or "content" not in self.source:
            raise ValueError("the final message has no text that the chat template could continue")
        chat[-1]["content"] = content + CONTINUE
        return content


def _cut(text: str, final: str) -> str:
    """`text` up to the end of its last message, which is `final`."""
    mark = CONTINUE.strip()
    if final.strip() not in text or mark not in text:
        raise ValueError("the chat template drops the final message, which cannot be continued then")
    at = text.rindex(mark)
    kept = text[:at]
    return kept if text.startswith(CONTINUE, at) else kept.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks what a model has said, for training; its body is shown."""

    tags = {"generation"}  # noqa: RUF012  as in its base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict` in a template, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in a template. Names that begin with an underscore would reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in (attributes := dict(*args[1:], **kwargs)):
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own writes HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
