"""POST /tokenize and /detokenize, and routes of other servers that are refused with a hint."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.answers import Detokenized, Error, Tokenized
from router.api.errors import HTTPError
from router.api.intake import counting_refusals, read_question, served_by
from router.api.texts import DetokenizeRequest, Question, TokenizeRequest

routes = APIRouter()

_EMBEDDINGS: Final = (
    "this server generates text and makes no embeddings; run a server for an embedding model beside it, and send "
    "/v1/embeddings there"
)
_REFUSED: Final[dict[int | str, dict[str, Any]]] = {404: {"model": Error, "description": "always"}}


@routes.post("/tokenize", responses={200: {"model": Tokenized}})
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, and their number."""
    return await _answered(request, TokenizeRequest)


@routes.post("/detokenize", responses={200: {"model": Detokenized}})
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    return await _answered(request, DetokenizeRequest)


@routes.post("/v1/embeddings", status_code=404, responses=_REFUSED)
async def embeddings(request: Request) -> Response:
    """Refused: this server makes no embeddings."""
    _refuse(request, _EMBEDDINGS)


@routes.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], status_code=404, responses=_REFUSED)
async def kept_responses(request: Request, rest: str) -> Response:
    """Refused: answers are not kept."""
    _refuse(request, "answers are not kept; send the conversation so far as `input` of POST /v1/responses")


def _refuse(request: Request, hint: str) -> NoReturn:
    with counting_refusals(served_by(request)):
        raise HTTPError(404, f"{request.url.path} is not supported: {hint}", "not_supported")


async def _answered(request: Request, kind: type[Question]) -> Response:
    with counting_refusals(served_by(request)):
        return Response(await read_question(request, kind), media_type="application/json")
