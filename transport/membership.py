"""A node's side of membership: register with the router, renew the lease, come back after the router was away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from hackkv.errors import DeadlineExceeded, NodeLost
from hackkv.nodes import NodeInfo
from transport.base import Registry
from transport.channels import ChannelPool
from transport.rpc_client import RegistryClient
from transport.trust import EVERYBODY, Trust

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before a router that does not answer is asked again, in seconds."""

LAST_WORD_S = 1.0
"""Seconds that a stopping node waits for its news to reach the router."""


async def stay_member(
    router: str,
    describe: Callable[[], Awaitable[NodeInfo]],
    stop: asyncio.Event,
    trust: Trust = EVERYBODY,
    *,
    news: asyncio.Event | None = None,
) -> None:
    """Keep the node registered with the router at address `router` until `stop` is set. With "" there is no router.

    When `news` is set, the node reports to the router at once, even if `stop` is set at the same time. Otherwise a node
    with nothing to finish would leave unannounced and would get requests until its lease runs out. Raises
    `HandshakeRefused` when the fleet serves something else, `Unauthorized` when the router refuses the token.
    """
    if not router:
        await stop.wait()
        return
    channels, news, told = ChannelPool(trust=trust), news or asyncio.Event(), asyncio.Event()
    tasks = (
        asyncio.create_task(keep_registered(RegistryClient(router, channels), describe, news, told)),
        asyncio.create_task(stop.wait()),
    )
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if news.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await told.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channels.close()


async def keep_registered(
    registry: Registry, describe: Callable[[], Awaitable[NodeInfo]], news: asyncio.Event, told: asyncio.Event
) -> None:
    """Renew the lease three times per term, forever, and once more as soon as `news` is set.

    `told` is set after that extra attempt, even if the router did not answer. Raises `HandshakeRefused` if the fleet
    serves something else.
    """
    registered: bool | None = None  # not asked yet
    while True:
        is_news = news.is_set()
        try:
            lease = await registry.register(await describe())
        except (NodeLost, DeadlineExceeded) as error:
            was, registered = registered, False
            if is_news:
                told.set()
            await asyncio.sleep(RETRY_S)  # a node that ends together with the router does not miss it
            if was is not False:
                log.warning("%s the router: %s", "lost" if was else "waiting for", error)
            continue
        if not registered:
            log.info("registered with the router, lease %.1f s", lease.ttl_s)
        registered = True
        if is_news:
            told.set()
            await asyncio.sleep(lease.ttl_s / 3)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease.ttl_s / 3):
                    await news.wait()
