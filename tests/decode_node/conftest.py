"""Every wire, with frames that land at once and frames that land on the thread beside the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from decode_node import landing
from tests.pair import TIMEOUT_S
from tests.wires import WIRES_HERE
from transport.wires import Loopback


@pytest.fixture(params=["at once", "beside the loop"])
def _landing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of these tests are small, so a limit of 0 sends them all to the thread."""
    if request.param == "beside the loop":
        monkeypatch.setattr(landing, "AT_ONCE_BYTES", 0)


@pytest.fixture(params=WIRES_HERE)
async def wire(request: pytest.FixtureRequest, _landing: None) -> AsyncIterator[Loopback]:
    made = Loopback(request.param, TIMEOUT_S)
    yield made
    await made.close()
