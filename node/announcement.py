"""The line by which a process says that it is ready. Who reads it has no need of what the process has loaded."""

from __future__ import annotations

import gc
import json
from typing import Final

NEW_OBJECTS: Final = 5_000
"""The garbage collector runs when there are as many, and looks at them for 3 ms or so. By default it runs several times
a request; the more there may be, the longer a large body may stay that belongs to a cycle."""
YOUNG_RUNS, OLD_RUNS = 1, 100
"""So often it looks at new objects only, before it looks at those of its last round too; and so often at these, before
it looks at all that there are, for 0.4 s where 2,000 streams are open. By default both are 10, which stopped the event
loop for 50 ms every second."""


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
