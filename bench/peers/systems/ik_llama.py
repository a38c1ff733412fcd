"""ik_llama.cpp as the wheel `ik-llama-cpp-python` has it. `kv` is f16 or q8_0, with flash attention, or f16-plain."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from ik_llama_cpp import _ctypes_api as api

from bench.peers.systems.batches import Batches
from bench.peers.systems.child import Job, ask, main

TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers; the bindings name none."""
SPARE_TOKENS = 256


def load(job: Job) -> Batches:
    """The bindings' own classes know neither types of KV nor several sequences, so the C interface serves."""
    kind, _, attention = job.kv.partition("-")
    api.llama_backend_init()
    model = api.llama_model_load_from_file(job.gguf.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    sequences = len(job.prompts) if job.together else 1
    params.n_ctx = sequences * (max(map(len, job.prompts)) + job.tokens + SPARE_TOKENS)
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = job.threads
    params.type_k = params.type_v = TYPES[kind]
    params.flash_attn = attention != "plain"
    context = api.llama_init_from_model(model, params)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    clear = partial(api.llama_kv_cache_clear, context)
    return Batches(api, context, vocab, clear, version("ik-llama-cpp-python"))


if __name__ == "__main__":
    main(lambda job: ask(load(job), job))
