"""The settings that prefill and decode nodes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_node.config import DecodeConfig
from hackkv.config import load
from node.config import NodeConfig
from prefill_node.config import PrefillConfig
from transport.wires import DEFAULT_WIRE


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize(
    ("text", "wires"), [("{}", (DEFAULT_WIRE,)), ("wire: grpc", ("grpc",)), ("wire: [fast, grpc]", ("fast", "grpc"))]
)
def test_a_wire_or_several_in_the_order_of_preference(
    tmp_path: Path, config: type[NodeConfig], text: str, wires: tuple[str, ...]
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(text, encoding="utf-8")
    assert load(config, file).wire == wires
