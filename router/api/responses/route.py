"""The routes of /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.caller import Caller
from router.api.chat import plan
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, request_id, served_by
from router.api.reply import JsonReply
from router.api.responses.answers import ResponseObject
from router.api.responses.render import ResponsesRenderer
from router.api.responses.schema import ResponsesRequest
from router.api.retold import naming
from router.api.segments import Segments
from router.api.sse import StreamReply

routes = APIRouter()


@routes.post("/v1/responses", responses={200: {"model": ResponseObject}})
async def responses(request: Request) -> Response:
    """Answer a conversation, as OpenAI's newer API has it. Nothing is kept: requests bring the whole conversation."""
    served = served_by(request)
    with counting_refusals(served), naming(ResponsesRequest):
        parsed = await read_body(request, ResponsesRequest)
        body, chat = parsed.body, parsed.body.chat()
        jobs, thinking = await plan(served, chat, parsed.prompts[0], Caller(request.receive))
    generation = Generation(served, f"resp_{request_id(request)}", arrival(request), jobs, body.cache_salt)
    segments = Segments(served.conversations.answer(chat, thinking))
    renderer = ResponsesRenderer(served, body, generation.request_id, segments, jobs[0][1])
    return (StreamReply if body.stream else JsonReply)(generation, renderer)
