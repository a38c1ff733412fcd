"""`python xllama.py MODEL.gguf PROMPTS.json TOKENS THREADS [together]`: a request for each prompt.

Each prints a line of JSON; all of them `together` print one line.

Runs in an environment that has the wheel `xllamacpp`. PROMPTS.json is a list of prompts as token ids. KV is FP16;
llama.cpp chooses whether flash attention serves; batches are its defaults.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import xllamacpp


def main(model: str, prompts: list[list[int]], tokens: int, threads: int, together: bool) -> None:
    """Answer each prompt, alone or `together`."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = len(prompts) if together else 1
    params.n_ctx = params.n_parallel * (max(map(len, prompts)) + tokens + 256)
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def answer(prompt: list[int]) -> dict[str, float | str]:
        began = perf_counter()
        said = server.handle_completions(
            {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        times = said["timings"]
        if times["predicted_n"] != tokens or times["prompt_n"] != len(prompt):
            raise RuntimeError(f"not the whole request was computed: {times}")
        return {
            "jct_s": perf_counter() - began,
            "prefill_s": times["prompt_ms"] / 1e3,
            "per_token_s": times["predicted_per_token_ms"] / 1e3,
            "version": xllamacpp.__version__,
        }

    answer(prompts[0][:32])  # warms up
    if not together:
        for prompt in prompts:
            print(json.dumps(answer(prompt)))
        return
    began = perf_counter()
    with ThreadPoolExecutor(len(prompts)) as clients:
        list(clients.map(answer, prompts))
    print(json.dumps({"seconds": perf_counter() - began, "version": xllamacpp.__version__}))


if __name__ == "__main__":
    path, ids, count, cores, *how = sys.argv[1:]
    main(path, json.loads(Path(ids).read_text(encoding="utf-8")), int(count), int(cores), how == ["together"])
