"""Prompts that read dequantized pages, interpreted by Triton, agree with FP64 attention wherever a prompt is cut."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hack_kernels.base import PageFormat
from hack_kernels.float_format import FloatFormat
from hack_kernels.group_format import GroupFormat, Grouping
from hack_kernels.hack_format import Arithmetic, HackFormat
from hack_kernels.level_format import LevelFormat, Scales
from hack_kernels.row_format import RowFormat
from hack_kernels.triton import dense
from hack_kernels.triton.backend import TritonBackend
from hack_kernels.window import Window

from bench.gpu.dense_checks import check_dense

FORMATS = [
    LevelFormat(64, 32, 3, 2, Window(1, 2)),
    HackFormat(64, 32),
    RowFormat(64, 32),
    LevelFormat(80, 64, 4, 3),
    LevelFormat(128, 32, 8, 3, Window(0, 1), Scales.FP8),
    HackFormat(96, 32, 2, 4, arithmetic=Arithmetic.ASYMMETRIC),
    HackFormat(256, 32, 4, 4),
    FloatFormat(64, page_tokens=32),
    GroupFormat(64, Grouping(4, 32, by_channel=True), Grouping(4, 32), 32),
    RowFormat(64, 32, window=Window(1, 2)),
]


@pytest.mark.parametrize("group", [3, 1, 8])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_prompts_see_what_the_format_says_wherever_they_are_cut(fmt: PageFormat, group: int) -> None:
    torch.manual_seed(group)
    check_dense(fmt, group, TritonBackend(torch.device("cpu")), heads=1)


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[3], FORMATS[6]], ids=str)
def test_targets_that_copy_no_blocks_see_the_same(fmt: PageFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(dense, "copies_blocks", lambda: False)
    check_dense(fmt, 3, TritonBackend(torch.device("cpu")), heads=1)


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[7], FORMATS[2]], ids=str)
def test_a_batch_that_holds_too_much_is_attended_to_in_parts(fmt: PageFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are two sequences at a time, and five pages at a time if the definition dequantizes."""
    torch.manual_seed(7)
    monkeypatch.setattr(dense, "HELD_TOKENS", 2 * 6 * fmt.page_tokens)
    monkeypatch.setattr(dense, "READ_PAGES", 5)
    check_dense(fmt, 3, TritonBackend(torch.device("cpu")), heads=1)
