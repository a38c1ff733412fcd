"""The environment in which nodes compute, for benches that compute in their own process."""

from __future__ import annotations

import os
import sys

from app.roles import ENVIRONMENT


def as_a_role() -> None:
    """Begin this process again with the variables of a cluster's roles, unless it has them.

    Libraries read them when they are loaded, so this comes before anything is computed. Without them torch's idle
    threads spin: on two cores a prompt then takes a fifth longer, since torch's operators and C++ take turns.
    """
    wanted = {**ENVIRONMENT, **os.environ}
    if wanted != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
