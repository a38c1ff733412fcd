"""The metrics of the nodes in `/metrics`, read from their last reports when somebody looks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hackkv.types import Role
from router.fleet.fleet import Fleet

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_COUNTER = "_total"


class FleetGauges(Collector):
    """Gauges that are read from the fleet when somebody looks."""

    def __init__(self, fleet: Fleet, model_name: str, taken: frozenset[str]) -> None:
        """`taken` are names of series that nodes may not use."""
        self._fleet, self._model, self._taken = fleet, model_name, taken

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The series of the fleet as it is now."""
        nodes = GaugeMetricFamily("hackkv_nodes", "Nodes with a live lease, by role (count).", labels=["role"])
        draining = GaugeMetricFamily("hackkv_nodes_draining", "Those that are about to stop (count).", labels=["role"])
        for role in Role:
            members = self._fleet.nodes.members(role)
            nodes.add_metric([role], len(members))
            draining.add_metric([role], sum(member.draining for member in members))
        yield nodes
        yield draining
        yield from self._pages()
        yield from self._queues()
        yield from self._losses()
        yield from self._node_stats()

    def _pages(self) -> Iterator[GaugeMetricFamily]:
        pages = GaugeMetricFamily(
            "hackkv_kv_pages",
            "KV pages by node and state: free and used as last reported, reserved by the router (pages).",
            labels=["node", "role", "state"],
        )
        used, total = 0, 0
        for member in self._fleet.nodes.members():
            info = member.info
            pages.add_metric([info.node_id, info.role, "free"], info.free_pages)
            pages.add_metric([info.node_id, info.role, "used"], info.total_pages - info.free_pages)
            pages.add_metric([info.node_id, info.role, "reserved"], member.load.pages)
            if info.role is Role.DECODE:
                used, total = used + info.total_pages - info.free_pages, total + info.total_pages
        yield pages
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the decode nodes' KV pages in use (1 = all).", labels=["model_name"]
        )
        usage.add_metric([self._model], used / total if total else 0.0)
        yield usage

    def _queues(self) -> Iterator[GaugeMetricFamily]:
        loads = GaugeMetricFamily(
            "hackkv_node_tokens",
            "Tokens of requests that the router has placed on a node: queued (prefill) or outstanding (decode).",
            labels=["node", "role"],
        )
        running, waiting = 0, self._fleet.waiting
        for member in self._fleet.nodes.members():
            loads.add_metric([member.node_id, member.info.role], member.load.tokens)
            running += member.info.running
            waiting += member.info.waiting
        yield loads
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that nodes compute, as last reported (count).", running),
            ("vllm:num_requests_waiting", "Sequences waiting in the router or on nodes (count).", waiting),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def _losses(self) -> Iterator[GaugeMetricFamily]:
        """Losses of the codec, as nodes measured them when they started."""
        for name, text, field in (
            ("kl", "KL divergence of the codec from exact KV, mean over positions (nats).", "kl"),
            ("top1_agreement", "Share of positions whose first choice is that of exact KV (1 = all).", "top1"),
            ("perplexity_ratio", "Perplexity over that with exact KV (ratio).", "perplexity_ratio"),
        ):
            family = GaugeMetricFamily(f"hackkv_codec_{name}", text, labels=["node", "role"])
            for member in self._fleet.nodes.members():
                if member.info.loss is not None:
                    family.add_metric([member.info.node_id, member.info.role], getattr(member.info.loss, field))
            yield family

    def _node_stats(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Series that the nodes reported, under the nodes' own names for them. A name that ends in `_total` is a
        counter, which begins again at 0 when its node restarts."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for member in self._fleet.nodes.members():
            for name, value in member.info.stats:
                if not _METRIC_NAME.fullmatch(name):
                    continue  # one bad name would make the whole page unreadable
                family = families.setdefault(name, self._family(name))
                family.add_metric([member.node_id], value)
        yield from families.values()

    def _family(self, name: str) -> GaugeMetricFamily | CounterMetricFamily:
        stem = name.removesuffix(_COUNTER)
        if not stem.startswith("hackkv_") or stem in self._taken:
            stem = f"hackkv_node_{stem.removeprefix('hackkv_')}"
        kind = CounterMetricFamily if name.endswith(_COUNTER) else GaugeMetricFamily
        return kind(stem, "Reported by the nodes; its name says the unit.", labels=["node"])
