"""When coding pays: the time that it takes against the time that it saves on the link, both measured.

A byte that a link of R bytes a second does not carry saves 1/R seconds. A coder that takes t seconds for a byte at rest
and saves a share w of it pays where w / R > 2 t: decoding counts as much as encoding, although it is faster and runs
beside the link. A link that nothing has passed is taken for fast, so the first frames travel as they rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Final

from hackkv.wire_form import Bytes, WireForm

AUTO: Final = "auto"
"""The setting `wire_form` of a sender that chooses."""
CODER: Final = "zstd"
"""The form in which such a sender codes, where coding pays. `rans` encodes several times as slowly."""
FIRST_BYTES: Final = 64 << 10
"""Bytes at rest that are coded to measure the coder, once the link is measured; about as many are remembered."""
PROBE_EVERY: Final = 16
"""While planes travel uncoded, one in so many is coded all the same, so that the coder's costs stay current."""
PLAUSIBLE: Final = 8.0
"""No plane is coded for that reason if coding would not pay even at so many times its speed."""
MEMORY: Final = 0.5
"""The weight that earlier measurements of a rate keep when another one comes."""


class Rate:
    """Units a second, of which older measurements count less. Read by other threads."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """`amount` units took `seconds`."""
        self._amount = MEMORY * self._amount + amount
        self._seconds = MEMORY * self._seconds + seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._amount > 0

    @property
    def seconds_per_unit(self) -> float:
        """Mean seconds for a unit; 0 where nothing was measured."""
        return self._seconds / self._amount if self._amount else 0.0


class CodingCosts:
    """Costs and savings of coding, per byte at rest, whatever the link. One thread encodes.

    The thread's own processor time counts: what else runs on the machine says nothing about the coder.
    """

    def __init__(self, form: WireForm, now: Callable[[], float] = thread_time) -> None:
        self.form = form
        self._now = now
        self._raw = self._coded = self._seconds = 0.0
        self._seen = 0

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """`WireForm.encode`, measured."""
        if self._seen == 0:
            self.form.encode(plane[:itemsize], itemsize)  # what a thread's first call sets up is no cost of a plane
        began = self._now()
        coded = self.form.encode(plane, itemsize, shape)
        keeps = FIRST_BYTES / (FIRST_BYTES + plane.size)
        self._seen += plane.size
        self._raw = keeps * self._raw + plane.size
        self._coded = keeps * self._coded + (plane.size if coded is None else len(coded))
        self._seconds = keeps * self._seconds + self._now() - began
        return coded

    def pays(self, link: Rate, speedup: float = 1.0) -> bool:
        """Whether coding takes less time than it saves on `link`; True as long as the coder is not measured.

        With `speedup`, whether a coder that is so many times faster would.
        """
        if not link.known:
            return False
        if self._seen < FIRST_BYTES:
            return True
        return (self._raw - self._coded) * link.seconds_per_unit * speedup > 2 * self._seconds


class ChosenForm:
    """Implements `WireForm` for the frames of one handoff: codes where it pays at that moment."""

    def __init__(self, coder: CodingCosts, link: Rate) -> None:
        self.name, self.method = coder.form.name, coder.form.method
        self._coder, self._link = coder, link
        self._passed = 0

    def cap(self, raw_bytes: int) -> int:
        """The form's cap."""
        return self._coder.form.cap(raw_bytes)

    def encode(self, plane: Bytes, itemsize: int, shape: Sequence[int] = ()) -> bytes | None:
        """None where coding does not pay, or shrinks nothing."""
        if not self._coder.pays(self._link):
            self._passed += 1
            if self._passed % PROBE_EVERY or not self._coder.pays(self._link, PLAUSIBLE):
                return None
        return self._coder.encode(plane, itemsize, shape)

    def decode(self, coded: memoryview, plane: Bytes, itemsize: int) -> None:
        """Decode as the form does."""
        self._coder.form.decode(coded, plane, itemsize)
