"""A small cluster in this process. Its nodes follow a script instead of computing.

They keep the contract of `transport.base`. A prefill node keeps the KV until its stream is closed (unless the script
says that its pool is full), and sends it for each assignment. A decode node goes on after the tokens `emitted`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hackkv.errors import HackkvError, HandshakeRefused, NodeLost, Overloaded, TransferError
from hackkv.held import NOTHING_HELD, HeldKv
from hackkv.logprobs import PromptLogprobs
from hackkv.nodes import NodeInfo, WireAddress
from hackkv.types import (
    Decoded,
    DecodeEvent,
    DecodeJob,
    Fingerprint,
    Finish,
    HandedOff,
    HandoffFailed,
    Landed,
    Logprob,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Receipt,
    Request,
    Reserved,
    Role,
    Swapped,
    Token,
)
from router.config import LimitsConfig
from router.fleet.fleet import Fleet
from router.fleet.members import Booked
from router.fleet.order import Demand
from router.fleet.policy import Need

FINGERPRINT = Fingerprint((("codec", "hack"), ("model", "tiny")))
PAGE_TOKENS = 16
LETTER_A = 67
"""Id of "a" in the tokenizer of conftest.py."""

Answer = Callable[[Request], list[int]]


class Point(StrEnum):
    """Points at which a node can be made to wait or fail."""

    PREFILL = "prefill"
    HANDOFF = "handoff"
    RESERVE = "reserve"
    LANDED = "landed"
    TOKEN = "token"
    DECODED = "decoded"


def info(role: Role, node_id: str = "", **changes: object) -> NodeInfo:
    """A node's report. Only decode nodes have pages."""
    node_id = node_id or f"{role}-0"
    pages = 64 if role is Role.DECODE else 0
    values: dict[str, object] = {
        "node_id": node_id, "role": role, "address": node_id, "incarnation": "1", "model": "tiny",
        "fingerprint": FINGERPRINT, "page_tokens": PAGE_TOKENS, "max_context": 512, "total_pages": pages,
        "free_pages": pages, "queued_tokens": 0, "running": 0, "waiting": 0,
    }  # fmt: skip
    values["wires"] = (WireAddress("inproc", str(changes.get("address", node_id))),)
    return NodeInfo(**{**values, **changes})  # type: ignore[arg-type]


def count_up(request: Request) -> list[int]:
    """The default answer: letters that depend only on the prompt, the seed and the index, up to `max_tokens`."""
    base = sum(request.prompt_ids) + 31 * request.sampling.seed
    return [LETTER_A + (base + 7 * index) % 26 for index in range(request.sampling.max_tokens)]


@dataclass(slots=True)
class Script:
    """The behaviour of a cluster's nodes. Each of `faults` is raised once; `gates` hold up every node at a point."""

    answer: Answer = count_up
    faults: dict[tuple[str, Point], list[HackkvError]] = field(default_factory=dict)
    gates: dict[Point, asyncio.Event] = field(default_factory=dict)
    reached: dict[Point, asyncio.Event] = field(default_factory=lambda: {point: asyncio.Event() for point in Point})
    fail_at_token: int = 2
    keeps_kv: bool = True
    """Whether prefill nodes have room to keep KV that was handed off."""
    cached_tokens: int = 0
    """Tokens of each prompt that a prefill node need not compute."""
    held: HeldKv = NOTHING_HELD
    """The part of each prompt that every decode node holds."""
    swaps: bool = False
    """Whether a sequence is swapped out before `fail_at_token`."""
    unscored: int = 0
    """Tokens at a prompt's end whose log-probabilities are missing although the request asks for them."""
    babbles: bool = False
    """Whether nodes also send events out of order."""

    async def meet(self, node_id: str, point: Point) -> None:
        """Reach a point: set its event, wait at its gate, fail if a fault is due."""
        self.reached[point].set()
        await asyncio.sleep(0)
        if gate := self.gates.get(point):
            await gate.wait()
        if faults := self.faults.get((node_id, point)):
            raise faults.pop(0)

    def token(self, request: Request, index: int) -> Token:
        """Token `index` of the answer."""
        ids, sampling = self.answer(request), request.sampling
        finish = None
        if index + 1 >= sampling.max_tokens:
            finish = Finish.LENGTH
        elif index + 1 >= len(ids) and not sampling.ignore_eos:
            finish = Finish.STOP
        token_id = ids[index % len(ids)]
        if sampling.logprobs is None:
            return Token(index, token_id, finish)
        top = tuple(Logprob(token_id + other, -0.5 - other) for other in range(sampling.logprobs))
        return Token(index, token_id, finish, -0.5, top)


_DECODED = Decoded(queue_s=0.0, decode_s=0.0, attend_s=0.0, approximation_s=0.0)


class ScriptedDecode:
    """A decode node that follows a script."""

    def __init__(self, node_id: str, script: Script) -> None:
        self.node_id, self.script = node_id, script
        self.open: dict[str, asyncio.Future[Receipt]] = {}
        self.jobs: list[DecodeJob] = []

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Serve a request once `open[transfer_id]` has a receipt."""
        self.jobs.append(job)
        landing = self.open[job.transfer_id] = asyncio.get_running_loop().create_future()
        try:
            await self.script.meet(self.node_id, Point.RESERVE)
            yield Reserved(self.script.held)
            receipt = await landing
            await self.script.meet(self.node_id, Point.LANDED)
            yield Landed(receipt)
            if job.emitted and job.emitted[0] != self.script.token(job.request, 0).token_id:
                raise TransferError("the replay has diverged")
            index, finish = max(1, len(job.emitted)), None
            while finish is None:
                if index == self.script.fail_at_token:
                    if self.script.swaps:
                        yield Swapped()
                    await self.script.meet(self.node_id, Point.TOKEN)
                if self.script.babbles:
                    yield Landed(receipt)
                    yield _DECODED
                token = self.script.token(job.request, index)
                index, finish = index + 1, token.finish
                yield token
            if self.script.babbles:
                yield Swapped()
                yield token
            await self.script.meet(self.node_id, Point.DECODED)
            yield _DECODED
        finally:
            del self.open[job.transfer_id]

    async def describe(self) -> NodeInfo:
        """Report."""
        return info(Role.DECODE, self.node_id)


class ScriptedPrefill:
    """A prefill node that follows a script."""

    def __init__(self, node_id: str, script: Script, decode: dict[str, ScriptedDecode]) -> None:
        self.node_id, self.script, self._decode = node_id, script, decode
        self.open: dict[str, asyncio.Queue[tuple[int, str, HeldKv]]] = {}
        self.jobs: list[PrefillJob] = []

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Yield token 0, then the outcome of a push for each assignment."""
        self.jobs.append(job)
        assigned = self.open[job.transfer_id] = asyncio.Queue()
        if job.decode_address:
            assigned.put_nowait((job.epoch, job.decode_address, job.held))
        try:
            await self.script.meet(self.node_id, Point.PREFILL)
            prompt, wanted = job.request.prompt_ids, job.request.sampling.prompt_logprobs
            logprobs = PromptLogprobs()
            if wanted is not None:
                logprobs.extend((-1.0, [(1, -0.5)] * wanted) for _ in prompt[1 : len(prompt) - self.script.unscored])
            token = self.script.token(job.request, 0)
            computed = len(prompt) - self.script.cached_tokens
            prefilled = Prefilled(token, 0.0, 0.0, 0.0, computed, logprobs)
            yield prefilled
            if self.script.babbles:
                yield prefilled
            while job.handoff and token.finish is None:
                yield await self._push(job, *await assigned.get())
                if not self.script.keeps_kv:
                    return
        finally:
            del self.open[job.transfer_id]

    async def _push(self, job: PrefillJob, epoch: int, address: str, held: HeldKv) -> HandedOff | HandoffFailed:
        try:
            await self.script.meet(self.node_id, Point.HANDOFF)
            landing = self._decode[address.removeprefix("inproc://")].open.get(job.transfer_id)
            if landing is None or landing.done():  # the decode node has ended the call, or has the KV
                raise HandshakeRefused("unknown transfer")
        except TransferError as error:
            return HandoffFailed(epoch, error.code, str(error))
        receipt = replace(receipt_for(job), held_tokens=held.pages * PAGE_TOKENS)
        landing.set_result(receipt)
        return HandedOff(receipt, 0.0, 0.0, 0, epoch)

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name a decode node."""
        if transfer_id not in self.open:
            raise HandshakeRefused("unknown transfer")
        self.open[transfer_id].put_nowait((epoch, decode_address, held))

    async def describe(self) -> NodeInfo:
        """Report."""
        return info(Role.PREFILL, self.node_id)


def receipt_for(job: PrefillJob) -> Receipt:
    """A receipt with the bytes of two-bit codes."""
    tokens = len(job.request.prompt_ids)
    return Receipt(job.transfer_id, tokens, (("k_codes", 2 * tokens), ("v_codes", 3 * tokens)), 7, 32 * tokens, 0.0)


class Cluster:
    """A fleet of scripted nodes, reached by their names."""

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        pages: int = 64,
        max_waiting: int = 100,
    ) -> None:
        self.script = Script()
        self.decode = {f"d{i}": ScriptedDecode(f"d{i}", self.script) for i in range(decode)}
        self.prefill = {f"p{i}": ScriptedPrefill(f"p{i}", self.script, self.decode) for i in range(prefill)}
        self.now = 0.0
        self.fleet = Fleet(
            self.prefill.__getitem__,
            self.decode.__getitem__,
            3.0,
            LimitsConfig(max_waiting=max_waiting),
            now=lambda: self.now,
        )
        self._pages = pages

    async def join(self) -> Cluster:
        """Register every node. A repeat renews the leases."""
        for node_id in (*self.prefill, *self.decode):
            await self.report(node_id)
        return self

    async def report(self, node_id: str, **changes: object) -> None:
        """Let one node register or renew its lease."""
        await self.fleet.nodes.register(self.info(node_id, **changes))

    def info(self, node_id: str, **changes: object) -> NodeInfo:
        """A node's report, with `changes`."""
        if node_id in self.prefill:
            return info(Role.PREFILL, node_id, **changes)
        pages = {"total_pages": self._pages, "free_pages": self._pages}
        return info(Role.DECODE, node_id, **{**pages, **changes})

    @property
    def jobs(self) -> list[PrefillJob]:
        """All jobs of the prefill nodes, node by node."""
        return [job for node in self.prefill.values() for job in node.jobs]

    def demand(self, tokens: int) -> Demand:
        """The demand of the next request. It takes all of its room when it lands."""
        return Demand(Need(tokens, tokens), self.fleet.next_serial())

    def fail(self, node_id: str, point: Point, *errors: HackkvError) -> None:
        """Make a node fail with each of `errors` in turn when it reaches a point."""
        self.script.faults.setdefault((node_id, point), []).extend(errors or (NodeLost(f"{node_id} died"),))

    def overload(self, *node_ids: str) -> None:
        """Make nodes report once that they have no room."""
        for node_id in node_ids:
            point = Point.PREFILL if node_id in self.prefill else Point.RESERVE
            self.fail(node_id, point, Overloaded("full"))

    def gate(self, point: Point) -> asyncio.Event:
        """Hold up all nodes at a point until the returned event is set."""
        gate = self.script.gates[point] = asyncio.Event()
        return gate

    @property
    def nodes(self) -> list[ScriptedPrefill | ScriptedDecode]:
        """The nodes of both roles."""
        return [*self.prefill.values(), *self.decode.values()]

    @property
    def open(self) -> list[str]:
        """The ids of the transfers that are open on the nodes."""
        return [transfer_id for node in self.nodes for transfer_id in node.open]

    def assert_idle(self) -> None:
        """Assert that no transfer is open on any node, and every load counter is back at zero."""
        assert self.open == []
        assert all(member.booked == Booked() for member in self.fleet.nodes.members())
        assert self.fleet.waiting == 0


async def settled(work: Awaitable[None]) -> None:
    """Wait for work, and for callbacks that it left to the event loop."""
    await work
    await asyncio.sleep(0)
