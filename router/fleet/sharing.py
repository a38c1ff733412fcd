"""Reports between the processes of one router about their requests, so that each sees the load of all.

A report has what this process has booked on every node, and what it learned of nodes since the last report: that they
live, and which pages they are about to hold. Reports come some milliseconds late. So two processes may choose a node at
the same time; a node that has no room after all refuses, and the request is booked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, Final

from hackkv.page_names import MARK_BYTES
from router.fleet.members import Booked
from router.fleet.membership import Membership

Report = dict[str, Any]
"""`booked`: node -> [tokens, pages, requests]; `spoke`: nodes; `marks`: node -> marks in hex; `waiting`: sequences in
line. Nodes are named by `Member.key`. A report can be written as JSON."""

REPORTS_PER_LEASE: Final = 4
"""Reports that are made in the time of a lease even if nothing changes."""


class Sharing:
    """One process's part in the sharing. Processes are known by their names."""

    def __init__(
        self,
        nodes: Membership,
        in_line: Callable[[], int],
        changed: Callable[[], None],
        ttl_s: float,
        now: Callable[[], float],
    ) -> None:
        """`in_line` counts the sequences of this process that wait for a node. `changed` is called when others may have
        given something back."""
        self._nodes, self._in_line, self._changed, self._now = nodes, in_line, changed, now
        self._period_s, self._due = ttl_s / REPORTS_PER_LEASE, 0.0
        self._last: Report = {}
        self._theirs: dict[str, Report] = {}

    @property
    def waiting(self) -> int:
        """Sequences of other processes in line."""
        return sum(report["waiting"] for report in self._theirs.values())

    def report(self) -> Report | None:
        """The report that others should hear now; None if they know all of it."""
        members, now = self._nodes.members(), self._now()
        booked = {one.key: [one.booked.tokens, one.booked.pages, one.booked.requests] for one in members}
        marks = {one.key: b"".join(one.shared.marks).hex() for one in members if one.shared.marks}
        told = {"booked": booked, "waiting": self._in_line()}
        if told == self._last and not marks and now < self._due:
            return None
        spoke = [one.key for one in members if one.shared.spoke]
        for one in members:
            one.shared.spoke = False
            one.shared.marks.clear()
        self._last, self._due = told, now + self._period_s
        return told | {"marks": marks, "spoke": spoke}

    def take(self, process: str, report: Report) -> None:
        """Another process has made a report."""
        self._theirs[process] = report
        now, spoke, marks = self._now(), frozenset(report["spoke"]), report["marks"]
        for member in self._nodes.members():
            if member.key in spoke:
                member.alive(now)
            if packed := bytes.fromhex(marks.get(member.key, "")):
                expected = [packed[at : at + MARK_BYTES] for at in range(0, len(packed), MARK_BYTES)]
                member.holdings.expect(expected, now)
        self._add_up()

    def lost(self, process: str) -> None:
        """Another process has ended: nodes have let go of its requests."""
        self._theirs.pop(process, None)
        self._add_up()

    def _add_up(self) -> None:
        for member in self._nodes.members():
            shares = (report["booked"].get(member.key) for report in self._theirs.values())
            member.shared.booked = reduce(add, (Booked(*share) for share in shares if share), Booked())
        self._changed()
