"""The decode nodes that receive the KV of one computed prompt, one after another."""

from __future__ import annotations

from uuid import uuid4

from hackkv.errors import NodeLost, Overloaded, TransferError
from hackkv.nodes import NodeInfo
from hackkv.types import DecodeJob
from router.fleet.booking import Booking
from router.fleet.desks import DecodeDesk
from router.fleet.order import Demand
from router.life.decode_leg import DecodeLeg
from router.life.failover import Failovers, Remedy
from router.life.flight import Flight
from transport.base import DecodeNode


class Receivers:
    """Finds a decode node with room and opens its leg. Each leg after the first has a later epoch.

    `current` is the open leg, or None while there is none.
    """

    def __init__(self, flight: Flight, desk: DecodeDesk, failovers: Failovers) -> None:
        self._flight, self._desk, self._failovers = flight, desk, failovers
        self.transfer_id = uuid4().hex
        self.epoch = 0
        self.current: DecodeLeg | None = None

    def address_for(self, prefill: NodeInfo) -> str:
        """The address to which `prefill` can send KV now; empty if no decode node holds room."""
        return self.current.booking.kv_address(prefill) if self.current else ""

    async def find_now(self) -> None:
        """Open a leg if a node has room for it now. Raises `Overloaded` if the line is full too."""
        while self.current is None and (booking := self._desk.try_book(self._demand())):
            await self._open(booking)

    async def find_in_line(self) -> DecodeLeg:
        """Wait in line until a node has room, and open the leg."""
        while self.current is None:
            await self._open(await self._desk.book(self._demand()))
        return self.current

    async def leave(self) -> None:
        """Give the current node up. The next leg belongs to the next epoch."""
        self.epoch += 1
        await self.close()

    async def close(self) -> None:
        """End the current leg, if there is one."""
        self._flight.life.on_stall = None
        if self.current is not None:
            await self.current.close()
            self.current = None

    async def _open(self, booking: Booking[DecodeNode]) -> None:
        """Open the decode stream and wait until the node holds room. If it has none, `current` stays None."""
        flight = self._flight
        emitted = tuple(flight.output.token_ids)
        leg = DecodeLeg(booking, DecodeJob(flight.request, self.transfer_id, self.epoch, emitted))
        try:
            await leg.reserve()
        except Overloaded:
            await leg.close()
        except (NodeLost, TransferError) as error:
            await leg.close()
            self._failovers.avoid.add(leg.node_id)
            self._failovers.survive(error, Remedy.REASSIGNED)
        except BaseException:
            await leg.close()
            raise
        else:
            flight.route.decode_node = leg.node_id
            self.current = leg

    def _demand(self) -> Demand:
        return self._flight.decode_demand(self._failovers.avoid)
