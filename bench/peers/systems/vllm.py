"""vLLM's CPU backend, called in this process. It reads no GGUF, so its weights have 16 bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import vllm

from bench.peers.systems.child import Answer, Job, ask, main

CACHE_GB = 2
SPARE_TOKENS = 64


class Vllm:
    """Reuse of prefixes is off: every prompt is computed."""

    version = vllm.__version__

    def __init__(self, job: Job) -> None:
        cores = f"0-{job.threads - 1}"
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(CACHE_GB),
            VLLM_CPU_OMP_THREADS_BIND=cores,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        self._model = vllm.LLM(
            job.folder,
            dtype="bfloat16",
            kv_cache_dtype=job.kv,
            max_model_len=max(map(len, job.prompts)) + job.tokens + SPARE_TOKENS,
            max_num_seqs=len(job.prompts) if job.together else 1,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Answer one request. The time of decode is vLLM's own measurement."""
        began = perf_counter()
        [output] = self._generate([prompt], tokens)
        took_s = perf_counter() - began
        decode_s = output.metrics.last_token_ts - output.metrics.first_token_ts
        return Answer(took_s - decode_s, decode_s)

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Answer all requests in one call."""
        self._generate(prompts, tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
        greedy = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._model.generate(requests, greedy, use_tqdm=False)


if __name__ == "__main__":
    main(lambda job: ask(Vllm(job), job))
