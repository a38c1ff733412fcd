"""Writes answers of /v1/messages: one message, or events that build it up block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from hackkv.types import Finish
from router.api.choices import ChoiceCollector, Delta
from router.api.errors import anthropic_envelope
from router.api.generation import Generation
from router.api.segments import Closed, Opened, Segment, SegmentKind, Segments, Step
from router.api.served import ServedModel
from router.api.sse import NamedEvents


class MessagesRenderer(NamedEvents):
    """Writes the answer to one request. Its one choice becomes blocks: thoughts, texts, calls."""

    def __init__(self, served: ServedModel, name: str, segments: Segments, return_stages: bool) -> None:
        """`name` is the answer's id."""
        self._segments, self._return_stages = segments, return_stages
        self._head = {"id": name, "type": "message", "role": "assistant", "model": served.name}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        (choice,) = generation.choices
        self._segments.read(choice)
        content = [_block(segment, segment.text) for segment in self._segments.all]
        answer = {**self._head, "content": content, **self._ending(choice), "usage": _usage(choice)}
        return {**answer, **self._report(generation)}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta; the first delta is also where the message begins."""
        events: list[dict[str, Any]] = []
        if delta.opening:
            counts = {**_usage(delta.choice), "output_tokens": 0}
            rest: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
            events.append({"type": "message_start", "message": {**self._head, **rest}})
        for step in self._segments.push(delta):
            events += _events(step)
        return events

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """Why the answer ended, and its counts."""
        (choice,) = generation.choices
        end = {"type": "message_delta", "delta": self._ending(choice), "usage": _usage(choice)}
        return [{**end, **self._report(generation)}, {"type": "message_stop"}]

    def broken(self, error: Exception) -> dict[str, Any]:
        """Anthropic's envelope."""
        return anthropic_envelope(error)

    def _ending(self, choice: ChoiceCollector) -> dict[str, Any]:
        reason, stopped_by = "end_turn", choice.stopped_by
        if choice.finish is Finish.LENGTH:
            reason = "max_tokens"
        elif stopped_by is not None:
            reason = "stop_sequence"
        elif self._segments.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _report(self, generation: Generation) -> dict[str, Any]:
        return {"hackkv": generation.report()} if self._return_stages else {}


def _events(step: Step) -> Iterator[dict[str, Any]]:
    place = {"index": step.segment.index}
    if isinstance(step, Opened):
        yield {"type": "content_block_start", **place, "content_block": _block(step.segment, "")}
    elif isinstance(step, Closed):
        yield {"type": "content_block_stop", **place}
    else:
        yield {"type": "content_block_delta", **place, "delta": _delta(step.segment.kind, step.text)}


def _delta(kind: SegmentKind, text: str) -> dict[str, Any]:
    if kind is SegmentKind.CALL:
        return {"type": "input_json_delta", "partial_json": text}
    return (
        {"type": "text_delta", "text": text}
        if kind is SegmentKind.TEXT
        else {"type": "thinking_delta", "thinking": text}
    )


def _block(segment: Segment, text: str) -> dict[str, Any]:
    """A segment as a block that holds `text`."""
    if segment.kind is SegmentKind.CALL:
        return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": _input(text)}
    if segment.kind is SegmentKind.THOUGHT:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call, as far as they can be read if the answer was cut short."""
    try:
        told = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:  # the model wrote no JSON
        return {}
    return told if isinstance(told, dict) else {}


def _usage(choice: ChoiceCollector) -> dict[str, int]:
    return {
        "input_tokens": len(choice.prompt_ids) - choice.cached_tokens,
        "cache_read_input_tokens": choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(choice.tokens),
    }
