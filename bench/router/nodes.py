"""Scripted nodes in a process of their own: `python -m bench.router.nodes --control HOST:PORT`.

One prefill and one decode node behind real gRPC servers, which compute nothing. A request's seed is the pause between
its tokens in milliseconds. Each token carries the time at which it was sent in place of a log-probability, on the clock
that all processes of a machine share. So a client that asks for `logprobs` can tell how old a token is.

It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from array import array
from collections.abc import AsyncIterator
from functools import cache
from time import monotonic

from hackkv.errors import HackkvError
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
    Landed,
    Logprob,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Receipt,
    Request,
    Reserved,
    Role,
    Token,
)
from node.announcement import announce
from transport.channels import ChannelPool
from transport.rpc_client import RegistryClient
from transport.rpc_server import RpcServer

PAGE_TOKENS, PAGES = 16, 1 << 22
LETTERS, LETTER_A = 26, 38
"""Ids of letters in the vocabulary of the model that ships along."""
STEP_S = 0.01
"""Between two steps. As on a real decode node, tokens of one step leave together."""
RENEW_S = 1.0

Landings = dict[str, asyncio.Future[Receipt]]
"""Transfers that a decode node waits for."""


class PacedDecode:
    """A decode node whose tokens come at the pace that a request asks for."""

    def __init__(self, node_id: str, landings: Landings, max_context: int) -> None:
        self.node_id, self._landings, self._max_context = node_id, landings, max_context
        self.address = ""

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Tokens 1 and on, each when it is due."""
        landing = self._landings[job.transfer_id] = asyncio.get_running_loop().create_future()
        try:
            yield Reserved()
            yield Landed(await landing)
            began, pause_s = monotonic(), job.request.sampling.seed / 1000
            for index in range(1, job.request.sampling.max_tokens):
                await asyncio.sleep(next_step(began + index * pause_s) - monotonic())
                yield token(job.request, index)
            yield Decoded(0.0, 0.0, 0.0, 0.0)
        finally:
            del self._landings[job.transfer_id]

    async def describe(self) -> NodeInfo:
        """Report."""
        return info(Role.DECODE, self.node_id, self.address, self._max_context)


class PacedPrefill:
    """A prefill node that takes no time."""

    def __init__(self, node_id: str, landings: Landings, max_context: int) -> None:
        self.node_id, self._landings, self._max_context = node_id, landings, max_context
        self.address = ""
        self._assigned: dict[str, asyncio.Event] = {}

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Token 0, then the handoff."""
        assigned = self._assigned[job.transfer_id] = asyncio.Event()
        if job.decode_address:
            assigned.set()
        try:
            yield Prefilled(token(job.request, 0), 0.0, 0.0, 0.0, len(job.request.prompt_ids), scores(job.request))
            if job.handoff:
                await assigned.wait()
                receipt = Receipt(job.transfer_id, len(job.request.prompt_ids), (), 0, 0, 0.0)
                self._landings[job.transfer_id].set_result(receipt)
                yield HandedOff(receipt, 0.0, 0.0, 0, job.epoch)
                await asyncio.Event().wait()  # the KV is kept until the router closes the call
        finally:
            del self._assigned[job.transfer_id]

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Name a decode node; there is only one."""
        self._assigned[transfer_id].set()

    async def describe(self) -> NodeInfo:
        """Report."""
        return info(Role.PREFILL, self.node_id, self.address, self._max_context)


def next_step(due: float) -> float:
    """When the step ends that makes what is due then."""
    return math.ceil(due / STEP_S) * STEP_S


def token(request: Request, index: int) -> Token:
    """A token that carries the time."""
    finish = Finish.LENGTH if index + 1 >= request.sampling.max_tokens else None
    asked = request.sampling.logprobs
    token_id = LETTER_A + index % LETTERS
    return Token(index, token_id, finish, None if asked is None else -monotonic(), rivals(asked or 0))


@cache
def rivals(count: int) -> tuple[Logprob, ...]:
    """Alternatives that mean nothing."""
    return tuple(Logprob(LETTER_A + nth, -2.5) for nth in range(count))


def scores(request: Request) -> PromptLogprobs:
    """Those of the prompt, if they are asked for; they mean nothing."""
    width = request.sampling.prompt_logprobs
    if width is None:
        return PromptLogprobs()
    count = len(request.prompt_ids) - 1
    ids = array("I", range(LETTER_A, LETTER_A + width))
    return PromptLogprobs(array("d", [-1.5]) * count, ids * count, array("d", [-2.5]) * (count * width))


def info(role: Role, node_id: str, address: str, max_context: int) -> NodeInfo:
    """What a node tells the router."""
    pages = PAGES if role is Role.DECODE else 0
    return NodeInfo(
        node_id=node_id, role=role, address=address, incarnation="1", model="bench",
        fingerprint=Fingerprint((("codec", "none"), ("model", "bench"))), page_tokens=PAGE_TOKENS,
        max_context=max_context, total_pages=pages, free_pages=pages, queued_tokens=0, running=0, waiting=0,
        wires=(WireAddress("inproc", address),),
    )  # fmt: skip


async def serve(control: str, max_context: int) -> None:
    """Run both nodes until standard input ends."""
    landings: Landings = {}
    prefill, decode = PacedPrefill("p0", landings, max_context), PacedDecode("d0", landings, max_context)
    async with RpcServer("127.0.0.1", 0) as first, RpcServer("127.0.0.1", 0) as second:
        first.add_prefill(prefill)
        second.add_decode(decode)
        prefill.address, decode.address = await first.start(), await second.start()
        channels = ChannelPool()
        registry = RegistryClient(control, channels)
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
        try:
            await registry.register(await prefill.describe())
            await registry.register(await decode.describe())
            announce(prefill=prefill.address, decode=decode.address)
            while not over.is_set():
                await _renew(registry, prefill, decode)
        finally:
            await channels.close()


async def _renew(registry: RegistryClient, prefill: PacedPrefill, decode: PacedDecode) -> None:
    await asyncio.sleep(RENEW_S)
    try:
        await registry.register(await prefill.describe())
        await registry.register(await decode.describe())
    except HackkvError as error:  # a router that is held up; the next report may reach it
        print(f"nodes: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.router.nodes", description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--max-context", type=int, default=65536)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.control, arguments.max_context))
