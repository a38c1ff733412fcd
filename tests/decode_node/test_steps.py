"""The loop of steps leaves nothing behind when its node has closed."""

from __future__ import annotations

import asyncio
import gc

import torch

from tests.pair import Pair, greedy, paired, prompt, tiny_worker


async def test_a_closed_node_changes_no_other_thread() -> None:
    async with paired(tiny_worker("fp16")) as nodes:
        await nodes.serve(greedy("r", prompt(1, 20), 2))
    closed = [nodes]
    del nodes
    assert await asyncio.to_thread(_mode_after_collecting, closed)


def _mode_after_collecting(closed: list[Pair]) -> bool:
    """Whether this thread is still in the inference mode that it entered, once the closed nodes are collected."""
    with torch.inference_mode():
        closed.clear()
        gc.collect()
        return torch.is_inference_mode_enabled()
