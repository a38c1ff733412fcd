"""Writes answers of /v1/responses: one object, or events that build it up item by item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import time
from typing import Any, Final

from hackkv.types import Finish, Sampling, Token
from router.api.chat import logprob_of
from router.api.choices import Delta
from router.api.errors import envelope
from router.api.generation import Generation
from router.api.reply import TokenRows, rows_of
from router.api.responses.schema import ResponsesRequest
from router.api.segments import Closed, Opened, Segment, SegmentKind, Segments, Step
from router.api.served import ServedModel
from router.api.sse import NamedEvents

_PREFIX: Final = {SegmentKind.THOUGHT: "rs", SegmentKind.TEXT: "msg", SegmentKind.CALL: "fc"}
_DELTA: Final = {
    SegmentKind.THOUGHT: "response.reasoning_text", SegmentKind.TEXT: "response.output_text",
    SegmentKind.CALL: "response.function_call_arguments",
}  # fmt: skip


class ResponsesRenderer(NamedEvents):
    """Writes the answer to one request. Its one choice becomes items: thoughts, messages, calls."""

    def __init__(
        self, served: ServedModel, body: ResponsesRequest, name: str, segments: Segments, sampling: Sampling
    ) -> None:
        """`name` is the answer's id; `sampling` has the request's settings, defaults included."""
        self._body, self._tokenizer, self._segments = body, served.tokenizer, segments
        self._name = name
        self._sent = 0
        self._head = {
            "id": name, "object": "response", "created_at": int(time()), "model": served.name,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_logprobs": body.top_logprobs or 0,
            "tools": [_tool(tool.model_dump()) for tool in body.tools or ()], "tool_choice": _choice(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False, "text": {"format": _format(body)},
            "previous_response_id": None, "background": False, "store": False, "truncation": "disabled", "metadata": {},
        }  # fmt: skip

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The complete answer."""
        self._segments.read(generation.choices[0])
        return self._complete(generation)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta; the first delta is also where the answer begins."""
        events = []
        if not self._sent:
            begun = self._response("in_progress", [])
            events += [self._event("response.created", response=begun)]
            events += [self._event("response.in_progress", response=begun)]
        for step in self._segments.push(delta):
            events += self._events(step, delta.finish)
        return events

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """The complete answer again, in an event that says how it ended."""
        response = self._complete(generation)
        return [self._event(f"response.{response['status']}", response=response)]

    def broken(self, error: Exception) -> dict[str, Any]:
        """The answer as far as it came, with what went wrong."""
        told = envelope(error)["error"]
        failure = {"code": "server_error", "message": told["message"], "type": told["type"], "param": told["param"]}
        items = [self._item(segment, None) for segment in self._segments.all]
        return self._event("response.failed", response=self._response("failed", items, error=failure))

    def _complete(self, generation: Generation) -> dict[str, Any]:
        (choice,) = generation.choices
        items = [self._item(segment, choice.finish) for segment in self._segments.all]
        cut = choice.finish is Finish.LENGTH
        more: dict[str, Any] = {"usage": _usage(generation)}
        if cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            more["completed_at"] = int(time())
        if self._body.return_stages:
            more["hackkv"] = generation.report()
        return self._response("incomplete" if cut else "completed", items, **more)

    def _response(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        rest = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": items, **rest, **more}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _events(self, step: Step, finish: Finish | None) -> Iterator[dict[str, Any]]:
        """The events of one step: those of the item and, unless it is a call, those of its one part."""
        segment = step.segment
        place: dict[str, Any] = {"output_index": segment.index}
        inner = {**place, "item_id": self._id(segment)}
        if segment.kind is not SegmentKind.CALL:
            inner["content_index"] = 0
        if isinstance(step, Opened):
            yield self._event("response.output_item.added", **place, item=self._item(segment, None, begun=True))
            if segment.kind is not SegmentKind.CALL:
                yield self._event("response.content_part.added", **inner, part=self._part(segment))
        elif isinstance(step, Closed):
            yield self._event(f"{_DELTA[segment.kind]}.done", **inner, **self._done(segment))
            if segment.kind is not SegmentKind.CALL:
                yield self._event("response.content_part.done", **inner, part=self._part(segment))
            yield self._event("response.output_item.done", **place, item=self._item(segment, finish))
        else:
            more = {"logprobs": self._logprobs(step.tokens)} if segment.kind is SegmentKind.TEXT else {}
            yield self._event(f"{_DELTA[segment.kind]}.delta", **inner, delta=step.text, **more)

    def _done(self, segment: Segment) -> dict[str, Any]:
        if segment.kind is SegmentKind.CALL:
            return {"arguments": segment.text}
        more = {"logprobs": self._logprobs(segment.tokens)} if segment.kind is SegmentKind.TEXT else {}
        return {"text": segment.text, **more}

    def _id(self, segment: Segment) -> str:
        return f"{_PREFIX[segment.kind]}_{self._name.partition('_')[2]}_{segment.index}"

    def _item(self, segment: Segment, finish: Finish | None, begun: bool = False) -> dict[str, Any]:
        """A segment as an item. Only the last one can be cut short, by the end of the answer."""
        last = segment is self._segments.all[-1]
        status = "incomplete" if last and (finish is Finish.LENGTH or not segment.closed) else "completed"
        head = {"id": self._id(segment), "status": "in_progress" if begun else status}
        if segment.kind is SegmentKind.CALL:
            call = {"call_id": segment.call_id, "name": segment.name, "arguments": segment.text}
            return {"type": "function_call", **head, **call}
        content = [] if begun else [self._part(segment)]
        if segment.kind is SegmentKind.THOUGHT:
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", "role": "assistant", **head, "content": content}

    def _part(self, segment: Segment) -> dict[str, Any]:
        if segment.kind is SegmentKind.THOUGHT:
            return {"type": "reasoning_text", "text": segment.text}
        return {
            "type": "output_text", "text": segment.text, "annotations": [], "logprobs": self._logprobs(segment.tokens),
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token]) -> TokenRows | list[Any]:
        told = tokens if self._body.logprobs else ()
        return rows_of((logprob_of(self._tokenizer, token) for token in told), len(told))


def _usage(generation: Generation) -> dict[str, Any]:
    counts = generation.usage()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }  # fmt: skip


def _tool(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in ("type", "name", "description", "parameters", "strict")}


def _choice(body: ResponsesRequest) -> str | dict[str, Any]:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _format(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
