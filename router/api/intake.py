"""The intake of a request before its route: it is timed and named, its key is checked, its body read and bounded."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import Final, TypeVar
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hackkv.errors import Cancelled
from node.spans import NoSpans, ProcessTracer
from router.api.caller import Caller
from router.api.errors import HTTPError, error_response, is_anthropic, status_of
from router.api.served import ServedModel
from router.api.strict import Data, Prompted
from router.api.texts import Question
from router.api.tokenize import Parsed
from router.api.tracing import answering
from transport.trail import TRACEPARENT

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/"})
"""Paths that need no key: the probes, and the page itself, which holds no data."""
PAGE_FILES = "/page/"
"""The page's files lie below this path. They need no key either."""
REQUEST_ID: Final = "x-request-id"
ANTHROPIC_REQUEST_ID: Final = "request-id"
"""The header in which Anthropic's clients look for the request's id."""
API_KEY: Final = "x-api-key"
"""The header in which Anthropic's clients show the key."""
_NAMED: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
"""Request ids that are taken over from clients; they go into logs and to the nodes."""

BodyT = TypeVar("BodyT", bound=Prompted)


class Gate:
    """Outermost ASGI layer: notes the time of arrival, names the request and its client, and asks for the API key."""

    def __init__(
        self,
        app: ASGIApp,
        refused: Callable[[int], None],
        api_keys: tuple[str, ...] = (),
        spans: ProcessTracer | None = None,
        route_of: Callable[[Scope], str] = lambda scope: "",
    ) -> None:
        """`refused` is called with the status of every refusal, 401; `route_of` tells the template of a path."""
        self._app, self._refused, self._route_of = app, refused, route_of
        self._spans = spans or NoSpans()
        self._expected = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer 401. Every answer carries the request's id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"")
        if not key and (alone := headers.get(API_KEY.encode())):
            key = b"Bearer " + alone
        request_id, arrived = name_request(scope), perf_counter()
        scope["state"].update(arrived=arrived, client_id=self._client_of(scope, key))
        with answering(scope, self._route_of(scope), request_id, arrived, self._spans) as call:

            async def send_named(message: Message) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                    answered = MutableHeaders(scope=message)
                    answered.update(dict.fromkeys(name_headers(scope["path"]), request_id))
                    if call.traceparent:
                        answered[TRACEPARENT] = call.traceparent
                await send(message)

            if is_open(scope["path"]) or self._knows(key):
                await self._app(scope, receive, send_named)
                return
            await self._refuse(scope, receive, send_named, request_id)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        error = HTTPError(401, "a valid API key is required", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        self._refused(error.status)
        await error_response(error, scope["path"], request_id)(scope, receive, send)

    def _client_of(self, scope: Scope, key: bytes) -> str:
        """The name of a request's client: its address and, where keys are checked, its key."""
        host = (scope.get("client") or ("", 0))[0]
        return f"{host} {key.decode('latin-1')}" if self._expected else str(host)

    def _knows(self, given: bytes) -> bool:
        """Whether a key is known. Each comparison takes constant time. The scheme's case does not matter (RFC 9110)."""
        scheme, _, key = given.partition(b" ")
        is_known = any(hmac.compare_digest(key, expected) for expected in self._expected)
        return not self._expected or (scheme.lower() == b"bearer" and is_known)


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def name_request(scope: Scope) -> str:
    """A request's id: the client's own if it can go into a log as it is, else a new one. A request keeps it."""
    given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
    name: str = scope.setdefault("state", {}).setdefault(
        "request_id", given if _NAMED.fullmatch(given) else uuid4().hex
    )
    return name


def name_headers(path: str | None) -> tuple[str, ...]:
    """Headers of an answer that carry its request's id; a request without a path may be of either API."""
    return (REQUEST_ID, ANTHROPIC_REQUEST_ID) if path is None or is_anthropic(path) else (REQUEST_ID,)


def request_id(request: Request) -> str:
    """The request's id, as in the answer's header and in log lines. Every sequence's id contains it."""
    named: str = request.state.request_id
    return named


def arrival(request: Request) -> float:
    """The time when the request's first byte was seen, on `perf_counter`."""
    arrived: float = request.state.arrived
    return arrived


def served_by(request: Request) -> ServedModel:
    """The model with which the application was built."""
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


async def read_body(request: Request, kind: type[BodyT]) -> Parsed[BodyT]:
    """Read, bound, check and tokenize a request body.

    Raises `HTTPError` (404 model, 408 slow, 413 large, 415 not JSON), `RequestError` naming the field, `Cancelled`, and
    what `Prompts.parse` raises.
    """
    async with _received(request) as data:
        return await served_by(request).prompts.parse(kind, data, Caller(request.receive), request.state.client_id)


async def read_question(request: Request, kind: type[Question]) -> bytes:
    """Read, bound, check and answer a body that asks for no generation. Raises what `read_body` raises."""
    async with _received(request) as data:
        return await served_by(request).prompts.answer(kind, data, Caller(request.receive), request.state.client_id)


@asynccontextmanager
async def _received(request: Request) -> AsyncIterator[Data]:
    """The whole body, whose bytes are accounted for until the end of the block."""
    _check_media_type(request)
    with served_by(request).bodies.account(request.state.client_id) as claim:
        try:
            async with asyncio.timeout(request.app.state.body_s):
                data = await _read(request, request.app.state.max_body_bytes, claim)
        except TimeoutError as error:
            raise HTTPError(408, "the request body did not arrive in time", "request_timeout") from error
        except ClientDisconnect as error:
            raise Cancelled("the client left") from error
        yield data


def _check_media_type(request: Request) -> None:
    """JSON only: a browser sends other kinds to any host, for any page, without asking that host first.

    A client that names no kind is trusted, unless it is a browser, which names its page (`Origin`).
    """
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = given == "application/json" or (given.startswith("application/") and given.endswith("+json"))
    if not (is_json or (not given and "origin" not in request.headers)):
        raise HTTPError(
            415, f"the body is {given or 'of no kind'!r:.200}; send application/json", "unsupported_media_type"
        )


async def _read(request: Request, limit: int, claim: Callable[[int], None]) -> Data:
    too_large = HTTPError(413, f"the request body is larger than {limit} bytes", "body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    data = bytearray()
    async for part in request.stream():
        if len(data) + len(part) > limit:
            raise too_large
        claim(len(part))
        data += part
    return data
