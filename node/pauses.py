"""The pause before a process that ended is started again."""

from __future__ import annotations

RESTART_S, LONGEST_RESTART_S = 1.0, 30.0


class Pauses:
    """Pauses before one process is started again, from `RESTART_S` to `LONGEST_RESTART_S` seconds.

    The pause doubles each time that the process lived no longer than `LONGEST_RESTART_S`.
    """

    def __init__(self) -> None:
        self._next = RESTART_S

    def after(self, lived_s: float) -> float:
        """The pause, in seconds, after the process lived for `lived_s`."""
        if lived_s > LONGEST_RESTART_S:
            self._next = RESTART_S
        pause, self._next = self._next, min(2 * self._next, LONGEST_RESTART_S)
        return pause
