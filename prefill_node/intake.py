"""Decides which jobs a prefill node accepts. A job is refused for good, for now, or because the node will stop."""

from __future__ import annotations

import asyncio
from collections import Counter

from hackkv.errors import HackkvError, NodeDraining, Overloaded, RequestError
from hackkv.model.config import ModelSpec
from hackkv.types import PrefillJob
from prefill_node.drain_rate import DrainRate
from prefill_node.host_pool import HostPool


class Intake:
    """Refuses jobs, and counts what it refused."""

    def __init__(
        self,
        spec: ModelSpec,
        host: HostPool,
        drain_rate: DrainRate,
        *,
        page_tokens: int,
        num_pages: int,
        queue_tokens: int,
    ):
        """`num_pages` pages of `page_tokens` tokens hold prompts; `queue_tokens` tokens may wait."""
        self._spec, self._host, self.drain_rate = spec, host, drain_rate
        self._page_tokens, self._page_pool_tokens = page_tokens, num_pages * page_tokens
        self._queue_tokens = queue_tokens
        self.draining = asyncio.Event()
        """Set when the node accepts no new job, and never cleared."""
        self.refused: Counter[str] = Counter()
        """Jobs refused, by error code."""

    def check(self, job: PrefillJob, kv_bytes: int, queued_tokens: int) -> None:
        """Accept a job whose KV takes at most `kv_bytes`, behind `queued_tokens` prompt tokens of other jobs.

        Raises `RequestError` if the job can never be served here, `NodeDraining`, or `Overloaded` if the queue is full.
        """
        try:
            self._check_request(job, kv_bytes)
            if self.draining.is_set():
                raise NodeDraining("this prefill node is about to stop")
            num_tokens = len(job.request.prompt_ids)
            if queued_tokens and queued_tokens + num_tokens > self._queue_tokens:
                retry_after_s = self.drain_rate.seconds(kv_bytes)
                raise Overloaded(f"{queued_tokens} prompt tokens wait already", retry_after_s)
        except HackkvError as error:
            self.refused[error.code] += 1
            raise

    def _check_request(self, job: PrefillJob, kv_bytes: int) -> None:
        ids, spec = job.request.prompt_ids, self._spec
        total = len(ids) + job.request.sampling.max_tokens
        if not ids:
            raise RequestError("the prompt is empty", "prompt")
        if min(ids) < 0 or max(ids) >= spec.vocab:
            raise RequestError(f"the prompt holds a token id outside 0..{spec.vocab - 1}", "prompt")
        if total > spec.max_context:
            raise RequestError(f"prompt and output need {total} tokens; the model allows {spec.max_context}", "prompt")
        if len(ids) > self._page_pool_tokens:
            raise RequestError(f"a prompt of {len(ids)} tokens exceeds this node's page pool", "prompt")
        if max(job.held.pages, job.held.exact) * self._page_tokens > len(ids):
            raise RequestError(f"{max(job.held.pages, job.held.exact)} pages are more than the prompt fills", "held")
        if kv_bytes > self._host.capacity_bytes:
            raise RequestError(f"the KV of {len(ids)} tokens exceeds this node's host memory", "prompt")
