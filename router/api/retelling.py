"""The routes of APIs other than OpenAI's older ones: a body is told again and answered as a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from hackkv.types import Sampling
from router.api.caller import Caller
from router.api.chat import plan
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, request_id, served_by
from router.api.reply import JsonReply, Renderer
from router.api.retold import Retold, naming
from router.api.segments import Segments
from router.api.served import ServedModel
from router.api.sse import StreamReply

BodyT = TypeVar("BodyT", bound=Retold)
MakeRenderer = Callable[[ServedModel, BodyT, str, Segments, Sampling], Renderer]
"""Gets the body, the answer's id, the segments that the answer falls into, and how tokens are chosen."""


async def retell(request: Request, kind: type[BodyT], prefix: str, make: MakeRenderer[BodyT]) -> Response:
    """Answer a body of another API. The answer's id is the request's behind `prefix`."""
    served = served_by(request)
    with counting_refusals(served), naming(kind):
        parsed = await read_body(request, kind)
        body, chat = parsed.body, parsed.body.chat()
        jobs, thinking = await plan(served, chat, parsed.prompts[0], Caller(request.receive))
    generation = Generation(served, f"{prefix}_{request_id(request)}", arrival(request), jobs, body.cache_salt)
    segments = Segments(served.conversations.answer(chat, thinking))
    renderer = make(served, body, generation.request_id, segments, jobs[0][1])
    return (StreamReply if body.stream else JsonReply)(generation, renderer)
