"""OpenVINO GenAI, which reads the GGUF file itself: continuous batching over paged KV of type `kv`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.systems.child import Answer, Job, ask, main

CACHE_GB = 2


class OpenVino:
    """Reuse of prefixes is off: every prompt is computed."""

    version = openvino.__version__.partition("-")[0]

    def __init__(self, job: Job) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = max(map(len, job.prompts))  # a prompt takes one step, as by default
        settings = {"INFERENCE_NUM_THREADS": job.threads, "KV_CACHE_PRECISION": job.kv}
        self._pipeline = genai.ContinuousBatchingPipeline(job.gguf, scheduler, "CPU", settings)

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Answer one request. The time to the first token is OpenVINO's own measurement."""
        began = perf_counter()
        [result] = self._generate([prompt], tokens)
        took_s = perf_counter() - began
        prefill_s = result.perf_metrics.get_ttft().mean / 1e3
        return Answer(prefill_s, took_s - prefill_s)

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Answer all requests in one call."""
        self._generate(prompts, tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[genai.EncodedGenerationResult]:
        greedy = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results: list[genai.EncodedGenerationResult] = self._pipeline.generate(ids, [greedy] * len(ids))
        for result in results:
            if (made := len(result.m_generation_ids[0])) != tokens:
                raise RuntimeError(f"{made} tokens, not {tokens}")
        return results


if __name__ == "__main__":
    main(lambda job: ask(OpenVino(job), job))
