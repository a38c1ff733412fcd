"""The page at `/`, and the JSON that it reads.

The page itself is open, since a browser cannot send a key when it follows a link; what it shows is not. It asks for the
key when `/api` does. Nothing on it comes from anywhere else, and the policy that goes with it lets nothing else in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from hackkv import __version__
from hackkv.errors import RequestError
from router.errors import HTTPError
from router.intake import PAGE_FILES, backend_of
from router.members import Member
from transport.base import DecodeNode, PrefillNode

routes = APIRouter()

_FOLDER: Final = Path(__file__).parent / "web"
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES: Final = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _TYPES}
_MAX_DIGITS: Final = 15
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


@routes.get("/api/cluster")
async def cluster(request: Request) -> Response:
    """The fleet now, and samples with a number above `?after=`."""
    backend = backend_of(request)
    fleet, journal = backend.dispatcher.fleet, backend.journal
    return JSONResponse(
        {
            "started": journal.started,
            "at_s": journal.at_s,
            "version": __version__,
            "model": backend.model_name,
            "codec": fleet.codec,
            "max_context": None if fleet.missing else fleet.max_context,
            "missing": fleet.missing,
            "live": journal.live,
            "waiting": fleet.waiting,
            "nodes": [_node(member) for member in fleet.members()],
            "gone": journal.gone(),
            "samples": journal.samples(_after(request)),
        }
    )


@routes.get("/api/requests")
async def requests(request: Request) -> Response:
    """Sequences on their way, and the last that ended with a number above `?after=`. Lengths only, no text."""
    return JSONResponse(backend_of(request).journal.requests(_after(request)))


def _after(request: Request) -> int:
    given = request.query_params.get("after", "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= _MAX_DIGITS):
        raise RequestError(f"after: {given!r} is not the number of a sample or a request", "after")
    return int(given)


def _file(name: str) -> Response:
    if name not in _FILES:
        raise HTTPError(404, f"no such file: {name}", "not_found")
    path = _FILES[name]
    return FileResponse(path, media_type=f"{_TYPES[path.suffix]}; charset=utf-8", headers=_HEADERS)


def _node(member: Member[PrefillNode] | Member[DecodeNode]) -> dict[str, Any]:
    info = member.info
    return {
        "id": info.node_id,
        "role": info.role,
        "address": info.address,
        "suspended": member.health.suspended_until > 0,
        "draining": member.draining,
        "requests": member.requests,
        "tokens": member.tokens,
        "running": info.running,
        "waiting": info.waiting,
        "total_pages": info.total_pages,
        "free_pages": member.free_pages,
        "page_tokens": info.page_tokens,
        "stats": dict(info.stats),
    }
