"""Errors as HTTP: an envelope and a status for each class. The envelope is OpenAI's, `{"error": {message, type, param,
code}}`, and below /v1/messages Anthropic's, `{"type": "error", "error": {type, message}}`.

HTTPError         what this API itself refuses: 401, 404, 405, 408, 413, 415; 429 and 503 for connections
RequestError, GuideError 400 | NonFiniteError 500 | Overloaded 429 (Retry-After) | Cancelled 499
Unavailable 503 (Retry-After)
DeadlineExceeded 504 | Unauthorized, NodeLost, TransferError 502 | anything else 500
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from hackkv.errors import (
    Cancelled,
    DeadlineExceeded,
    GuideError,
    HackkvError,
    NodeLost,
    NonFiniteError,
    Overloaded,
    RequestError,
    TransferError,
    Unauthorized,
    Unavailable,
)
from router.watch.metrics import Outcome

log = logging.getLogger(__name__)

_LONGEST = 2000
CLIENT_GONE = 499
"""nginx's status for a client that left. Only logs show it."""


class HTTPError(Exception):
    """This API refuses a request before it reaches the cluster."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}


_STATUS: tuple[tuple[type[HackkvError], int, Outcome], ...] = (
    (RequestError, 400, Outcome.REFUSED),
    (GuideError, 400, Outcome.REFUSED),
    (NonFiniteError, 500, Outcome.FAILED),
    (Overloaded, 429, Outcome.OVERLOADED),
    (Cancelled, CLIENT_GONE, Outcome.CANCELLED),
    (Unavailable, 503, Outcome.OVERLOADED),
    (DeadlineExceeded, 504, Outcome.DEADLINE),
    (Unauthorized, 502, Outcome.FAILED),
    (NodeLost, 502, Outcome.FAILED),
    (TransferError, 502, Outcome.FAILED),
)

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def status_of(error: BaseException) -> int:
    """The HTTP status for an error."""
    if isinstance(error, HTTPError):
        return error.status
    return next((status for cls, status, _ in _STATUS if isinstance(error, cls)), 500)


def outcome_of(error: BaseException) -> Outcome:
    """The metric label for an error."""
    if isinstance(error, HTTPError):
        return Outcome.REFUSED
    return next((outcome for cls, _, outcome in _STATUS if isinstance(error, cls)), Outcome.FAILED)


_ANTHROPIC: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def is_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def anthropic_envelope(error: BaseException, request_id: str = "") -> dict[str, Any]:
    """The `envelope` in Anthropic's shape. Its messages name the field at fault, as ours do."""
    status = status_of(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": envelope(error)["error"]["message"]}}
    return {**body, "request_id": request_id} if request_id else body


def envelope(error: BaseException) -> dict[str, dict[str, str | None]]:
    """The body that goes with an error. The message of an unexpected error is not shown to clients."""
    status, message = status_of(error), shortened(str(error))
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, HTTPError):
        return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}
    if isinstance(error, HackkvError):
        param = error.param if isinstance(error, RequestError) else None
        return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}
    return {"error": {"message": "internal error", "type": kind, "param": None, "code": "internal"}}


def told(error: BaseException, path: str | None, request_id: str = "") -> dict[str, Any]:
    """The body that goes with an error, in the shape of the path's API.

    A connection may be refused before it has named a path (None). Clients of either API can read the body then.
    """
    if path is None:
        return {"type": "error", **envelope(error)}
    return anthropic_envelope(error, request_id) if is_anthropic(path) else envelope(error)


def shortened(message: str) -> str:
    """A message, cut if what it quotes is long."""
    return message if len(message) <= _LONGEST else message[:_LONGEST] + "…"


def error_response(error: BaseException, path: str = "", request_id: str = "") -> Response:
    """An error as a response, in the shape of the path's API."""
    headers = dict(error.headers) if isinstance(error, HTTPError) else {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    # ASCII, because the message may quote the client's text, which may hold characters that UTF-8 cannot encode.
    body = json.dumps(told(error, path, request_id)).encode("ascii")
    return Response(body, status_of(error), headers, media_type="application/json")


async def handle(request: Request, error: Exception) -> Response:
    """Exception handler for everything that a route raises."""
    name = getattr(request.state, "request_id", "")
    if status_of(error) == 500:
        log.error("request %s: %s %s failed", name, request.method, request.url.path, exc_info=error)
    return error_response(error, request.url.path, name)
