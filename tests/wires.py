"""The wires that this machine can use. Tests loop over them, and report which wires are left out and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hackkv.errors import ConfigError
from tests.transport import fake_nccl
from transport.link import LINKS, LinkKind, link_kind
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
EVERY_LINK: dict[str, Callable[[], LinkKind]] = {name: partial(link_kind, name) for name in LINKS_HERE}
"""Name -> kind of link. Where possible, NCCL's also over a fake library (`fake_nccl`)."""
if fake_nccl.possible():
    EVERY_LINK["nccl-fake"] = fake_nccl.kind
