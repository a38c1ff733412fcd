"""The line by which a process says that it is ready. Its reader loads nothing of what the process has loaded."""

from __future__ import annotations

import gc
import json
from typing import Final

NEW_OBJECTS: Final = 5_000
"""New objects until the garbage collector runs. A larger threshold frees cyclic garbage later. With Python's own the
collector runs several times a request."""
YOUNG_RUNS, OLD_RUNS = 1, 100
"""Young collections before a middle one, and middle ones before a full one. A full one looks at all objects, and stops
the event loop the longer the more streams are open. Python's own values make that frequent."""


def settle() -> None:
    """Freeze the objects made until now, which live as long as the process.

    The garbage collector does not scan them again: each scan would stop the event loop for 100 ms. Requests that end
    well leave it nothing (`tests/router/api/test_cost.py`); cycles of those that fail are small and may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_RUNS, OLD_RUNS)


def announce(**fields: str) -> None:
    """Say on standard output that the role is ready, as one JSON line."""
    settle()
    print(json.dumps({"ready": fields}), flush=True)


def read_announcement(line: str) -> dict[str, str] | None:
    """The fields of an `announce` line, or None for any other line."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    ready = message.get("ready") if isinstance(message, dict) else None
    return ready if isinstance(ready, dict) else None
