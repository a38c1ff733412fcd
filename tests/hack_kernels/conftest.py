"""Marks cases of these tests slow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiers import keep_first

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def prompts_on_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backends that are loaded here compute prompts as formats define it. `triton/test_dense.py` makes its own."""
    monkeypatch.setenv("HACKKV_TRITON_PREFILL", "homomorphic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, keep one case of each test that Triton interprets: that is thousands of times slower."""
    if not torch.cuda.is_available():
        keep_first(item for item in items if HERE in item.path.parents and _is_interpreted(item))


def _is_interpreted(item: pytest.Item) -> bool:
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    return item.path.parent.name == "triton" or any(
        "triton" in one for one in parameters if isinstance(one, tuple | str)
    )
