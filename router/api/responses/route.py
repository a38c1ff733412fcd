"""The routes of /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.responses.answers import ResponseObject
from router.api.responses.render import ResponsesRenderer
from router.api.responses.schema import ResponsesRequest
from router.api.retelling import retell

routes = APIRouter()


@routes.post("/v1/responses", responses={200: {"model": ResponseObject}})
async def responses(request: Request) -> Response:
    """Answer a conversation, as OpenAI's newer API has it. Nothing is kept: requests bring the whole conversation."""
    return await retell(request, ResponsesRequest, "resp", ResponsesRenderer)
