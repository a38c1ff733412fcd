"""Events of nodes during one attempt, and their effect on the request."""

from __future__ import annotations

import asyncio

from hackkv.types import Decoded, DecodeEvent, HandoffFailed, Landed, Prefilled, PrefillEvent, Swapped, Token
from router.life.decode_leg import DecodeLeg
from router.life.flight import Flight
from router.life.receivers import Receivers
from router.life.states import RequestState
from router.life.windows import AttemptWindows


class News:
    """Takes events of the nodes. An event that comes twice, too late or out of order is counted and changes nothing, so
    no event can ask for a move that the table of states lacks."""

    def __init__(self, flight: Flight, receivers: Receivers, windows: AttemptWindows, has_handoff: bool) -> None:
        self._flight, self._receivers, self._windows = flight, receivers, windows
        self._has_handoff = has_handoff
        self.served = asyncio.Event()
        """Set when the client has all it wants."""

    def take_token0(self, prefilled: Prefilled) -> None:
        """The prompt is computed. The request is served if it ends with token 0."""
        output = self._flight.output
        self._windows.prefilled(prefilled)
        self._flight.route.prefilled = prefilled
        output.deliver(prefilled.token)
        if output.complete or not self._has_handoff:
            self._windows.all_told()
            self.served.set()
        else:
            self._flight.life.catch_up()

    def take_fate(self, fate: PrefillEvent) -> None:
        """A push ended, well or not. If its decode leg is over, that changes nothing."""
        leg = self._receivers.current
        if isinstance(fate, Prefilled) or leg is None or fate.epoch != leg.job.epoch:
            self._stray(fate)
        elif isinstance(fate, HandoffFailed):
            leg.push_failed(fate)
        else:
            self._windows.handed_off(fate)
            leg.push_ended()

    def take_landed(self, landed: Landed, leg: DecodeLeg) -> None:
        """The decode node has the KV."""
        self._flight.route.receipts.append(landed.receipt)
        self._windows.landed(landed.receipt)
        # The last token that the client has would have been the next input anyway.
        self._flight.route.replayed += max(0, len(leg.job.emitted) - 1)
        self._flight.life.ahead(RequestState.LANDED)

    def take(self, event: DecodeEvent) -> bool:
        """Take an event of the decode node after the KV has landed. True when nothing more is needed of the node.

        After the last token the node sends an account of its time. That is needed too, unless the request ended because
        the client wants no more.
        """
        output, life = self._flight.output, self._flight.life
        if isinstance(event, Token) and not output.complete:
            output.deliver(event)
            life.move(RequestState.DECODING if event.finish is None else RequestState.STREAMING)
            return output.complete and event.finish is None
        if isinstance(event, Swapped) and not output.complete:
            life.move(RequestState.SWAPPED)
        elif isinstance(event, Decoded) and output.complete:
            self._windows.decoded(event)
            return True
        else:
            self._stray(event)
        return False

    def _stray(self, event: PrefillEvent | DecodeEvent) -> None:
        self._flight.route.strays[type(event).__name__] += 1
