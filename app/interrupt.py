"""Ctrl-C at any moment: one line, exit code 130, and nothing left.

`Interrupt` is made before anything slow is imported. Until there is something to stop, a signal ends the process at
once. Later a signal calls the answer that was set (`answer_with`), once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CODE = 130
"""The exit code of a command that a signal ended."""


class Interrupt:
    """Handles the signals that end a command. Make it in the main thread."""

    installed: ClassVar[Interrupt]
    """The last one made: signals come to the process, not to an object."""

    def __init__(self) -> None:
        self._answer: Callable[[], object] = _leave
        Interrupt.installed = self
        for signum in SIGNALS:
            if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup ignores it, to outlive the terminal
            signal.signal(signum, self._take)

    def answer_with(self, answer: Callable[[], object]) -> None:
        """Call `answer` for the next signal, in the main thread between two of its steps."""
        self._answer = answer

    @staticmethod
    def forget() -> None:
        """Set the default handlers in a fork, as in a new process. Ignored signals stay ignored."""
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.default_int_handler if signum is signal.SIGINT else signal.SIG_DFL)

    def _take(self, signum: int, frame: object) -> None:
        answer, self._answer = self._answer, _ignore  # a second Ctrl-C must not interrupt the stop
        answer()


def _leave() -> None:
    os.write(2, b"hackkv: stopped\n")
    os._exit(CODE)


def _ignore() -> None:
    """Do nothing: the command already stops."""
