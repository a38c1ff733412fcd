"""A conversation, and prefill nodes that may fetch it. Fixtures for tests of fetches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from hackkv.model.generate import generate
from hackkv.model.worker import Worker
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt, Token
from prefill_node.fetch_choice import PrefixFetch
from tests.pair import PI, TIMEOUT_S, Pair, Served, exchanged, greedy, paired, prompt
from tests.polling import POLL_S
from transport.base import KvSender, Lend

ANSWER = PI + 7
FEW = ("hack", "rot-k3v2")
"""A codec without exact pages, and one with some."""
FETCHES: dict[str, Any] = {"prefix_fetch": PrefixFetch.ALWAYS, "fetch_s": TIMEOUT_S}


class Between:
    """A prefill node's sender whose fetches come from `lend`, so that a test can change what the decode node lends."""

    def __init__(self, sender: KvSender, lend: Lend) -> None:
        self._sender, self._lend = sender, lend

    async def push(self, address: str, handoff: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        return await self._sender.push(address, handoff, frames)

    def fetch(self, address: str, handoff: Handoff) -> AsyncIterator[KvFrame | HandoffEnd]:
        return self._lend(handoff)

    async def close(self) -> None:
        """Do nothing: the pair closes the sender."""


@asynccontextmanager
async def second_turn(
    worker: Worker, strike: Callable[[Lend], Lend] = lambda lend: lend, **settings: Any
) -> AsyncIterator[tuple[Pair, tuple[int, ...]]]:
    """The prompt of a conversation's second turn, its decode node, and a prefill node that holds none of its pages.

    `strike` wraps the decode node's `Lend`.
    """
    ids = prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        first = await turn(nodes, ids, "first")
        await rows_are_kept(nodes, worker, 1)
        way = Between(nodes.sender, strike(nodes.decode.inbox.lend))
        async with exchanged(replace(nodes, sender=way), worker, **settings) as others:
            yield others, longer(ids, first, 2)
            await others.assert_idle()


async def turn(nodes: Pair, ids: tuple[int, ...], name: str, tokens: int = ANSWER, **sampling: object) -> Served:
    return await nodes.serve(greedy(name, ids, tokens, ignore_eos=True, **sampling))


def cold(worker: Worker, ids: tuple[int, ...], tokens: int = ANSWER) -> list[Token]:
    return generate(worker, greedy("cold", ids, tokens, ignore_eos=True))


def longer(ids: tuple[int, ...], served: Served, number: int) -> tuple[int, ...]:
    return (*ids, *(token.token_id for token in served.tokens), *prompt(number, 9))


async def stat(nodes: Pair, name: str) -> float:
    return dict((*(await nodes.prefill.describe()).stats, *(await nodes.decode.describe()).stats))[name]


async def rows_are_kept(nodes: Pair, worker: Worker, sequences: int) -> None:
    """Wait until the exact rows at the ends of `sequences` sequences are in host memory, if the codec needs them."""
    if worker.codec.window.pages > 1:
        async with asyncio.timeout(TIMEOUT_S):
            while len(nodes.decode.inbox.lender.rows) < sequences:  # noqa: ASYNC110  # no event reports a copy
                await asyncio.sleep(POLL_S)
