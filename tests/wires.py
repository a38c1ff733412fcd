"""The wires that this machine can use. Tests loop over them, and say which they leave out and why."""

from __future__ import annotations

import pytest

from hackkv.errors import ConfigError
from transport.link import LINKS
from transport.wires import WIRES


def lacks(name: str) -> str:
    """Why a wire cannot be used here; empty if it can."""
    try:
        WIRES[name].check()
    except ConfigError as error:
        return str(error)
    return ""


_LACKS = {name: lacks(name) for name in WIRES}
USABLE = [name for name in WIRES if not _LACKS[name]]
WIRES_HERE = [
    pytest.param(name, marks=[pytest.mark.skip(reason=why)] if why else []) for name, why in sorted(_LACKS.items())
]
LINKS_HERE = [name for name in USABLE if name in LINKS]
