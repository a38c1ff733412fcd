"""State that the fork server holds for computing processes: torch, the code of their roles and one loaded model.

Importing this module takes seconds, and a router needs none of it. So the fork server imports it after it has forked
the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import app.check
import decode_node.__main__
import prefill_node.__main__
from hackkv.config import CodecConfig, ModelConfig
from hackkv.model.worker import load_worker
from hackkv.nodes import CodecLoss
from node.shell import Loaded

NODES = {"prefill": prefill_node.__main__.main, "decode": decode_node.__main__.main}


class Stock:
    """One exists per fork server. Nothing here runs on more than one thread before `run`."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        """Number of threads of a process whose settings name none."""
        torch.set_num_threads(1)
        self._loaded: Loaded | None = None

    def load(self, settings: dict[str, Any]) -> None:
        """Load the model that nodes will share. Raises the errors of `load_worker`.

        A model on a GPU is not loaded: CUDA does not survive a fork, so each node loads its own.
        """
        model, codec = ModelConfig(**settings["model"]), CodecConfig(**settings["codec"])
        if model.device != "cpu":
            return
        worker = load_worker(model.model_copy(update={"threads": 1}), codec)
        self._loaded = Loaded(model, codec, worker)

    def run(self, role: str, arguments: Sequence[str], loss: dict[str, Any] | None) -> int:
        """Be `role` until its end, in a forked process; return the exit code."""
        torch.set_num_threads(self._threads)
        if role not in NODES:
            return app.check.main(arguments)
        loaded = self._loaded
        if loaded and loss:
            loaded = replace(loaded, worker=replace(loaded.worker, loss=CodecLoss(**loss)))
        return NODES[role](arguments, loaded)
