"""One request to an OpenAI-style server: sent, streamed and timed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any

import httpx

from hackkv.errors import ConfigError
from measure.serve.calls import PlannedRequest

_LONGEST_MESSAGE = 300
_IDLE_S = 1.0
"""Seconds for which a connection is kept for the next request. Servers close idle ones after 5 s (uvicorn), and a
request that is sent at that moment would fail."""


class Api(StrEnum):
    """The endpoint to call; the names are those of `vllm bench serve --backend`."""

    COMPLETIONS = "openai"
    CHAT = "openai-chat"

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Server:
    """The server's answer at /v1/models."""

    model: str
    max_tokens: int | None
    """Longest prompt plus output; None if the server does not say."""
    has_stages: bool
    """The server is one of ours and reports where a request's time went."""


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of a call. Durations are seconds from the moment at which the request was sent.

    A call failed if `error` is not empty. Its times then cover the part that had arrived.
    """

    call: PlannedRequest
    sent_s: float = 0.0
    """Seconds from the start of the run."""
    held_s: float = 0.0
    """Seconds that the request waited here, because of --max-concurrency or because the program was late."""
    token_s: list[float] = field(default_factory=list)
    """Arrival of each chunk of text."""
    e2e_s: float = 0.0
    """End of the stream."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    report: dict[str, Any] | None = None
    """Our server's account: stages, sub-stages, bytes."""

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Client:
    """An HTTP client of one server."""

    def __init__(self, url: str, api: Api, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._api = api
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
        )

    async def close(self) -> None:
        """Drop all connections."""
        await self._http.aclose()

    async def server(self) -> Server:
        """Ask which model is served. Raises `ConfigError` if nobody answers as OpenAI does."""
        where = f"{self._http.base_url.join('/v1/models')}"
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"--base-url: nothing answers at {where}: {error or type(error).__name__}") from error
        if response.is_error:
            raise ConfigError(f"--base-url: {where}: {_refusal(response.status_code, response.content)}")
        try:
            first = response.json()["data"][0]
            return Server(str(first["id"]), first.get("max_model_len"), first.get("owned_by") == "hackkv")
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--base-url: {where} does not list models as OpenAI does") from error

    async def send(self, call: PlannedRequest, fields: dict[str, Any]) -> RequestOutcome:
        """Send a call and read its stream to the end. Errors are reported in the outcome."""
        outcome = RequestOutcome(call, prompt_tokens=call.prompt_tokens)
        began = perf_counter()
        try:
            async with self._http.stream("POST", self._api.path, json=self._body(call, fields)) as response:
                if response.status_code == httpx.codes.OK:
                    outcome.error = await self._read(response, outcome, began)
                else:
                    outcome.error = _refusal(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        outcome.e2e_s = perf_counter() - began
        return outcome

    def _body(self, call: PlannedRequest, fields: dict[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any]
        if self._api is Api.CHAT:
            asked = {"messages": [{"role": "user", "content": call.prompt}]}
        else:
            asked = {"prompt": call.prompt}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {**asked, "max_tokens": call.output_tokens, **streamed, **fields}

    async def _read(self, response: httpx.Response, outcome: RequestOutcome, began: float) -> str:
        """Read the stream into `outcome`; returns the error in words, empty if there is none."""
        finished, usage = False, None
        async for event in _events(response):
            if event == b"[DONE]":
                finished = True
                continue
            now = perf_counter() - began
            try:
                chunk = json.loads(event)
                if "error" in chunk:  # the status was sent before, so an event carries the error
                    return _message(chunk)
                for choice in chunk["choices"]:
                    finished |= choice.get("finish_reason") is not None
                    if self._brings_token(choice):
                        outcome.token_s.append(now)
            except (ValueError, LookupError, TypeError, AttributeError):
                return f"not a chunk as OpenAI streams them: {event[:100]!r}"
            usage = chunk.get("usage") or usage
            outcome.report = chunk.get("hackkv") or outcome.report
        if not finished:
            return "the stream broke off"
        if not outcome.token_s:
            return "the stream ended without a token"
        outcome.output_tokens = len(outcome.token_s)
        if usage:
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return ""

    def _brings_token(self, choice: dict[str, Any]) -> bool:
        """Whether a chunk brings a token. All do, except chunks of a chat with only the role or the finish reason."""
        if self._api is Api.COMPLETIONS:
            return True
        delta = choice["delta"]
        if delta.get("content") or delta.get("reasoning_content"):
            return True
        return "content" in delta and "role" not in delta  # a token without visible text


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as it comes.

    Parsed by hand: httpx also ends lines at Unicode's line separators, which JSON may hold unescaped.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(json.loads(body))}"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {body[:_LONGEST_MESSAGE].decode(errors='replace')}"


def _message(body: dict[str, Any]) -> str:
    """The message of an error in OpenAI's envelope."""
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)[:_LONGEST_MESSAGE]
