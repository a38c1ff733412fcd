"""Benches that compute in their own process have the environment of a role."""

from __future__ import annotations

import os
import subprocess
import sys

from app.roles import ENVIRONMENT

CODE = """
import os, sys
from bench.environment import as_a_role
as_a_role()
print(sys.argv[1:], *(os.environ[name] for name in sys.argv[1:]))
"""


def test_a_process_begins_again_with_what_it_lacks() -> None:
    first, *others = ENVIRONMENT
    given = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | {first: "given"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *ENVIRONMENT], env=given, capture_output=True, text=True, check=True, timeout=60
    )
    values = [ENVIRONMENT[name] for name in others]
    assert done.stdout.strip() == " ".join([str(list(ENVIRONMENT)), "given", *values])
