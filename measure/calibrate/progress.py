"""The progress bar of a calibration."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """A bar for the current phase; silent if there is no terminal."""

    def __init__(self, console: Console, tokens: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        silent = not console.is_terminal
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=silent)
        self._task = self._progress.add_task("tokens", total=tokens)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def next(self, what: str, total: int) -> None:
        """Begin another phase."""
        self._progress.update(self._task, description=what, total=total, completed=0)

    def advance(self, count: int) -> None:
        """Add finished units to the bar."""
        self._progress.update(self._task, advance=count)
