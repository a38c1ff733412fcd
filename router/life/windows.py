"""The time of one attempt, divided among stages."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from hackkv.timing import Stage, StageClock, SubStage
from hackkv.types import Decoded, HandedOff, Prefilled, Receipt
from router.life.lifecycle import Lifecycle


class AttemptWindows:
    """Cuts an attempt into windows of the request's clock, and credits each with what workers measured in it.

    Time that no worker measured goes to `stream`, the router's own stage, if the workers of the window have reported.
    Otherwise it goes to the stage of the request's state. A context manager: the last window ends with the attempt.
    """

    def __init__(self, clock: StageClock, life: Lifecycle) -> None:
        self._clock, self._life = clock, life
        self._measured: dict[Stage, float] = {}
        self._parts: dict[SubStage, float] = {}
        self._told = False

    def __enter__(self) -> Self:
        self._clock.enter(Stage.ROUTER_QUEUE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rest = Stage.STREAM if self._told else self._life.stage
        self._clock.enter(Stage.STREAM, self._measured, rest, self._parts)

    def dispatched(self) -> None:
        """The prompt is on its way to a prefill node."""
        self._clock.enter(Stage.PREFILL)

    def prefilled(self, event: Prefilled) -> None:
        """Token 0 is here."""
        measured = {Stage.PREFILL_QUEUE: event.queue_s, Stage.PREFILL: event.prefill_s}
        parts = {
            SubStage.FETCH: event.fetch_s,
            SubStage.QUANTIZE: event.quantize_s,
            SubStage.WIRE_ENCODE: event.wire_encode_s,
        }
        self._clock.enter(Stage.TRANSFER, measured, Stage.STREAM, parts)

    def handed_off(self, event: HandedOff) -> None:
        """A push ended well."""
        self._measured[Stage.SWAP_WAIT] = self._measured.get(Stage.SWAP_WAIT, 0.0) + event.swap_wait_s
        self._measured[Stage.TRANSFER] = event.transfer_s

    def landed(self, receipt: Receipt) -> None:
        """The KV is in a decode node's pages; the node decoded it while it came."""
        self._clock.sub_stages[SubStage.WIRE_DECODE] += receipt.wire_decode_s

    def decoded(self, event: Decoded) -> None:
        """The decode node's account."""
        self._measured[Stage.SWAP_WAIT] = self._measured.get(Stage.SWAP_WAIT, 0.0) + event.swapped_s
        self._measured[Stage.DECODE_QUEUE] = event.queue_s
        self._measured[Stage.DECODE] = event.decode_s
        self._parts = {SubStage.ATTEND: event.attend_s, SubStage.APPROXIMATION: event.approximation_s}
        self.all_told()

    def all_told(self) -> None:
        """The workers have reported all their time."""
        self._told = True

    def decode_lost(self) -> None:
        """The decode node was lost after token 0, and will not report its time."""
        self._clock.enter(Stage.SWAP_WAIT, self._measured, rest=self._life.stage)

    def decode_replaced(self) -> None:
        """Another decode node gets the KV."""
        self._clock.enter(Stage.TRANSFER)

    def forget(self) -> None:
        """Drop what was reported of a push to a lost decode node."""
        self._measured.clear()
