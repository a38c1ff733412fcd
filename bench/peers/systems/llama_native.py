"""llama.cpp compiled for this processor, through llama-cpp-python."""

from __future__ import annotations

from typing import Any

import llama_cpp as api

from bench.peers.systems.batches import Batches
from bench.peers.systems.child import Job, ask, main


def load(job: Job) -> Batches:
    """The loaded system. The memory of one context is emptied before each request."""

    def clear(context: Any) -> None:
        api.llama_memory_clear(api.llama_get_memory(context), True)

    return Batches(api, job, "flash_attn_type", clear, api.__version__)


if __name__ == "__main__":
    main(lambda job: ask(load(job), job))
