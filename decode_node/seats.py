"""The sequences and plans of a decode node's scheduler. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, TypeVar

from decode_node.pages import Grant, PagePool
from hackkv.page_names import PageName

Owner = TypeVar("Owner")


class Place(Enum):
    """The place of a sequence's KV."""

    LANDING = auto()
    """A handoff writes the KV."""
    DEVICE = auto()
    LEAVING = auto()
    """The KV is on the way to host memory."""
    HOST = auto()
    RETURNING = auto()
    """The KV is on the way back."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Seat(Generic[Owner]):
    """One admitted sequence."""

    owner: Owner
    rows: int
    """Rows in its cache: one for each token, less the evicted ones."""
    limit: int
    """The most rows that its cache may come to hold."""
    grant: Grant | None
    place: Place = Place.LANDING
    order: int = 0
    """Order of landing."""
    pending: int = 1
    """Tokens to run until the next one can be chosen; more than one in a replay."""
    host_bytes: int = 0
    loading: bool = False
    """Whether some of its pages are on the way from host memory. Until then its grant is not given back."""
    busy: bool = False
    """Whether it is in the step that runs now."""

    def reach(self, steps: int) -> int:
        """Rows in the cache after its replay and `steps` more steps, at most `limit`."""
        return min(self.limit, self.rows + self.pending - 1 + steps)

    @property
    def held_grant(self) -> Grant:
        """The grant. Every sequence of a plan has one."""
        assert self.grant is not None
        return self.grant

    @property
    def pages(self) -> int:
        """Pages that it holds on the device."""
        return len(self.grant.pages) if self.grant else 0


def publish(pool: PagePool, seat: Seat[Any], names: Sequence[PageName]) -> None:
    """Name a sequence's first pages, which are sealed. It must be in no step. A sequence that has left is ignored."""
    if seat.grant is not None and seat.place in (Place.LANDING, Place.DEVICE):
        seat.grant = pool.publish(seat.grant, names)


def give_back(pool: PagePool, seat: Seat[Any]) -> None:
    """Give back a sequence's grant, if it has one."""
    if seat.grant is not None:
        pool.give_back(seat.grant)
        seat.grant = None


class StepShare(NamedTuple, Generic[Owner]):
    """A sequence's share of a step: `rows` rows, and the choice of a token after them unless they are a replay."""

    seat: Seat[Owner]
    rows: int
    replay: bool


class Plan(NamedTuple, Generic[Owner]):
    """One step, and the copies that run beside it."""

    shares: list[StepShare[Owner]]
    leaving: list[Seat[Owner]]
    returning: list[Seat[Owner]]
