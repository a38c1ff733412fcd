"""What a scenario file may say.

title: A decode node dies in the middle of an answer
cluster: {prefill: 1, decode: 2}
requests:
  - {name: long, prompt: 200, tokens: 40}
faults:
  rules:
    - {at: decode.token, request: long, nth: 10, do: kill}
expect: {long: complete}
at_least: {hackkv_replayed_tokens_total: 9}
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from faults.plan import FaultPlan
from hackkv.config import Frozen
from transport.delivery import FRAME_TIMEOUT_S
from transport.wires import WIRES


class Setup(Frozen):
    """The machines. Names are prefill-0, decode-0 and so on."""

    prefill: int = Field(default=2, gt=0)
    decode: int = Field(default=2, gt=0)
    codec: str = "hack"
    wire: str = "inproc"
    """The wire of the KV. Wires other than `inproc` have sockets and threads, so they run on the real clock."""
    prefill_pages: int = Field(default=64, gt=0)
    decode_pages: int = Field(default=64, gt=0)
    max_batch: int = Field(default=8, gt=0)
    chunk_tokens: int = Field(default=128, gt=0)
    host_bytes: int = Field(default=64 << 20, gt=0)
    lease_ttl_s: float = Field(default=3.0, gt=0)
    frame_timeout_s: float = Field(default=FRAME_TIMEOUT_S, gt=0)

    @property
    def virtual(self) -> bool:
        """Whether the clock may be virtual."""
        return not WIRES[self.wire].leaves_process

    @field_validator("wire")
    @classmethod
    def _known(cls, wire: str) -> str:
        if wire not in WIRES:
            raise ValueError(f"must be one of {', '.join(WIRES)}")
        return wire


class Ask(Frozen):
    """One request: `prompt` tokens in, at most `tokens` out, sent `at` seconds after the start."""

    name: str
    at: float = Field(default=0.0, ge=0)
    prompt: int = Field(default=100, gt=0)
    tokens: int = Field(default=20, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    text: str = ""
    """Requests of the same text and length have the same prompt. The default is the name."""


class Scenario(Frozen):
    """Machines, requests and faults, and how the requests must end."""

    title: str = ""
    cluster: Setup = Setup()
    requests: tuple[Ask, ...]
    faults: FaultPlan = FaultPlan()
    expect: dict[str, str] = Field(default_factory=dict)
    """Request -> `complete` (the default), `aborted`, or the code of an error (`hackkv.errors`)."""
    failovers: int | None = None
    """The total number that there must be; None allows any number."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """Lower bounds for sums of the nodes' statistics (`NodeInfo.stats`). They show that the fault has happened."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [ask.name for ask in self.requests]
        if len(set(names)) != len(names):
            raise ValueError("two requests have the same name")
        if unknown := set(self.expect) - set(names):
            raise ValueError(f"expect names {', '.join(sorted(unknown))}, which no request is called")
        return self
