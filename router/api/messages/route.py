"""The routes of /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hackkv.types import Sampling
from router.api.intake import counting_refusals, read_question, served_by
from router.api.messages.answers import Counted, MessageObject
from router.api.messages.render import MessagesRenderer
from router.api.messages.schema import CountRequest, MessagesRequest
from router.api.retelling import retell
from router.api.segments import Segments
from router.api.served import ServedModel

routes = APIRouter()


@routes.post("/v1/messages", responses={200: {"model": MessageObject}})
async def messages(request: Request) -> Response:
    """Answer a conversation, as Anthropic's API has it."""
    return await retell(request, MessagesRequest, "msg", _renderer)


@routes.post("/v1/messages/count_tokens", responses={200: {"model": Counted}})
async def count_tokens(request: Request) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    with counting_refusals(served_by(request)):
        return Response(await read_question(request, CountRequest), media_type="application/json")


def _renderer(
    served: ServedModel, body: MessagesRequest, name: str, segments: Segments, sampling: Sampling
) -> MessagesRenderer:
    return MessagesRenderer(served, name, segments, body.return_stages)
