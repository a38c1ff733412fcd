"""What happens to a request before its route: the clock starts, the key is checked, the body is read and bounded."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hackkv.errors import Cancelled
from router.api.errors import HTTPError, error_response, from_validation, status_of
from router.api.schema import Generate
from router.api.served import ServedModel

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/"})
"""Paths that need no key: the probes, and the page itself, which holds no data."""
PAGE_FILES = "/page/"
"""The page's files lie below this path. They need no key either."""

BodyT = TypeVar("BodyT", bound=Generate)


class Gate:
    """Outermost ASGI layer: notes the time of arrival and asks for the API key."""

    def __init__(self, app: ASGIApp, refused: Callable[[int], None], api_keys: tuple[str, ...] = ()) -> None:
        """`refused` is called with the status of every refusal, 401."""
        self._app, self._refused = app, refused
        self._expected = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer 401."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["arrived"] = perf_counter()
            if not _is_open(scope["path"]) and not self._knows(dict(scope["headers"]).get(b"authorization", b"")):
                error = HTTPError(
                    401, "a valid API key is required", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                self._refused(error.status)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: bytes) -> bool:
        """Compares with every key, each in constant time. The scheme's case does not matter (RFC 9110, 11.1)."""
        scheme, _, key = given.partition(b" ")
        is_known = any(hmac.compare_digest(key, expected) for expected in self._expected)
        return not self._expected or (scheme.lower() == b"bearer" and is_known)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def arrival(request: Request) -> float:
    """When the request's first byte was seen, on `perf_counter`."""
    arrived: float = request.state.arrived
    return arrived


def served_by(request: Request) -> ServedModel:
    """What the application was built with."""
    served: ServedModel = request.app.state.served
    return served


@contextmanager
def counting_refusals(served: ServedModel) -> Iterator[None]:
    """Count a request that is refused in the body of `with`, where it has no sequence yet."""
    try:
        yield
    except Exception as error:
        served.metrics.refused(status_of(error))
        raise


async def read_body(request: Request, kind: type[BodyT], model_name: str) -> BodyT:
    """Read, bound and check a request body.

    Raises `HTTPError` (404 model, 408 slow, 413 large), `RequestError` naming the field, or `Cancelled`.
    """
    try:
        async with asyncio.timeout(request.app.state.body_s):
            data = await _read(request, request.app.state.max_body_bytes)
    except TimeoutError as error:
        raise HTTPError(408, "the request body did not arrive in time", "request_timeout") from error
    except ClientDisconnect as error:
        raise Cancelled("the client left") from error
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise from_validation(error) from error
    if body.model not in (None, model_name):
        message = f"the model {body.model!r} does not exist; this is {model_name!r}"
        raise HTTPError(404, message, "model_not_found", "model")
    return body


async def _read(request: Request, limit: int) -> bytes:
    too_large = HTTPError(413, f"the request body is larger than {limit} bytes", "body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise too_large
    return bytes(data)
