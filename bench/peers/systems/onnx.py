"""ONNX Runtime GenAI with a model that its builder makes of the BF16 checkpoint: 4-bit weights, in blocks of 32."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import onnxruntime_genai as genai

from bench.peers.systems.child import Answer, Job, ask, main

BUILD_S = 400.0
BLOCKS = "block_size=32", "is_symmetric=false", "accuracy_level=4", "prune_lm_head=true", "shared_embeddings=false"
"""Weights as in GGUF's Q4_1: blocks of 32 with a minimum, multiplied as INT8. Only the last token gets logits."""


class Onnx:
    """KV has the type of the activations, FP32: the builder has no other type for a processor."""

    version = genai.__version__

    def __init__(self, job: Job) -> None:
        folder = Path(job.cache) / "onnx-int4"
        if not (folder / "genai_config.json").exists():
            _build(job.folder, folder)
        config = genai.Config(str(folder))
        threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": job.threads}}}}
        config.overlay(json.dumps(threads))
        self._model = genai.Model(config)

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Compute the prompt and the first token, then the others."""
        began = perf_counter()
        generator = self._generator([prompt], tokens)
        generator.generate_next_token()
        first = perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return Answer(first - began, perf_counter() - first)

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Answer one batch of prompts of one length."""
        generator = self._generator(prompts, tokens)
        for _ in range(tokens):
            generator.generate_next_token()

    def _generator(self, prompts: Sequence[Sequence[int]], tokens: int) -> genai.Generator:
        length = len(prompts[0]) + tokens
        params = genai.GeneratorParams(self._model)
        params.set_search_options(batch_size=len(prompts), min_length=length, max_length=length, do_sample=False)
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator


def _build(checkpoint: str, folder: Path) -> None:
    """Build the model in a process of its own, since the builder imports torch."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", str(folder)]
    command += ["-p", "int4", "-e", "cpu", "-c", f"{folder}-cache", "--extra_options", *BLOCKS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=BUILD_S)


if __name__ == "__main__":
    main(lambda job: ask(Onnx(job), job))
