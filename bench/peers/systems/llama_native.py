"""llama.cpp compiled for this processor, through llama-cpp-python. `kv` is a type (flash attention) or f16-plain."""

from __future__ import annotations

import llama_cpp as api

from bench.peers.systems.batches import Batches
from bench.peers.systems.child import Job, ask, main

TYPES = {"f16": api.GGML_TYPE_F16, "q8_0": api.GGML_TYPE_Q8_0, "q4_0": api.GGML_TYPE_Q4_0}
SPARE_TOKENS = 256


def load(job: Job) -> Batches:
    """The C interface: llama-cpp-python's own class knows one sequence only."""
    kind, _, attention = job.kv.partition("-")
    api.llama_backend_init()
    model = api.llama_model_load_from_file(job.gguf.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    sequences = len(job.prompts) if job.together else 1
    params.n_ctx = sequences * (max(map(len, job.prompts)) + job.tokens + SPARE_TOKENS)
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = job.threads
    params.type_k = params.type_v = TYPES[kind]
    params.flash_attn_type = int(attention != "plain")
    context = api.llama_init_from_model(model, params)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    memory = api.llama_get_memory(context)
    return Batches(api, context, vocab, lambda: api.llama_memory_clear(memory, True), api.__version__)


if __name__ == "__main__":
    main(lambda job: ask(load(job), job))
