"""Decisions that the simulator shares with live nodes load neither torch nor asyncio, and have no clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DECISIONS = (
    "decode_node.kept_pages",
    "decode_node.pages",
    "decode_node.policy",
    "decode_node.scheduler",
    "decode_node.seats",
    "faults.armed",
    "hackkv.footprint",
    "prefill_node.host_pool",
    "prefill_node.prefix_pool",
    "prefill_node.scheduler",
    "router.fleet.policy",
    "router.fleet.order",
)
LOADED = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
    if found := {"torch", "asyncio"} & set(sys.modules):
        sys.exit(f"{name} loads {sorted(found)}")
"""


def test_no_tensor_library_and_no_event_loop_is_loaded() -> None:
    """The test starts another interpreter, since this one has loaded both."""
    done = subprocess.run([sys.executable, "-c", LOADED, *DECISIONS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", DECISIONS)
def test_time_is_an_argument(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not imported & {"time", "datetime"}
