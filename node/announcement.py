"""The lines by which a process says what it waits for, and that it is ready. A reader of the lines need not load the
modules of the process."""

from __future__ import annotations

import gc
import json
from typing import Any, Final

NEW_OBJECTS: Final = 5_000
"""New objects until the garbage collector runs. A larger threshold frees cyclic garbage later. With Python's default
threshold the collector runs several times per request."""
YOUNG_RUNS, OLD_RUNS = 1, 100
"""Young collections before a middle one, and middle ones before a full one. A full collection visits all objects. The
more streams are open, the longer it stops the event loop. With Python's defaults that is frequent."""


def settle() -> None:
    """Freeze the objects made until now, which live as long as the process.

    The garbage collector does not scan them again: each scan would stop the event loop for 100 ms. Requests that end
    well leave no cycles (`tests/router/api/test_cost.py`). Failed requests leave small cycles, which may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_RUNS, OLD_RUNS)


def announce(**fields: str) -> None:
    """Write one JSON line to standard output: the role is ready."""
    settle()
    print(json.dumps({"ready": fields}), flush=True)


def say(text: str) -> None:
    """Write one JSON line to standard output: why the role is not ready yet."""
    print(json.dumps({"say": text}), flush=True)


def read_announcement(line: str) -> dict[str, str] | None:
    """The fields of an `announce` line, or None for any other line."""
    ready = _message(line).get("ready")
    return ready if isinstance(ready, dict) else None


def read_word(line: str) -> str | None:
    """The text of a `say` line, or None for any other line."""
    text = _message(line).get("say")
    return text if isinstance(text, str) else None


def _message(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
