"""The page at `/`, and the JSON that it reads.

The page itself needs no API key, since a browser cannot send one when it follows a link. The data under `/api` do, and
the page asks its user for the key when `/api` wants one. The page loads nothing from other hosts: its content security
policy forbids it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from hackkv import __version__
from hackkv.errors import RequestError
from router.api.answers import Error
from router.api.errors import HTTPError
from router.api.intake import PAGE_FILES, served_by
from router.fleet.membership import AnyMember
from router.watch.account import codec_loss

routes = APIRouter()

_FOLDER: Final = Path(__file__).parent / "web"
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES: Final = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}
_MAX_DIGITS: Final = 15
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {400: {"model": Error}}
_PARAMETERS: Final = {
    "parameters": [
        {
            "name": "after",
            "in": "query",
            "description": "A number: only what came after it.",
            "schema": {"type": "integer", "minimum": 0, "exclusiveMaximum": 10**_MAX_DIGITS},
        }
    ]
}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> Response:
    """The page."""
    return _file("index.html")


@routes.api_route(PAGE_FILES + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def file(name: str) -> Response:
    """A script, a style sheet or a picture of the page."""
    return _file(name)


@routes.get("/api/cluster", responses=_ERRORS, openapi_extra=_PARAMETERS)
async def cluster(request: Request) -> Response:
    """The fleet now, and samples with a number above `?after=`."""
    served = served_by(request)
    fleet = served.dispatcher.fleet
    return JSONResponse(
        {
            **await served.journal.cluster(_after(request)),
            "version": __version__,
            "model": served.name,
            "chat": served.tokenizer.has_chat_template,
            "codec": fleet.nodes.codec,
            "max_context": None if fleet.nodes.missing else fleet.capacity.max_context,
            "missing": fleet.nodes.missing,
            "nodes": [_node(member) for member in fleet.nodes.members()],
        }
    )


@routes.get("/api/requests", responses=_ERRORS, openapi_extra=_PARAMETERS)
async def requests(request: Request) -> Response:
    """Sequences on their way, and the last that ended with a number above `?after=`. Lengths only, no text."""
    return JSONResponse(await served_by(request).journal.requests(_after(request)))


def _after(request: Request) -> int:
    for name in request.query_params:
        if name != "after":
            raise RequestError(f"unknown parameter: {name}", name)
    given = request.query_params.get("after", "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= _MAX_DIGITS):
        raise RequestError(f"after: {given!r} is not the number of a sample or a request", "after")
    return int(given)


def _file(name: str) -> Response:
    if name not in _FILES:
        raise HTTPError(404, f"no such file: {name}", "not_found")
    path = _FILES[name]
    return FileResponse(path, media_type=f"{_TYPES[path.suffix]}; charset=utf-8", headers=_HEADERS)


def _node(member: AnyMember) -> dict[str, Any]:
    info = member.info
    return {
        "id": info.node_id,
        "role": info.role,
        "address": info.address,
        "suspended": member.health.suspended_until > 0,
        "draining": member.draining,
        "requests": member.load.requests,
        "tokens": member.load.tokens,
        "running": info.running,
        "waiting": info.waiting,
        "total_pages": info.total_pages,
        "free_pages": member.free_pages,
        "page_tokens": info.page_tokens,
        "stats": dict(info.stats),
        "codec_loss": codec_loss(info.loss),
    }
