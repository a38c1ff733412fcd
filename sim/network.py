"""KV on its way: fluid flows that share links, max-min fair.

A flow crosses its sender's line, its receiver's line and its receiver's processing, and has a limit of its own (so many
TCP flows of so many Gbit/s). Whenever a flow starts or ends, the rates of all flows that share a link with it, directly
or through others, are computed anew by progressive filling: all rates rise together until a link is full or a flow is
at its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from sim.network_spec import LinkSharing
from sim.world import World

_EMPTY_BYTES = 1e-3
"""A flow with fewer bytes left counts as over; the rest is rounding."""


@dataclass(slots=True, eq=False)
class SharedLink:
    """A line or a processor that flows share, in bytes per second."""

    name: str
    rate: float
    flows: dict[Flow, None] = field(default_factory=dict)
    carried: float = 0.0
    """Bytes of flows that are over."""


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over `links`, at most `limit` bytes per second."""

    links: tuple[SharedLink, ...]
    limit: float
    on_done: Callable[[], None]
    left: float = 0.0
    total: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    """Version of the planned end that is still valid; earlier plans are ignored."""


class Network:
    """All flows of a cluster."""

    def __init__(self, world: World, sharing: LinkSharing) -> None:
        self._world, self._sharing = world, sharing
        self._queues: dict[SharedLink, list[Flow]] = {}
        self.bytes = 0.0
        """Bytes of all flows that are over."""

    def start(self, flow: Flow, num_bytes: float) -> None:
        """Send `num_bytes` of a flow that has none under way. `flow.on_done` is called when they have arrived."""
        flow.left, flow.total, flow.since = num_bytes, num_bytes, self._world.now
        if num_bytes <= _EMPTY_BYTES:
            self._world.after(0.0, partial(self._ended, flow, flow.version))
        elif self._sharing is LinkSharing.FAIR:
            self._join(flow)
        elif self._sharing is LinkSharing.INDEPENDENT:
            flow.rate = min(flow.limit, *[link.rate for link in flow.links])
            self._plan(flow)
        else:
            queue = self._queues.setdefault(flow.links[0], [])
            queue.append(flow)
            if len(queue) == 1:
                self._join(flow)

    def cancel(self, flow: Flow) -> None:
        """Give up a flow; bytes that have arrived do not count."""
        flow.version += 1
        flow.left = 0.0
        self._leave(flow)

    def _join(self, flow: Flow) -> None:
        flow.since, rate, others = self._world.now, flow.limit, False
        for link in flow.links:
            others = others or bool(link.flows)
            link.flows[flow] = None
            rate = min(rate, link.rate)
        if not others:
            flow.rate = rate
            self._plan(flow)
        else:
            self._set_rates(_connected(flow))

    def _leave(self, flow: Flow) -> None:
        alone = max([len(link.flows) for link in flow.links]) <= 1
        neighbours = None if alone else _connected(flow) - {flow}
        for link in flow.links:
            link.flows.pop(flow, None)
        queue = self._queues.get(flow.links[0])
        if queue and flow in queue:
            first = queue[0] is flow
            queue.remove(flow)
            if first and queue:
                self._join(queue[0])
        if neighbours:
            self._set_rates(neighbours)

    def _set_rates(self, flows: set[Flow]) -> None:
        # The order of a set is not fixed by the seed. Rates do not depend on it, but the order of equal events does.
        ordered = [flow for link in _ordered_links(flows) for flow in link.flows]
        rates = fair_rates(dict.fromkeys(ordered))
        now = self._world.now
        for flow, rate in rates.items():
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (now - flow.since)
            flow.since, flow.rate = now, rate
            self._plan(flow)

    def _plan(self, flow: Flow) -> None:
        flow.version += 1
        self._world.after(max(0.0, flow.left) / flow.rate, partial(self._ended, flow, flow.version))

    def _ended(self, flow: Flow, version: int) -> None:
        if flow.version != version:
            return
        self.bytes += flow.total
        for link in flow.links:
            link.carried += flow.total
        flow.version += 1
        flow.left, flow.rate = 0.0, 0.0
        if flow in flow.links[0].flows:
            self._leave(flow)
        flow.on_done()


def _ordered_links(flows: Iterable[Flow]) -> list[SharedLink]:
    return sorted({link for flow in flows for link in flow.links}, key=lambda link: link.name)


def _connected(flow: Flow) -> set[Flow]:
    """The flow, and all flows that share a link with it, directly or through others."""
    found, todo = {flow}, [flow]
    seen: set[SharedLink] = set()
    while todo:
        for link in todo.pop().links:
            if link not in seen:
                seen.add(link)
                fresh = [other for other in link.flows if other not in found]
                found.update(fresh)
                todo += fresh
    return found


def fair_rates(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Max-min fair rates in bytes per second: a flow can get more only if a flow of no greater rate gets less."""
    open_flows = dict.fromkeys(flows)
    rates: dict[Flow, float] = {}
    links = {link: [0.0, 0] for flow in open_flows for link in flow.links}
    for flow in open_flows:
        for link in flow.links:
            links[link][1] += 1
    while open_flows:
        level = min((flow.limit for flow in open_flows), default=math.inf)
        for link, (taken, count) in links.items():
            if count:
                level = min(level, (link.rate - taken) / count)
        tight = {link for link, (taken, count) in links.items() if count and (link.rate - taken) / count <= level}
        full = [flow for flow in open_flows if flow.limit <= level or any(link in tight for link in flow.links)]
        for flow in full:
            rates[flow] = level
            del open_flows[flow]
            for link in flow.links:
                links[link][0] += level
                links[link][1] -= 1
    return rates
