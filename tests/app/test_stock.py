"""Tests of the models that the fork server loads for its forks."""

from __future__ import annotations

import pytest

from app.stock import Stock
from hackkv.errors import ConfigError


def test_nothing_is_loaded_for_a_gpu_whose_context_no_fork_would_survive() -> None:
    """If the server loaded for the GPU, it would report the missing GPU, as it reports the missing model here."""
    stock, codec = Stock(), {"name": "fp16"}
    stock.load({"model": {"device": "cuda:99", "path": "/nowhere"}, "codec": codec})
    with pytest.raises(ConfigError, match="/nowhere"):
        stock.load({"model": {"device": "cpu", "path": "/nowhere"}, "codec": codec})
