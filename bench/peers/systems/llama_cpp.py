"""llama.cpp from the wheel `xllamacpp`: its server, called in this process. Batches are its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import xllamacpp

from bench.peers.systems.child import Answer, Job, ask, main

TYPES = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "q8_0": xllamacpp.ggml_type.GGML_TYPE_Q8_0}
SPARE_TOKENS = 256


class LlamaCpp:
    """The server chooses whether to use flash attention; quantized KV needs it."""

    version = xllamacpp.__version__

    def __init__(self, job: Job) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = job.gguf
        params.n_parallel = len(job.prompts) if job.together else 1
        params.n_ctx = params.n_parallel * (max(map(len, job.prompts)) + job.tokens + SPARE_TOKENS)
        params.cache_type_k = params.cache_type_v = TYPES[job.kv]
        params.verbosity = -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
        self._server = xllamacpp.Server(params)

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Answer one request. Raises `RuntimeError` if the server reused a part of the prompt or stopped early."""
        request = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        began = perf_counter()
        times = self._server.handle_completions({**request, "cache_prompt": False})["timings"]
        took_s = perf_counter() - began
        if times["predicted_n"] != tokens or times["prompt_n"] != len(prompt):
            raise RuntimeError(f"not the whole request was computed: {times}")
        decode_s = times["predicted_ms"] / 1e3
        return Answer(took_s - decode_s, decode_s)

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Send each request from a thread of its own."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            list(clients.map(lambda prompt: self.answer(prompt, tokens), prompts))


if __name__ == "__main__":
    main(lambda job: ask(LlamaCpp(job), job))
