"""The line by which a process says that it is ready. Who reads it has no need of what the process has loaded."""

from __future__ import annotations

import gc
import json
from typing import Final

NEW_OBJECTS: Final = 5_000
"""The garbage collector runs when there are as many. By default it runs several times a request; the more there may be,
the longer a large body may stay that belongs to a cycle."""


def settle() -> None:
    """Freeze the objects made until now, which live as long as the process.

    The garbage collector does not scan them again: each scan would stop the event loop for 100 ms. Cycles, which every
    cancelled task group leaves, are then collected before there are many of them. What a request makes is mostly gone
    before so many objects are new that it scans them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


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
