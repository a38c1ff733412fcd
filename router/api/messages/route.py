"""The routes of /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.caller import Caller
from router.api.chat import plan
from router.api.generation import Generation
from router.api.intake import arrival, counting_refusals, read_body, read_question, request_id, served_by
from router.api.messages.answers import Counted, MessageObject
from router.api.messages.render import MessagesRenderer
from router.api.messages.schema import CountRequest, MessagesRequest
from router.api.reply import JsonReply
from router.api.retold import naming
from router.api.segments import Segments
from router.api.sse import StreamReply

routes = APIRouter()


@routes.post("/v1/messages", responses={200: {"model": MessageObject}})
async def messages(request: Request) -> Response:
    """Answer a conversation, as Anthropic's API has it."""
    served = served_by(request)
    with counting_refusals(served), naming(MessagesRequest):
        parsed = await read_body(request, MessagesRequest)
        body, chat = parsed.body, parsed.body.chat()
        jobs, thinking = await plan(served, chat, parsed.prompts[0], Caller(request.receive))
    generation = Generation(served, f"msg_{request_id(request)}", arrival(request), jobs, body.cache_salt)
    segments = Segments(served.conversations.answer(chat, thinking))
    renderer = MessagesRenderer(served, generation.request_id, segments, body.return_stages)
    return (StreamReply if body.stream else JsonReply)(generation, renderer)


@routes.post("/v1/messages/count_tokens", responses={200: {"model": Counted}})
async def count_tokens(request: Request) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    with counting_refusals(served_by(request)):
        return Response(await read_question(request, CountRequest), media_type="application/json")
