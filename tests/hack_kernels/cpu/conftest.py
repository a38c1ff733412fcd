"""A backend for each instruction set that this CPU supports."""

from __future__ import annotations

import pytest
from hack_kernels import cpu

from tests.hack_kernels.cpu.cases import ISAS


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> cpu.CpuBackend:
    return cpu.CpuBackend(request.param, threads=2)
