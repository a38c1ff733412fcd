"""What every test runs under."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from hackkv.codecs import CODECS, Preset
from tests.codecs.toy8 import make_toy8
from tests.interpreter import patch_once, remember_types
from tests.kinds import kind_of
from tests.tiers import thin_out
from tests.toys import make_layered, make_projected, make_with_exact_layer

# Until `pytest_collection_finish`: what is imported is no garbage.
gc.disable()

# Tests share few cores with the processes that they start; a second compute thread would mostly wait for the first.
torch.set_num_threads(1)

# Triton decides when it is imported whether kernels are compiled or interpreted on the CPU; without a GPU, the latter.
# Tests that compile for a GPU do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        interpreter = import_module("triton.runtime.interpreter")
        patch_once(interpreter)
        remember_types(interpreter)


# How long an example takes, or is looked for, depends on what else the machine does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Tests that loop over CODECS hold it for formats that differ by layer, for another window than the presets have, for a
# layer that is left exact under a window, for a wire form of variable size, and for a codec in one module
# (CONTRIBUTING.md): one row each.
CODECS["toy-layers"] = Preset(make_layered)
CODECS["rot-window"] = Preset(CODECS["rot-k3v2"].make, {"k_bits": 3, "v_bits": 2, "sink": 1, "recent": 1})
CODECS["rot-exact-layer"] = Preset(make_with_exact_layer, {"k_bits": 3, "v_bits": 2, "sink": 1, "recent": 1})
CODECS["toy-int8"] = Preset(make_toy8)
# Projections are nothing without a file, and tests of the table bring none.
CODECS["zack"] = Preset(make_projected, CODECS["zack"].settings)
if find_spec("zstandard"):
    CODECS["hack-zstd"] = Preset(CODECS["hack"].make, {"wire_form": "zstd"})


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than cores, since many tests wait for processes that they start; no more than 4."""
    return min(4, 1 + len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Grids are thinned out."""
    thin_out((item for item in items if item.get_closest_marker("grid")), kind_of)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no collection of garbage has to look at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extensions count what is left of theirs when Python ends."""
    gc.unfreeze()
