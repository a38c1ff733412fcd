"""ik_llama.cpp from the wheel `ik-llama-cpp-python`."""

from __future__ import annotations

from importlib.metadata import version

from ik_llama_cpp import _ctypes_api as api

from bench.peers.systems.batches import Batches
from bench.peers.systems.child import Job, ask, main


def load(job: Job) -> Batches:
    """The loaded system. With flash attention it fails an assertion for several sequences; without, it serves them."""
    return Batches(api, job, "flash_attn", api.llama_kv_cache_clear, version("ik-llama-cpp-python"))


if __name__ == "__main__":
    main(lambda job: ask(load(job), job))
