"""`/openapi.json`: every route with its bodies, answers and errors, from the pydantic models.

Routes read their bodies themselves, so FastAPI does not know the bodies. `describe` adds what FastAPI cannot see.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from hackkv import __version__
from router.api.answers import ChatCompletionChunk, Completion, Error
from router.api.errors import is_anthropic
from router.api.intake import is_open
from router.api.messages.answers import AnthropicError, MessageEvent
from router.api.messages.schema import CountRequest, MessagesRequest
from router.api.responses.answers import ResponseEvent
from router.api.responses.schema import ResponsesRequest
from router.api.schema import ChatRequest, CompletionRequest
from router.api.texts import DetokenizeRequest, TokenizeRequest

_BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_EVENTS: Final[dict[str, type[BaseModel]]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/responses": ResponseEvent,
    "/v1/messages": MessageEvent,
}
"""The events of routes that stream."""
_ERRORS: Final = {
    "400": "a field is wrong or not supported; `param` names it",
    "404": "the model does not exist",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "there is no room now; Retry-After says when to come back",
    "500": "the model produced numbers that are none",
    "502": "nodes were lost, and no other could go on",
    "503": "no node of a role is there",
    "504": "a deadline passed",
}
_END: Final = ", or of an Error where the stream breaks off; at last [DONE]."
_ENDS: Final = {
    "/v1/responses": "; the last is response.completed, response.incomplete or response.failed.",
    "/v1/messages": "; the last is message_stop, or error where the stream breaks off.",
}
_OF_NODES: Final = ("500", "502")
"""Errors that only a route that asks nodes makes."""
_NO_KEY: Final = "a valid API key is required"
_REFERENCE: Final = "#/components/schemas/{model}"


def describe(routers: Iterable[APIRouter], needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of these routes. Making it takes 100 ms of one core."""
    app = FastAPI()
    for routes in routers:
        app.include_router(routes)
    with warnings.catch_warnings():  # FastAPI gives GET and HEAD of a probe one id, and complains; ours follow
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        document = get_openapi(title="hackkv", version=__version__, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    models: list[type[BaseModel]] = [*_BODIES.values(), *_EVENTS.values(), Error, AnthropicError]
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(definitions["$defs"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["operationId"] = f"{method}{path}"
            _complete(path, operation, needs_key)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _complete(path: str, operation: dict[str, Any], needs_key: bool) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # FastAPI's own refusal, which no route uses
    if path in _BODIES:
        operation["requestBody"] = {"required": True, "content": {"application/json": _refer(_BODIES[path])}}
        answers.update(
            {status: _error(path, why) for status, why in _ERRORS.items() if path in _EVENTS or status not in _OF_NODES}
        )
    if path in _EVENTS:
        data = f"JSON of a {_EVENTS[path].__name__}{_ENDS.get(path, _END)}"
        event = {
            "type": "object",
            "properties": {"data": {"type": "string", "description": data}},
            "required": ["data"],
        }
        answers["200"]["content"]["text/event-stream"] = {"schema": event}
    if needs_key and not is_open(path):
        operation["security"] = [{"key": []}]
        answers["401"] = _error(path, _NO_KEY)


def _error(path: str, why: str) -> dict[str, Any]:
    kind = AnthropicError if is_anthropic(path) else Error
    return {"description": why, "content": {"application/json": _refer(kind)}}


def _refer(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
