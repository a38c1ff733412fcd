"""Settings and hooks for all tests."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from hackkv.codecs import CODECS, Preset
from tests.codecs.calibrations import remove_files
from tests.codecs.toy8 import make_toy8
from tests.interpreter import patch_once, remember_types
from tests.kinds import kind_of
from tests.tiers import Slice, thin_out
from tests.toys import make_layered, make_projected, make_with_exact_layer

# Off until `pytest_collection_finish`: imports make no garbage.
gc.disable()

# Tests share few cores with the processes that they start; a second compute thread would mostly wait for the first.
torch.set_num_threads(1)

# When Triton is imported, it decides whether to compile kernels or to interpret them on the CPU. Without a GPU, tests
# interpret. Tests that compile for a GPU do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        interpreter = import_module("triton.runtime.interpreter")
        patch_once(interpreter)
        remember_types(interpreter)


# The time of an example, and of the search for one, depends on the load of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Tests that loop over CODECS also cover formats that differ by layer, a window that no preset has, a layer that is left
# exact under a window, a wire form of variable size, and a codec in one module (CONTRIBUTING.md): one row each.
CODECS["toy-layers"] = Preset(make_layered)
CODECS["rot-window"] = Preset(CODECS["rot-k3v2"].make, {"k_bits": 3, "v_bits": 2, "sink": 1, "recent": 1})
CODECS["rot-exact-layer"] = Preset(make_with_exact_layer, {"k_bits": 3, "v_bits": 2, "sink": 1, "recent": 1})
CODECS["toy-int8"] = Preset(make_toy8)
# `zack` needs a file of projections, and tests of the table have none.
CODECS["zack"] = Preset(make_projected, CODECS["zack"].settings)
if find_spec("zstandard"):
    CODECS["hack-zstd"] = Preset(CODECS["hack"].make, {"wire_form": "zstd"})


def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: one more than cores, since many tests wait for processes that they start; at most 4."""
    return min(4, 1 + len(os.sched_getaffinity(0)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slice`."""
    parser.addoption("--slice", type=Slice.parse, metavar="K/N", help="run the K-th of N parts (tests/tiers.py)")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Delete the files of calibrated codecs. Workers of `-n` end without what `atexit` would run. A part of few tests
    may be empty."""
    remove_files()
    if session.config.getoption("slice") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out grids, and leave the tests of one slice."""
    thin_out((item for item in items if item.get_closest_marker("grid")), kind_of)
    part: Slice | None = config.getoption("slice")
    if part is not None:
        config.hook.pytest_deselected(items=[item for item in items if not part.holds(item.nodeid)])
        items[:] = [item for item in items if part.holds(item.nodeid)]


def pytest_collection_finish() -> None:
    """Freeze modules and tests, which stay until the end: garbage collections need not visit them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze: at the end of Python, extensions count their objects that are left."""
    gc.unfreeze()
