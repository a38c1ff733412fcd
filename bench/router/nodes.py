"""A scripted node in a process of its own: `python -m bench.router.nodes prefill|decode --control HOST:PORT --kv FD`.

It has a real gRPC server and computes nothing. A request's seed is the pause between its tokens in milliseconds. In
place of a log-probability, each token carries the time at which it was sent, on the clock that all processes of a
machine share. So a client that asks for `logprobs` can tell how old a token is.

Each node has a process of its own, like a real one: a long prompt's log-probabilities must not delay the tokens of
other requests. The wire between the two nodes is a pipe (`--kv`), on which the prefill node names each transfer whose
KV lands. A node ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from array import array
from collections.abc import AsyncIterator, Callable
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
"""Ids of letters in the vocabulary of the shipped model."""
STEP_S = 0.01
"""Seconds between two steps. As on a real decode node, the tokens of one step leave together."""
RENEW_S = 1.0

Land = Callable[[str], None]
"""Tells the decode node that the KV of a transfer has landed."""


class PacedDecode:
    """A decode node that sends tokens at the pace for which a request asks."""

    role = Role.DECODE

    def __init__(self, node_id: str, max_context: int) -> None:
        self.node_id, self._max_context = node_id, max_context
        self.address = ""
        self._waiting: dict[str, asyncio.Event] = {}
        """Transfer id -> event that is set when its KV has landed."""

    def land(self, transfer_id: str) -> None:
        """Note that the KV of a transfer has landed. An unknown transfer was given up meanwhile."""
        if transfer_id in self._waiting:
            self._waiting[transfer_id].set()

    async def decode(self, job: DecodeJob) -> AsyncIterator[DecodeEvent]:
        """Send token 1 and the later ones, each when it is due."""
        landed = self._waiting[job.transfer_id] = asyncio.Event()
        try:
            yield Reserved()
            await landed.wait()
            yield Landed(receipt(job))
            began, pause_s = monotonic(), job.request.sampling.seed / 1000
            for index in range(1, job.request.sampling.max_tokens):
                await asyncio.sleep(next_step(began + index * pause_s) - monotonic())
                yield token(job.request, index)
            yield Decoded(0.0, 0.0, 0.0, 0.0)
        finally:
            del self._waiting[job.transfer_id]

    async def describe(self) -> NodeInfo:
        """The node's report."""
        return info(self.role, self.node_id, self.address, self._max_context)


class PacedPrefill:
    """A prefill node that computes in no time."""

    role = Role.PREFILL

    def __init__(self, node_id: str, land: Land, max_context: int) -> None:
        self.node_id, self._land, self._max_context = node_id, land, max_context
        self.address = ""
        self._assigned: dict[str, asyncio.Event] = {}

    async def prefill(self, job: PrefillJob) -> AsyncIterator[PrefillEvent]:
        """Send token 0, then hand off."""
        assigned = self._assigned[job.transfer_id] = asyncio.Event()
        if job.decode_address:
            assigned.set()
        try:
            yield Prefilled(token(job.request, 0), 0.0, 0.0, 0.0, len(job.request.prompt_ids), scores(job.request))
            if job.handoff:
                await assigned.wait()
                self._land(job.transfer_id)
                yield HandedOff(receipt(job), 0.0, 0.0, 0, job.epoch)
                await asyncio.Event().wait()  # the KV is kept until the router closes the call
        finally:
            del self._assigned[job.transfer_id]

    async def assign(self, transfer_id: str, epoch: int, decode_address: str, held: HeldKv = NOTHING_HELD) -> None:
        """Assign the decode node; there is only one."""
        self._assigned[transfer_id].set()

    async def describe(self) -> NodeInfo:
        """The node's report."""
        return info(self.role, self.node_id, self.address, self._max_context)


def receipt(job: PrefillJob | DecodeJob) -> Receipt:
    """A receipt for KV without bytes."""
    return Receipt(job.transfer_id, len(job.request.prompt_ids), (), 0, 0, 0.0)


def next_step(due: float) -> float:
    """The end of the step in which something due at `due` is sent, in seconds of `monotonic`."""
    return math.ceil(due / STEP_S) * STEP_S


def token(request: Request, index: int) -> Token:
    """A token that carries the present time as its log-probability."""
    finish = Finish.LENGTH if index + 1 >= request.sampling.max_tokens else None
    asked = request.sampling.logprobs
    token_id = LETTER_A + index % LETTERS
    return Token(index, token_id, finish, None if asked is None else -monotonic(), rivals(asked or 0))


@cache
def rivals(count: int) -> tuple[Logprob, ...]:
    """`count` meaningless alternatives to a token."""
    return tuple(Logprob(LETTER_A + nth, -2.5) for nth in range(count))


def scores(request: Request) -> PromptLogprobs:
    """Meaningless log-probabilities of the prompt, if the request asks for them."""
    width = request.sampling.prompt_logprobs
    if width is None:
        return PromptLogprobs()
    count = len(request.prompt_ids) - 1
    ids = array("I", range(LETTER_A, LETTER_A + width))
    return PromptLogprobs(array("d", [-1.5]) * count, ids * count, array("d", [-2.5]) * (count * width))


def info(role: Role, node_id: str, address: str, max_context: int) -> NodeInfo:
    """The report of a node to the router."""
    pages = PAGES if role is Role.DECODE else 0
    return NodeInfo(
        node_id=node_id, role=role, address=address, incarnation="1", model="bench",
        fingerprint=Fingerprint((("codec", "none"), ("model", "bench"))), page_tokens=PAGE_TOKENS,
        max_context=max_context, total_pages=pages, free_pages=pages, queued_tokens=0, running=0, waiting=0,
        wires=(WireAddress("inproc", address),),
    )  # fmt: skip


async def serve_prefill(control: str, kv: int, max_context: int) -> None:
    """Run a prefill node until standard input ends."""
    pipe = os.fdopen(kv, "wb")
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, pipe)
    node = PacedPrefill("p0", lambda transfer_id: transport.write(f"{transfer_id}\n".encode()), max_context)
    async with RpcServer("127.0.0.1", 0) as server:
        server.add_prefill(node)
        node.address = await server.start()
        await _stay(node, control)


async def serve_decode(control: str, kv: int, max_context: int) -> None:
    """Run a decode node until standard input ends."""
    node, reader = PacedDecode("d0", max_context), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(kv, "rb")
    )

    async def landings() -> None:
        while line := await reader.readline():
            node.land(line.decode().strip())

    async with RpcServer("127.0.0.1", 0) as server:
        server.add_decode(node)
        node.address = await server.start()
        reading = asyncio.create_task(landings())
        await _stay(node, control)
        reading.cancel()


async def _stay(node: PacedPrefill | PacedDecode, control: str) -> None:
    """Register the node, and renew the registration until standard input ends."""
    channels = ChannelPool()
    registry, over = RegistryClient(control, channels), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    try:
        await registry.register(await node.describe())
        announce(node=node.address)
        while not over.is_set():
            await asyncio.sleep(RENEW_S)
            try:
                await registry.register(await node.describe())
            except HackkvError as error:  # the router may be held up; the next report may reach it
                print(f"{node.node_id}: {error}", file=sys.stderr, flush=True)
    finally:
        await channels.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.router.nodes", description=__doc__)
    parser.add_argument("role", type=Role, choices=tuple(Role))
    parser.add_argument("--control", required=True)
    parser.add_argument("--kv", type=int, required=True, help="the end of a pipe")
    parser.add_argument("--max-context", type=int, default=65536)
    arguments = parser.parse_args()
    serve = serve_prefill if arguments.role is Role.PREFILL else serve_decode
    asyncio.run(serve(arguments.control, arguments.kv, arguments.max_context))
