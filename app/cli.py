"""The command `hackkv`. Signals are handled from here on; everything that takes time is imported after that."""

from __future__ import annotations

from importlib import import_module

from app.interrupt import Interrupt


def app() -> None:
    """Run the command line; ends with `SystemExit`."""
    Interrupt()
    import_module("app.commands").app()
