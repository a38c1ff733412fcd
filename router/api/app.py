"""The HTTP application, put together."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hackkv import __version__
from hackkv.errors import HackkvError
from node.spans import ProcessTracer
from router.api import chat, completions, page, probes, questions
from router.api.description import describe
from router.api.errors import HTTPError, error_response, handle
from router.api.intake import ANTHROPIC_REQUEST_ID, REQUEST_ID, Gate
from router.api.messages import route as messages
from router.api.responses import route as responses
from router.api.served import ServedModel
from router.config import DeadlinesConfig, LimitsConfig
from transport.trail import TRACEPARENT

_DEADLINES, _LIMITS = DeadlinesConfig(), LimitsConfig()
ROUTES = tuple(module.routes for module in (completions, chat, responses, messages, questions, probes, page))
"""Everything that is served."""
_POSTED = {
    route.path: route.endpoint
    for routes in ROUTES
    for route in routes.routes
    if isinstance(route, APIRoute) and route.methods == {"POST"} and not route.param_convertors
}
"""Endpoints that take a body, by their paths."""
_REFUSALS = {404: ("no such route", "not_found"), 405: ("method not allowed", "method_not_allowed")}


@cache
def document(needs_key: bool) -> dict[str, Any]:
    """The document of `/openapi.json`."""
    return describe(ROUTES, needs_key)


def build_app(
    served: ServedModel,
    api_keys: tuple[str, ...] = (),
    max_body_bytes: int = _LIMITS.max_body_bytes,
    body_s: float = _DEADLINES.body_s,
    cors_origins: tuple[str, ...] = (),
    spans: ProcessTracer | None = None,
) -> ASGIApp:
    """The HTTP API of one served model. Browsers may call it from pages at `cors_origins`."""
    app = FastAPI(title="hackkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.served, app.state.max_body_bytes, app.state.body_s = served, max_body_bytes, body_s
    for routes in ROUTES:
        app.include_router(routes)
    app.add_exception_handler(HackkvError, handle)
    app.add_exception_handler(HTTPError, handle)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(Exception, handle)
    described = document(bool(api_keys))  # made now: it takes too long for the event loop
    app.openapi = lambda: described  # type: ignore[method-assign]
    gate = Gate(Direct(app), served.metrics.refused, api_keys, spans, _route_of)
    if not cors_origins:
        return gate
    # Outside the gate: a browser asks for permission without the key.
    return CORSMiddleware(
        gate,
        cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients send more of their own than can be listed, and what is not known has no effect
        expose_headers=[REQUEST_ID, ANTHROPIC_REQUEST_ID, TRACEPARENT, "retry-after"],
    )


class Direct:
    """Calls the endpoints that take bodies, and leaves everything else to FastAPI.

    These endpoints need FastAPI for their description only. Else all pieces of an answer would pass through its layers.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. As with FastAPI, an error is answered if nothing has been sent; a fault is raised again."""
        endpoint = _POSTED.get(scope.get("path", ""))
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        request, started = Request(scope, receive, send), False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await endpoint(request)
            await response(scope, receive, noting)
        except Exception as error:
            if started:
                raise
            await (await handle(request, error))(scope, receive, send)
            if not isinstance(error, HackkvError | HTTPError):
                raise


def _route_of(scope: Scope) -> str:
    """The template of the route that a path belongs to; empty if there is none."""
    if scope["path"] in _POSTED:
        return str(scope["path"])
    found = (
        route.path
        for routes in ROUTES
        for route in routes.routes
        if isinstance(route, Route | APIRoute) and route.matches(scope)[0] is not Match.NONE
    )
    return next(found, "")


async def _refuse(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in our envelope."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message, code = _REFUSALS.get(status, (detail, "refused"))
    path = request.url.path
    told = HTTPError(status, f"{message}: {request.method} {path}", code, headers=headers)
    return error_response(told, path, getattr(request.state, "request_id", ""))
