"""The paper's job completion time (JCT), split so that the parts sum to the whole.

The router owns the only clock. A `StageClock` cuts the time since arrival into consecutive *windows*; when a window
ends, the durations that a worker measured inside it go to their stages and what is left over (the network, event
loops, detokenizing) goes to the stage the window was opened with. So the stages sum to the total at every moment,
also for a request that is aborted halfway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from time import perf_counter


class Stage(StrEnum):
    """Stages of a request's life, in order; see the design, section 7."""

    ROUTER_QUEUE = "router_queue"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    SWAP_WAIT = "swap_wait"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    STREAM = "stream"


class SubStage(StrEnum):
    """Parts of stages that are reported beside them and never added to the total."""

    FETCH = "fetch"
    """Part of `prefill_queue`: waiting for pages that come from a decode node."""
    QUANTIZE = "quantize"
    """Part of `prefill`."""
    WIRE_ENCODE = "wire_encode"
    """Part of `prefill`."""
    WIRE_DECODE = "wire_decode"
    """Part of no single stage: frames land while the prompt is computed, while they wait and in the transfer."""
    ATTEND = "attend"
    """Part of `decode`."""
    APPROXIMATION = "approximation"
    """Part of `attend`."""


class StageClock:
    """Splits one request's time into stages, in seconds."""

    def __init__(self, now: Callable[[], float] = perf_counter, start: float | None = None) -> None:
        """`start` is an earlier reading of `now`: the time when the first byte of the request arrived."""
        self._now = now
        self._stopped_at: float | None = None
        self._start = self._mark = now() if start is None else start
        self._open = Stage.ROUTER_QUEUE
        self._spent = dict.fromkeys(Stage, 0.0)
        self.sub_stages = dict.fromkeys(SubStage, 0.0)

    def enter(
        self,
        stage: Stage,
        measured: Mapping[Stage, float] | None = None,
        rest: Stage | None = None,
        parts: Mapping[SubStage, float] | None = None,
    ) -> None:
        """End the window, crediting what workers `measured` in it, and open the next one as `stage`.

        What is left over goes to `rest`, or else to the stage that the window was opened with. Measured durations can
        exceed the window: a worker's clock differs from ours, or the worker began before the event that opened the
        window arrived. Then durations and their `parts` are scaled down by one factor, so that they fit the window and
        each part keeps its share of its stage.
        """
        now = self._read()
        window = now - self._mark
        measured = measured or {}
        total = sum(measured.values())
        scale = min(1.0, window / total) if total > 0 else 0.0
        for name, seconds in measured.items():
            self._spent[name] += seconds * scale
        for part, seconds in (parts or {}).items():
            self.sub_stages[part] += seconds * scale
        self._spent[rest or self._open] += max(0.0, window - total * scale)
        self._mark, self._open = now, stage

    def stages(self) -> dict[Stage, float]:
        """Seconds per stage until now, the open window included."""
        spent = dict(self._spent)
        spent[self._open] += self._read() - self._mark
        return spent

    def stop(self) -> None:
        """Stop the clock, when nobody waits any more: what follows does not count as the request's time."""
        if self._stopped_at is None:
            self._stopped_at = self._now()

    @property
    def total_s(self) -> float:
        """Seconds since the request arrived, or from then until `stop`."""
        return self._read() - self._start

    def _read(self) -> float:
        return self._now() if self._stopped_at is None else self._stopped_at
